"""From the thread of the engine to the coroutine of a request, and the end of a client in the other direction."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from longspan.serving.engine import Closed, Engine, QueueFull
from longspan.serving.errors import CONFLICT, RATE_LIMIT, SERVER, ApiError
from longspan.serving.settings import Settings
from longspan.serving.work import Event, Finished, Work


class Feed:
    """The events of several choices in the order in which the engine made them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def emitter(self, index: int) -> Callable[[Event], None]:
        """What choice `index` calls from the thread of the engine."""

        def emit(event: Event) -> None:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (index, event))

        return emit

    async def events(self, choices: int) -> AsyncIterator[tuple[int, Event]]:
        """Every event until all choices have finished. An error of the engine is raised."""
        while choices:
            index, event = await self.queue.get()
            if isinstance(event, Finished):
                choices -= 1
                if event.reason == "error":
                    raise ApiError(500, event.message, type=SERVER, code="generation_failed")
                if event.reason == "cancelled":
                    raise ApiError(409, f"nothing was generated: {event.message}", type=CONFLICT, code="stopped")
            yield index, event


def submit(engine: Engine, works: list[Work], settings: Settings) -> None:
    try:
        engine.submit(*works)
    except QueueFull:
        raise ApiError(
            429,
            f"{engine.load} streams are waiting, as many as this server allows; try again later",
            type=RATE_LIMIT,
            code="queue_full",
            retry_after=settings.retry_after,
        ) from None
    except Closed as error:
        raise ApiError(
            503,
            f"this server is not accepting requests now: {error}",
            type=SERVER,
            code="unavailable",
            retry_after=settings.retry_after,
        ) from None


async def unless_disconnected(
    request: Request, works: list[Work], answer: Awaitable[Any], settings: Settings
) -> Any | None:
    """The answer, or None if the client leaves before. The works are cancelled then, and after an error or timeout."""
    waiting = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({waiting, gone}, timeout=settings.request_timeout, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if gone.done():
            return None
        raise ApiError(
            408, f"the request took more than {settings.request_timeout:g} seconds", type=SERVER, code="timeout"
        )
    finally:
        for work in works:
            work.cancel()
        for task in (waiting, gone):
            task.cancel()


async def disconnected(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `data: {...}` lines and `data: [DONE]`. The works are cancelled when the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        works: list[Work],
        settings: Settings,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`closed` is called when nothing more will be sent."""
        super().__init__(media_type="text/event-stream")
        self.events, self.works, self.settings, self.closed = events, works, settings, closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(Request(scope, receive)))
        try:
            timeout = self.settings.request_timeout
            await asyncio.wait({sending, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:  # the connection was closed while it was written to
            pass
        finally:
            for work in self.works:
                work.cancel()
            for task in (sending, gone):
                task.cancel()
            self.closed()

    async def _send(self, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})

        async def line(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        try:
            async for event in self.events:
                await line(json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        except ApiError as error:
            await line(json.dumps(error.body()))
        await line("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
