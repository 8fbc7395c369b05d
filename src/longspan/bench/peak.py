"""How much memory a call takes at its peak."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from longspan.bench.timing import wait
from longspan.shapes import Tensor

MEANING = {
    "cuda": "bytes allocated at the peak, beyond those held before the call",
    "cpu": "bytes of saved tensors held at the peak, weights left out",
}


def peak_bytes(call: Callable[[], Any], device: torch.device, weights: Iterable[Tensor]) -> int:
    """What MEANING says for this kind of device."""
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    saved = Saved(weights)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        call()
    return saved.peak


class Saved:
    """Counts the bytes that autograd keeps for a backward pass; storage that several tensors share counts once."""

    def __init__(self, leave_out: Iterable[Tensor] = ()) -> None:
        self.left_out = {tensor.untyped_storage().data_ptr() for tensor in leave_out}
        self.holders: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> "_Held":
        # Detached: an output that its own node saves would keep itself alive.
        return _Held(self, tensor.detach())

    def unpack(self, held: "_Held") -> Tensor:
        return held.tensor

    def take(self, at: int, size: int) -> None:
        self.holders[at] = self.holders.get(at, 0) + 1
        if self.holders[at] == 1 and at not in self.left_out:
            self.now += size
            self.peak = max(self.peak, self.now)

    def let_go(self, at: int, size: int) -> None:
        self.holders[at] -= 1
        if not self.holders[at] and at not in self.left_out:
            self.now -= size


class _Held:
    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.saved, self.tensor, self.place = saved, tensor, (storage.data_ptr(), storage.nbytes())
        saved.take(*self.place)

    def __del__(self) -> None:
        self.saved.let_go(*self.place)
