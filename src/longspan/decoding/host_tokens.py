"""Tokens in host memory, written by the device while the host works."""

import torch


class HostTokens:
    """The tokens of two steps: the host reads those of one while the device writes those of the next."""

    def __init__(self, rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.rows = torch.zeros(2, rows, dtype=torch.int64, pin_memory=pinned)
        self.events = [torch.cuda.Event() for _ in range(2)] if pinned else [None, None]

    def launched(self, turn: int) -> torch.cuda.Event | None:
        """To be called when the work that writes row `turn` was launched: the event after it. None on a CPU, where it
        is complete."""
        event = self.events[turn]
        if event is not None:
            event.record()
        return event

    def read(self, turn: int) -> list[int]:
        """Waits for this step, not for later ones."""
        event = self.events[turn]
        if event is not None:
            event.synchronize()
        found: list[int] = self.rows[turn].tolist()
        return found
