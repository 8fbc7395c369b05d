"""The FastAPI application."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from longspan import __version__
from longspan.serving import completions, information, metrics, page, scoring, sessions
from longspan.serving.errors import NOT_FOUND, SERVER, ApiError
from longspan.serving.security import Security
from longspan.serving.server import Server
from longspan.serving.settings import Settings
from longspan.text_model import TextModel

TIDY_EVERY = 5.0


def create_app(texts: Mapping[str, TextModel], settings: Settings | None = None) -> FastAPI:
    """The server for some models by name. Engines start with the application and stop with it."""
    settings = settings or Settings()
    server = Server(texts, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        tidying = asyncio.create_task(_tidy(server))
        yield
        tidying.cancel()
        await asyncio.to_thread(server.close)
        await server.sessions.close()

    # The pages of FastAPI's documentation load scripts of other sites.
    app = FastAPI(
        title="longspan",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a path with a slash at its end is another path, so it is 404
    )
    app.state.server = server
    app.state.metrics = metrics.Metrics(server)
    for part in (completions, information, metrics, scoring, sessions, page):
        app.include_router(part.router)
    app.mount("/static", StaticFiles(directory=page.STATIC, follow_symlink=False), name="static")
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Security, settings=settings)  # type: ignore[arg-type]
    app.add_middleware(metrics.CountRequests, metrics=app.state.metrics)  # type: ignore[arg-type]
    return app


async def _tidy(server: Server) -> None:
    while True:
        await asyncio.sleep(TIDY_EVERY)
        await server.sessions.tidy()


async def _api_error(_: Request, error: Any) -> Response:
    response: JSONResponse = error.response()
    return response


async def _http_error(request: Request, error: Any) -> Response:
    kind = NOT_FOUND if error.status_code == 404 else "invalid_request_error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path!r:.200}: {error.detail}"
    if "chat" in request.url.path:
        message += "; these models do not chat, use /v1/completions"
    found = ApiError(error.status_code, message, type=kind, code=code)
    response = found.response()
    response.headers.update(error.headers or {})
    return response


async def _unexpected(_: Request, error: Exception) -> Response:
    """A bug. The traceback goes to the log, not to the client."""
    return ApiError(500, f"internal error ({type(error).__name__})", type=SERVER, code="internal_error").response()
