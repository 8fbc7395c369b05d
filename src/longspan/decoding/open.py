"""Choice of the fastest decoder for a model."""

from longspan.contract import Decoder, LanguageModel, State
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.int8 import Int8Decoder
from longspan.decoding.persistent import PersistentDecoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.step_layers import step_layers
from longspan.decoding.stream import StreamDecoder
from longspan.decoding.window import WindowDecoder
from longspan.reading import Reading


def open_decoder(
    model: LanguageModel,
    state: State | None = None,
    *,
    batch: int = 1,
    reading: Reading | None = None,
    int8: bool = False,
) -> Decoder:
    """A decoder that continues from `state`, or starts `batch` new streams.

    It works for every family that predicts the next token. If the fast path supports the model's layers (`step_layers`)
    and all rows have the same length, keys and values are kept in a rolling cache. On CUDA, static steps are captured
    in a CUDA graph.
    `int8` asks for int8 weights and cache on a CPU (`decoding/int8.py`); it is ignored where that is not supported.
    """
    model.require_next_token()
    state = model.initial_state(batch, reading, trainable=False) if state is None else state
    decoder = _open(model, state, int8)
    return GraphDecoder(decoder) if next(model.parameters()).is_cuda else decoder


def _open(model: LanguageModel, state: State, int8: bool) -> Decoder:
    if not model.has_memory(state.reading):
        return WindowDecoder(model, state)
    layers = None if model.training else step_layers(model, state)
    lengths = set(state.length.tolist())
    if layers is None or len(lengths) != 1:
        return StreamDecoder(model, state)
    if int8 and Int8Decoder.supports(model, state, layers):
        return Int8Decoder(model, state, layers, lengths.pop())
    if not FusedDecoder.supports(model, layers):
        return RollingDecoder(model, state, layers, lengths.pop())
    kind = PersistentDecoder if PersistentDecoder.fits(model, state, layers) else FusedDecoder
    return kind(model, state, layers, lengths.pop())
