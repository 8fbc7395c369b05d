"""The routes of the page: its HTML, what it shows about models and the server, and its analyses."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import Field

from longspan.errors import LongspanError
from longspan.serving.errors import ApiError
from longspan.serving.models import Served
from longspan.serving.openai_types import Strict
from longspan.serving.page import analyses
from longspan.serving.page.jobs import Job, Jobs
from longspan.serving.requests import parse, server_of

STATIC = Path(__file__).parent / "static"
router = APIRouter()
MOST_LOOKED_AT = 4096
"""Tokens of a text whose attention is shown."""
MOST_COMPARED = 20_000
MOST_MEASURED = 1_000_000
FORGET_TIMEOUT = 10.0
"""Seconds that a session may take to stop before it is deleted."""
SAMPLE = 50_000
"""Bytes that the bits against memory length are measured on."""
MEMORIES = (0, 64, 128, 256, 512, 1024, 2048)

Name = Annotated[str, Field(max_length=256)]
Memory = Annotated[int, Field(ge=0, le=8192)]
Text = Annotated[str, Field(min_length=1)]


class LookRequest(Strict):
    model: Name | None = None
    text: Text
    memory: Memory | None = None


class TokenRequest(Strict):
    token: Annotated[int, Field(ge=0)]
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


class CompareRequest(Strict):
    text: Text
    models: Annotated[list[Name], Field(min_length=1, max_length=2)]
    memories: Annotated[list[Memory], Field(max_length=8, default_factory=list)]
    """Memories of the one model. With two models it must be empty: each has its own reading."""


class MeasureRequest(Strict):
    model: Name | None = None
    text: Text


class ForgetRequest(Strict):
    sessions: Annotated[list[Name], Field(max_length=256)]


@router.head("/", include_in_schema=False)
@router.get("/")
async def index() -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")


@router.get("/page/models")
async def models(request: Request) -> dict[str, Any]:
    server = server_of(request)
    return {"models": [analyses.describe(served) for served in server.models]}


@router.get("/page/status")
async def status(request: Request) -> dict[str, Any]:
    """Counters and sizes. Sessions are listed without their names, which give access to them."""
    server, now = server_of(request), time.time()
    sessions = sorted(server.sessions.table.values(), key=lambda one: -one.used)
    return {
        "uptime": now - server.started,
        "models": [
            {
                "id": served.name,
                "prompt_tokens": served.engine.statistics.prompt_tokens,
                "generated_tokens": served.engine.statistics.generated_tokens,
                "running": len(served.engine.running),
                "waiting": served.engine.load,
            }
            for served in server.models
        ],
        "sessions": len(sessions),
        "sessions_in_memory": sum(one.moment is not None for one in sessions),
        "state_bytes": server.sessions.state_bytes,
        "jobs": sum(job.state == "running" for job in _jobs(request).table.values()),
        "recent": [
            {
                "tokens": described["tokens"],
                "state_bytes": described["state_bytes"],
                "in_memory": described["in_memory"],
                "busy": described["busy"],
                "saved": described["saved"],
                "idle": now - session.used,
            }
            for session in sessions[:12]
            for described in [session.describe()]
        ],
    }


@router.post("/page/look")
async def look(request: Request) -> Response:
    """Read a text and keep its attention."""
    asked = await parse(request, LookRequest)
    served = server_of(request).models.find(asked.model)
    _check_size(asked.text, MOST_MEASURED)
    return await _start(request, lambda: analyses.look(served, asked.text, asked.memory, MOST_LOOKED_AT))


@router.post("/page/compare")
async def compare(request: Request) -> Response:
    """Read a text with several memories, or with two models."""
    asked = await parse(request, CompareRequest)
    found = [server_of(request).models.find(name) for name in asked.models]
    _check_size(asked.text, MOST_COMPARED)
    if (len(found) == 1) != (len(asked.memories) > 1):
        raise ApiError(
            400, "memories: choose two models, or one model and at least two memories", param="memories", code="invalid"
        )
    ways: list[tuple[Served, int | None]] = [(found[0], memory) for memory in asked.memories]
    ways = ways or [(served, None) for served in found]
    return await _start(request, lambda: analyses.compare(ways, asked.text))


@router.post("/page/measure")
async def measure(request: Request) -> Response:
    """The surprisal of a text."""
    asked = await parse(request, MeasureRequest)
    served = server_of(request).models.find(asked.model)
    _check_size(asked.text, MOST_MEASURED)
    return await _start(request, lambda: analyses.measure(served, asked.text))


@router.post("/page/memory")
async def memory(request: Request) -> Response:
    """Bits against memory length on a sample of a text."""
    asked = await parse(request, MeasureRequest)
    served = server_of(request).models.find(asked.model)
    _check_size(asked.text, MOST_MEASURED)
    return await _start(request, lambda: analyses.memory_curve(served, asked.text, MEMORIES, SAMPLE))


@router.post("/page/forget")
async def forget(request: Request) -> dict[str, int]:
    """Delete sessions that are no longer needed, running ones too; unknown names are ignored."""
    table = server_of(request).sessions
    asked = await parse(request, ForgetRequest)
    found = [table.table[name] for name in asked.sessions if name in table.table]
    for session in found:
        if session.running is not None:
            session.running.stop_now = "stop"
    for session in found:
        end = time.monotonic() + FORGET_TIMEOUT
        while session.busy and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if not session.busy:
            await table.delete(session)
    return {"deleted": sum(session.name not in table.table for session in found)}


@router.get("/page/jobs/{name}")
async def job(request: Request, name: str) -> Response:
    """How far a job is, and its result so far."""
    return JSONResponse(await asyncio.to_thread(_jobs(request).find(name).describe))


@router.delete("/page/jobs/{name}")
async def cancel(request: Request, name: str) -> dict[str, Any]:
    """Stop a job after its present segment. Its result so far stays."""
    found = _jobs(request).cancel(name)
    return {"id": found.name, "state": found.state}


@router.post("/page/jobs/{name}/token")
async def token(request: Request, name: str) -> Response:
    """The attention and the candidates of one token."""
    found = _jobs(request).find(name)
    asked = await parse(request, TokenRequest)
    if found.kind != "look":
        raise ApiError(400, f"the job {name} is a {found.kind}, which has no attention", code="invalid_value")
    served, links = found.subject
    if asked.token >= max(links.read_tokens, 1):
        raise ApiError(
            400, f"token={asked.token} has not been read yet; try again later", param="token", code="invalid_value"
        )
    try:
        shown = await asyncio.to_thread(analyses.look_at, served, links, asked.token, asked.layer, asked.head)
    except LongspanError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    return JSONResponse(shown)


async def _start(request: Request, make: Any) -> Response:
    """Encoding a text takes a while, so a thread does it."""
    try:
        made: Job = await asyncio.to_thread(make)
    except LongspanError as error:
        raise ApiError(400, str(error), param="text", code="invalid_value") from None
    except UnicodeEncodeError:
        raise ApiError(
            400, "text: has a lone surrogate, which UTF-8 cannot encode; remove it", param="text", code="invalid_value"
        ) from None
    started = _jobs(request).start(made)
    return JSONResponse({"id": started.name, "kind": started.kind, "total": started.total}, 201)


def _jobs(request: Request) -> Jobs:
    state = request.app.state
    if not hasattr(state, "page_jobs"):
        state.page_jobs = Jobs(server_of(request))
    found: Jobs = state.page_jobs
    return found


def _check_size(text: str, most: int) -> None:
    size = len(text.encode(errors="replace"))
    if size > most:
        raise ApiError(
            400,
            f"text: has {size} bytes, but this analysis allows at most {most}; use a shorter text",
            param="text",
            code="too_long",
        )
