"""Long analyses: each runs in a thread of low priority, one segment at a time, with progress and cancel."""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from longspan.errors import LongspanError
from longspan.serving.errors import NOT_FOUND, RATE_LIMIT, ApiError
from longspan.serving.server import Server

MOST_RUNNING = 3
MOST_KEPT = 3
"""Jobs of a kind whose results are kept; the oldest finished one goes first."""
PRIORITY = 10
"""The niceness of the threads: the decode loop goes first."""

JobState = Literal["running", "finished", "cancelled", "failed"]


@dataclass(eq=False)
class Job:
    """`steps` does the work and yields how much of `total` is done; `view` is the result so far."""

    kind: str
    steps: Iterator[int]
    total: int
    view: Callable[[bool], dict[str, Any]]
    """Gets whether the job has finished."""
    subject: Any = None
    name: str = field(default_factory=lambda: f"job_{secrets.token_hex(16)}")
    state: JobState = "running"
    done: int = 0
    error: str = ""
    cancelled: bool = False

    def run(self, server: Server) -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads have a priority of their own on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)
        try:
            for done in self.steps:
                self.done = done
                if self.cancelled or server.closing:
                    self.state = "cancelled"
                    return
            self.state = "finished"
        except LongspanError as error:
            self.error, self.state = str(error), "failed"
        except Exception as error:
            self.error, self.state = f"internal error ({type(error).__name__})", "failed"
            raise

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "id": self.name,
            "kind": self.kind,
            "state": state,
            "done": self.done,
            "total": self.total,
            "error": self.error,
            "result": self.view(state == "finished"),
        }


class Jobs:
    """The jobs of a server by name. Names cannot be guessed, so nobody sees another's text."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.table: dict[str, Job] = {}

    def start(self, job: Job) -> Job:
        running = sum(one.state == "running" for one in self.table.values())
        if running >= MOST_RUNNING:
            raise ApiError(
                429,
                f"{running} analyses are running, as many as this server allows; cancel one or try again later",
                type=RATE_LIMIT,
                code="queue_full",
                retry_after=self.server.settings.retry_after,
            )
        ended = [name for name, one in self.table.items() if one.state != "running" and one.kind == job.kind]
        for name in ended[: -MOST_KEPT + 1]:
            del self.table[name]
        self.table[job.name] = job
        threading.Thread(target=job.run, args=(self.server,), name=f"longspan-{job.kind}", daemon=True).start()
        return job

    def find(self, name: str) -> Job:
        if name not in self.table:
            raise ApiError(404, f"there is no job {name[:48]!r}; start it again", type=NOT_FOUND, code="job_not_found")
        return self.table[name]

    def cancel(self, name: str) -> Job:
        job = self.find(name)
        job.cancelled = True
        return job
