"""Generation with sampling: a rolling KV cache against a memory of hidden states.

Hidden states are projected again for every token, as in the public implementations.
"""

import sys
from collections.abc import Iterator

import torch

from longspan.contract import Decoder, LanguageModel
from longspan.decoding.open import open_decoder
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.stream import StreamDecoder
from longspan.experiments.bench.timing import Line, Preset, attention_flops, dense_flops, seconds
from longspan.models.families import build
from longspan.reading import Reading


def measure(preset: Preset, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    for batch, memory in preset.generate:
        torch.manual_seed(0)
        reading = Reading(segment=128, memory=memory)
        model = build("transformer-xl", preset.model, reading).to(device, dtype).eval()
        c = model.config
        with torch.no_grad():
            ours = _rate(open_decoder(model, batch=batch), model, batch, memory, device)
            hidden = StreamDecoder(model, model.initial_state(batch, trainable=True))
            theirs = _rate(hidden, model, batch, memory, device)
        our_flops = dense_flops(model.parameter_count) + attention_flops(c, memory + 1, 3)
        their_flops = our_flops + 4.0 * memory * c.width * c.heads * c.head_size * c.layers
        yield Line(
            f"batch {batch}, memory {memory}",
            "memory as hidden states",
            "tokens/s",
            ours,
            theirs,
            ours * our_flops / 1e12,
            theirs * their_flops / 1e12,
            their_flops / our_flops,
        )


def _rate(decoder: Decoder, model: LanguageModel, batch: int, memory: int, device: torch.device) -> float:
    """Tokens per second of all rows with a full memory. At batch 1: what `Session.write` delivers to its caller."""
    prompt = torch.randint(model.config.vocabulary, (batch, memory + 1), device=device)
    if batch == 1:
        session = Session(model)
        session.decoder = decoder
        session.read(prompt[0].tolist())
        writing = session.write(sys.maxsize, Sampling())
        return 1 / seconds(lambda: next(writing), device)
    next_token = sampler(decoder, Sampling(), torch.Generator(device).manual_seed(0))
    decoder.prefill(prompt[:, :-1])
    token = prompt[:, -1].contiguous()

    def call() -> None:
        nonlocal token
        token = next_token(token)

    return batch / seconds(call, device)
