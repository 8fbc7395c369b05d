"""A training step of Transformer-XL beside the same model with rotary positions and FlexAttention, in one run.

    python3 benchmarks/train.py [--batch 64] [--segment 512] [--memory 512] [--steps 30] [--json FILE]

The enwik8 12-layer shape, bf16, dropout 0, one CUDA device, torch.compile and fused AdamW on both sides; memory carried
as hidden states and projected anew on both sides. The rival differs in its attention alone: queries and keys are
rotated, and no position term is added.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from longspan.contract import State
from longspan.kernels.relative_attention import FORMS, forced
from longspan.layers.attention import merge_heads
from longspan.models.families import build

SHAPE = {"vocabulary": 205, "layers": 12, "width": 512, "heads": 8, "inner": 2048, "dropout": 0.0}


def rotate(x: Tensor, first: int) -> Tensor:
    """RoPE in halves, positions counted from `first`."""
    half = x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def make_rotary(model: torch.nn.Module, segment: int, memory: int) -> torch.nn.Module:
    """The same model with rotary positions in place of the four-term score."""
    mask = create_block_mask(lambda b, h, q, k: k <= q + memory, None, None, segment, segment + memory, device="cuda")

    def attend_of(attention: torch.nn.Module):
        def attend(query, key, value, position, window=None, first_key=None):
            read = flex_attention(rotate(query, memory), rotate(key, 0), value, block_mask=mask)
            return attention.dropout(attention.output(merge_heads(read)))

        return attend

    model.positions = lambda keys: lambda layer: None
    for layer in model.layers:
        layer.attention.attend = attend_of(layer.attention)
        del layer.distances
    return model


def full_state(model: torch.nn.Module, batch: int, memory: int) -> State:
    """A memory of full size, so that shapes stay the same from the first step on."""
    length = torch.full((batch,), memory, dtype=torch.int64, device="cuda")
    hidden = tuple(torch.randn(batch, memory, 512, device="cuda") for _ in model.layers)
    return State(length, {"hidden": hidden})


def measure(model: torch.nn.Module, args: argparse.Namespace) -> dict[str, float]:
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, fused=True)
    tokens = torch.randint(205, (args.batch, args.segment + 1), device="cuda")

    def objective(x: Tensor, y: Tensor, state: State) -> tuple[Tensor, State]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model.training_loss(x, y, state, 0.0)

    fast = torch.compile(objective, fullgraph=True, dynamic=False)
    state = full_state(model, args.batch, args.memory)
    torch.cuda.reset_peak_memory_stats()

    def step(state: State) -> State:
        loss, state = fast(tokens[:, :-1], tokens[:, 1:], state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return state

    began = time.perf_counter()
    for _ in range(5):
        state = step(state)
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(args.steps):
            state = step(state)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / args.steps)
    seconds = sorted(times)[1]
    return {
        "tokens_per_second": args.batch * args.segment / seconds,
        "step_ms": 1e3 * seconds,
        "spread": max(times) / min(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "warm_up_s": warm,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 64), ("segment", 512), ("memory", 512), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--forms", default="fused")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = {}
    values = {**SHAPE, "segment": args.segment, "memory": args.memory}
    for form in args.forms.split(","):
        if form in FORMS:
            with forced(form):
                rows[form] = measure(build("transformer-xl", values), args)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    rows["rotary"] = measure(make_rotary(build("transformer-xl", values), args.segment, args.memory), args)
    rival = rows["rotary"]
    for row in rows.values():
        row["ratio"] = row["tokens_per_second"] / rival["tokens_per_second"]
        row["memory_ratio"] = row["peak_gib"] / rival["peak_gib"]
    print(
        f"{'':10} {'tokens/s':>10} {'ms/step':>8} {'peak GiB':>9} {'ratio':>6} {'memory':>9} {'spread':>6} {'warm':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:10} {row['tokens_per_second']:>10,.0f} {row['step_ms']:>8.2f} {row['peak_gib']:>9.2f} "
            f"{row['ratio']:>6.3f} {row['memory_ratio']:>9.3f} {row['spread']:>7.3f} {row['warm_up_s']:>7.1f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "args": vars(args) | {"json": None}, "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
