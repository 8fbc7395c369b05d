"""Generation with sampling: a rolling KV cache against a memory of hidden states.

Hidden states are projected again for every token, as in the public implementations.
"""

from collections.abc import Iterator

import torch

from longspan.contract import Decoder
from longspan.decoding.open import open_decoder
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
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
            ours = _rate(open_decoder(model, batch=batch), batch, memory, c.vocabulary, device)
            hidden = StreamDecoder(model, model.initial_state(batch, trainable=True))
            theirs = _rate(hidden, batch, memory, c.vocabulary, device)
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


def _rate(decoder: Decoder, batch: int, memory: int, vocabulary: int, device: torch.device) -> float:
    """Tokens per second of all rows with a full memory. At batch 1 every token goes to the host, as in a session."""
    next_token = sampler(decoder, Sampling(), torch.Generator(device).manual_seed(0))
    decoder.prefill(torch.randint(vocabulary, (batch, memory), device=device))
    token = torch.zeros(batch, dtype=torch.int64, device=device)

    def call() -> None:
        nonlocal token
        token = next_token(token)
        if batch == 1:
            int(token)

    return batch / seconds(call, device)
