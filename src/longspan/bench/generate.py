"""Writing one token at a time, sampling included: projected keys and values in a ring, against memory as hidden states,
which are projected anew for every token (what the public code does)."""

from collections.abc import Iterator

import torch

from longspan.bench.timing import Line, Preset, attention_flops, dense_flops, seconds
from longspan.contract import Choosing, Decoder, StreamDecoder
from longspan.generation.sampling import Sampling
from longspan.models.families import build
from longspan.shapes import Tensor


def measure(preset: Preset, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    for batch, memory in preset.generate:
        torch.manual_seed(0)
        model = build("transformer-xl", {**preset.model, "segment": 128, "memory": memory}).to(device, dtype).eval()
        c = model.config
        with torch.no_grad(), model.fixed_weights():
            ours = _rate(model.decoder(batch=batch), batch, memory, c.vocabulary, device)
            hidden = StreamDecoder(model, model.initial_state(batch, projected=False))  # type: ignore[call-arg]
            theirs = _rate(hidden, batch, memory, c.vocabulary, device)
        by_ours = dense_flops(model.parameter_count) + attention_flops(c, memory + 1, 3)
        by_theirs = by_ours + 4.0 * memory * c.width * c.heads * c.head_size * c.layers
        yield Line(
            f"batch {batch}, memory {memory}",
            "memory as hidden states",
            "tokens/s",
            ours,
            theirs,
            ours * by_ours / 1e12,
            theirs * by_theirs / 1e12,
            by_theirs / by_ours,
        )


def _rate(decoder: Decoder, batch: int, memory: int, vocabulary: int, device: torch.device) -> float:
    """Tokens per second over all rows, the memory full; as a session does, one row is told each token."""
    generator, sampling = torch.Generator(device).manual_seed(0), Sampling()
    decoder.read(torch.randint(vocabulary, (batch, memory), device=device))
    token = torch.zeros(batch, dtype=torch.int64, device=device)

    def choose(logits: Tensor) -> Tensor:
        return sampling.choose(logits, generator)

    def step(token: Tensor) -> Tensor:
        return choose(decoder.step(token))

    next_token = decoder.chooser(choose, generator, sampling) if isinstance(decoder, Choosing) else step

    def call() -> None:
        nonlocal token
        token = next_token(token)
        if batch == 1:
            int(token)

    return batch / seconds(call, device)
