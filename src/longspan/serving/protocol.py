"""uvicorn's HTTP protocol with a time limit for the headers of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with_timeout(seconds: float) -> type[H11Protocol]:
    """uvicorn waits for headers without a limit, so a slow sender could hold a connection forever."""

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.deadline = asyncio.get_running_loop().call_later(seconds, self._check_started)

        def connection_lost(self, exc: Exception | None) -> None:
            self.deadline.cancel()
            super().connection_lost(exc)

        def _check_started(self) -> None:
            if self.cycle is None:
                self.transport.close()

    return TimedProtocol
