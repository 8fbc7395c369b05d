"""The checks that every request passes first: Host, Origin, API key, headers and body.

A web page of another site must not reach a server on this machine. DNS rebinding is refused by the Host header, other
cross-site requests by Origin, Sec-Fetch-Site and the type of the body. No CORS header is ever sent.
"""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from longspan.serving.errors import AUTHENTICATION, ApiError
from longspan.serving.settings import LOCAL, Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/favicon.ico"})
"""Without an API key: what a browser or a monitor requests before a key can be given."""
OPEN_PREFIX = "/static/"
UPLOADS = frozenset({"/v1/sessions/import"})
"""Bodies of bytes, not JSON."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+?)(:[0-9]{1,5})?")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Security:
    """ASGI middleware."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.names = {name.lower() for name in (*LOCAL, "[::1]", *settings.allowed_hosts)}
        try:
            any_address = ipaddress.ip_address(settings.host).is_unspecified
        except ValueError:
            any_address = False
            self.names.add(settings.host.lower())
        # Rebinding needs a name, so on all addresses a literal address is allowed.
        self.any_address = any_address
        if not any_address:
            self.names |= {settings.host.lower(), f"[{settings.host.lower()}]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sender = _Sender(send, cached=scope["path"].startswith(OPEN_PREFIX))
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, sender)
            return
        except _Gone:
            return
        await self.app(scope, _replay(body, receive), sender)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) + 4 for name, value in headers) > self.settings.max_header:
            raise ApiError(
                431, f"the headers have more than {self.settings.max_header} bytes", code="headers_too_large"
            )
        hosts = _values(headers, b"host")
        if len(hosts) != 1 or not self._is_allowed(hosts[0]):
            raise ApiError(
                421,
                f"the Host header {_shown(hosts)} is not allowed; use the address that the server printed, or add "
                "the name with --allow-host",
                code="host_not_allowed",
            )
        self._check_origin(scope, headers, hosts[0])
        path = scope["path"]
        if self.settings.api_key and path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            self._check_key(headers)

    def _is_allowed(self, host: str) -> bool:
        found = HOST.fullmatch(host.lower())
        if not found:
            return False
        name = found[1]
        if name in self.names:
            return True
        if not self.any_address:
            return False
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _check_origin(self, scope: Scope, headers: list[tuple[bytes, bytes]], host: str) -> None:
        origins = _values(headers, b"origin")
        own = {f"http://{host.lower()}", f"https://{host.lower()}"}
        if len(origins) > 1 or (origins and origins[0].lower() not in own):
            raise ApiError(403, f"requests from the origin {_shown(origins)} are refused", code="origin_not_allowed")
        if scope["method"] in ("GET", "HEAD"):
            return
        sites = _values(headers, b"sec-fetch-site")
        if any(site not in ("same-origin", "none") for site in sites):
            raise ApiError(403, f"requests from another site ({sites[0]!r:.40}) are refused", code="origin_not_allowed")

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        given = [value for value in _values(headers, b"authorization") if value[:7].lower() == "bearer "]
        expected = (self.settings.api_key or "").encode()
        key = given[0][7:].strip().encode("latin-1") if len(given) == 1 else b""
        if not hmac.compare_digest(key, expected):
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                type=AUTHENTICATION,
                code="invalid_api_key",
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The complete body. Reading it here limits its size and time for every route."""
        headers, upload = scope["headers"], scope["path"] in UPLOADS
        limit = self.settings.max_upload if upload else self.settings.max_body
        lengths = _values(headers, b"content-length")
        if len(lengths) > 1 or (lengths and not (lengths[0].isascii() and lengths[0].isdigit())):
            raise ApiError(400, f"the Content-Length {_shown(lengths)} is not a number", code="invalid_header")
        if lengths and int(lengths[0][:20]) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                body = await _read(receive, limit)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self.settings.body_timeout:g} seconds", code="timeout"
            ) from None
        if body or scope["method"] in ("POST", "PUT", "PATCH"):
            _check_type(headers, "application/octet-stream" if upload else "application/json")
        return body


class _Gone(Exception):
    """The client left while it sent the body."""


class _Sender:
    """Adds the security headers to every response."""

    def __init__(self, send: Send, *, cached: bool) -> None:
        self.send, self.cached = send, cached

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {**HEADERS, "cache-control": "no-cache" if self.cached else "no-store"}
            own = {name.lower() for name, _ in message.get("headers", [])}
            more = [(n.encode(), v.encode()) for n, v in headers.items() if n.encode() not in own]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await self.send(message)


def _check_type(headers: list[tuple[bytes, bytes]], expected: str) -> None:
    """A form or text/plain needs no preflight, so another site could send it."""
    types = _values(headers, b"content-type")
    if len(types) != 1 or types[0].partition(";")[0].strip().lower() != expected:
        raise ApiError(
            415, f"the Content-Type {_shown(types)} is not supported; use {expected}", code="unsupported_type"
        )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes, the limit of this server", code="body_too_large")


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first and then what follows, which is a disconnect."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _shown(values: list[str]) -> str:
    return ", ".join(f"{value!r:.80}" for value in values[:2]) or "(none)"
