"""Relative attention against FlexAttention without the relative term: same queries, keys, values and mask, one run.

    python benchmarks/attention.py [--json FILE]

Both sides' TFLOP/s count the products an exact method needs on the pairs the mask lets through: two forward and five
backward for attention, three and eight with the relative term. `ratio` is the rival's time over ours, `by count` what
it would be if both ran at the same rate.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from longspan.kernels.relative_attention import fused

Tensors = tuple[torch.Tensor, ...]
SHAPES = ((512, 64), (2048, 64), (8192, 16))
H, L, D = 8, 512, 64
PRODUCTS = {"forward": (2, 3), "forward and backward": (7, 11)}


def inputs(M: int, B: int, seed: int = 0) -> Tensors:
    """query, key, value, distance, u, w as a layer makes them: heads side by side in memory."""
    torch.manual_seed(seed)
    K = M + L

    def heads(length: int) -> torch.Tensor:
        return torch.randn(B, length, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    biases = torch.randn(2, H, D, device="cuda", dtype=torch.bfloat16)
    distance = torch.randn(H, K, D, device="cuda", dtype=torch.bfloat16)
    return heads(L), heads(K), heads(K), distance, biases[0], biases[1]


def rival(M: int) -> Callable[..., torch.Tensor]:
    mask = create_block_mask(lambda _b, _h, i, j: i + M >= j, None, None, L, M + L, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


def milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def times(attention: Callable[..., torch.Tensor], tensors: Tensors) -> dict[str, float]:
    grad = torch.randn_like(tensors[0])
    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(*tensors))
    both = milliseconds(lambda: torch.autograd.grad(attention(*leaves), leaves, grad))
    return {"forward": forward, "forward and backward": both}


def extra_memory(tensors: Tensors) -> float:
    """Bytes beyond inputs, output and gradients at the peak of a forward and backward, against a [B, H, L, K] bf16."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    grad = torch.randn_like(tensors[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fused.relative_attention(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    kept = sum(t.numel() * t.element_size() for t in (out, *grads))
    scores = leaves[0].numel() // D * leaves[1].shape[2] * 2
    return (torch.cuda.max_memory_allocated() - before - kept) / scores


def measure() -> list[dict[str, float | int | str]]:
    lines: list[dict[str, float | int | str]] = []
    for M, B in SHAPES:
        tensors = inputs(M, B)
        theirs = times(rival(M), tensors[:3])
        ours = times(fused.relative_attention, tensors)
        product = 2 * D * B * H * (L * M + L * (L + 1) // 2)
        memory = extra_memory(tensors)
        for pass_, (few, more) in PRODUCTS.items():
            lines.append(
                {
                    "pass": pass_,
                    "memory": M,
                    "batch": B,
                    "flex_ms": theirs[pass_],
                    "relative_ms": ours[pass_],
                    "flex_tflops": few * product / theirs[pass_] / 1e9,
                    "relative_tflops": more * product / ours[pass_] / 1e9,
                    "ratio": theirs[pass_] / ours[pass_],
                    "ratio_by_count": few / more,
                    "extra_memory_of_scores": memory,
                }
            )
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="also write the table there")
    chosen = arguments.parse_args()
    lines = measure()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {H} heads of {D}, L = {L}")
    for line in lines:
        print(
            "{pass:>20}  memory {memory:5d} batch {batch:3d}  flex {flex_ms:7.3f} ms {flex_tflops:4.0f} TFLOP/s  "
            "relative {relative_ms:7.3f} ms {relative_tflops:4.0f} TFLOP/s  ratio {ratio:.3f} "
            "(by count {ratio_by_count:.2f})  extra memory {extra_memory_of_scores:.1%} of the scores".format(**line)
        )
    if chosen.json is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "H": H, "L": L, "D": D}
        chosen.json.write_text(json.dumps({**about, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
