"""Run the server in this process until SIGTERM or SIGINT."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import uvicorn

from longspan.errors import ConfigError
from longspan.serving.app import create_app
from longspan.serving.protocol import protocol_with_timeout
from longspan.serving.server import Server
from longspan.serving.settings import Settings
from longspan.text_model import TextModel


class _Uvicorn(uvicorn.Server):
    """uvicorn raises the signal again when it is done, which would end the process with an error."""

    def __init__(self, config: uvicorn.Config, server: Server, stopping: Callable[[int], None]) -> None:
        super().__init__(config)
        self.longspan, self.stopping = server, stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the form of a signal handler)
        """Running requests finish, or are stopped, while uvicorn waits for their connections. The second signal stops
        them at once; sessions are still saved. The third one ends the process."""
        if self.should_exit:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._close, args=[self.should_exit], daemon=True).start()
        self.should_exit = True

    def _close(self, now: bool) -> None:
        streams = sum(len(served.engine.running) + served.engine.load for served in self.longspan.models)
        if streams and not now:
            self.stopping(streams)
        self.longspan.close(0.0 if now else None)


def serve(
    texts: Mapping[str, TextModel],
    settings: Settings,
    announce: Callable[[str], None] = lambda _: None,
    stopping: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve some models. `announce` gets the address when the port is open, `stopping` the number of streams that have
    not finished when the server is told to stop."""
    with _bound(settings) as bound:
        app = create_app(texts, settings)
        config = uvicorn.Config(
            app,
            http=protocol_with_timeout(settings.header_timeout),
            loop="asyncio",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=settings.max_header,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(settings.shutdown_timeout) + 10,
        )
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        announce(f"http://{name}:{bound.getsockname()[1]}")
        _Uvicorn(config, app.state.server, stopping).run([bound])


def _bound(settings: Settings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={settings.host!r} is not an address of this machine: {error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"port {settings.port} of {settings.host} cannot be opened: {error.strerror}; choose another with --port"
        ) from None
    return bound
