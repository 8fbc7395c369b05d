"""uvicorn's HTTP protocol with a time limit for the headers of every request."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with_timeout(seconds: float) -> type[H11Protocol]:
    """uvicorn waits for headers without a limit, so a slow sender could hold a connection forever."""

    class TimedProtocol(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._limit()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unlimit()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._waits:
                self._limit()  # data stopped uvicorn's own timer for the next request
            else:
                self._unlimit()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._waits and self.conn.their_state is h11.SEND_BODY:
                self._limit()  # answered before the body was complete; the rest is not awaited for long

        @property
        def _waits(self) -> bool:
            """For headers, or for a body that nobody reads any more."""
            answered = self.cycle is None or self.cycle.response_complete
            return self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY)

        def _limit(self) -> None:
            if self.deadline is None:
                self.deadline = asyncio.get_running_loop().call_later(seconds, self._close_if_waiting)

        def _unlimit(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

        def _close_if_waiting(self) -> None:
            self.deadline = None
            if self._waits:
                self.transport.close()

    return TimedProtocol
