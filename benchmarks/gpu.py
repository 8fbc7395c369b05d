"""Shared by benchmarks that run only on a GPU."""

import torch


def require_gpu() -> None:
    """Exit with one sentence if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch finds none here")
