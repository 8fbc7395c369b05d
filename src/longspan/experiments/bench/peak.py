"""Peak memory of a call."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from longspan.experiments.bench.timing import wait
from longspan.shapes import Tensor

MEANING = {
    "cuda": "peak allocated bytes, less those allocated before the call",
    "cpu": "peak bytes of tensors saved for the backward pass, without weights",
}


def peak_bytes(call: Callable[[], Any], device: torch.device, weights: Iterable[Tensor]) -> int:
    """Peak memory of a call, as defined by MEANING for the kind of device."""
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    saved = SavedTensors(weights)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        call()
    return saved.peak


class SavedTensors:
    """Counts the bytes that autograd saves for the backward pass; shared storage counts once."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self.references: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> "_Handle":
        # Detached: an output saved by its own node would otherwise never be freed.
        return _Handle(self, tensor.detach())

    def unpack(self, handle: "_Handle") -> Tensor:
        return handle.tensor

    def add(self, at: int, size: int) -> None:
        self.references[at] = self.references.get(at, 0) + 1
        if self.references[at] == 1 and at not in self.ignored:
            self.now += size
            self.peak = max(self.peak, self.now)

    def release(self, at: int, size: int) -> None:
        self.references[at] -= 1
        if not self.references[at] and at not in self.ignored:
            self.now -= size


class _Handle:
    def __init__(self, saved: SavedTensors, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.saved, self.tensor, self.storage = saved, tensor, (storage.data_ptr(), storage.nbytes())
        saved.add(*self.storage)

    def __del__(self) -> None:
        self.saved.release(*self.storage)
