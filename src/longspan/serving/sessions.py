"""/v1/sessions: streams that continue over many requests, with constant cost per token and constant memory."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longspan.errors import LongspanError
from longspan.serving.completions import Completion
from longspan.serving.errors import CONFLICT, ApiError
from longspan.serving.feed import EventStream, Feed, submit, unless_disconnected
from longspan.serving.models import Served
from longspan.serving.openai_types import ContinueRequest, CreateSession, ForkSession, Nothing
from longspan.serving.requests import parse, server_of
from longspan.serving.sampling import make_choice
from longspan.serving.session_table import Session, Sessions
from longspan.serving.store import Moment
from longspan.serving.text import incomplete
from longspan.serving.work import Event, Finished, Work

router = APIRouter(prefix="/v1/sessions")


class Continuation(Completion):
    """One turn of a session. The session changes when the turn is complete; a turn that breaks off changes nothing."""

    request: ContinueRequest

    def __init__(self, request: ContinueRequest, served: Served, session: Session, table: Sessions) -> None:
        self.request, self.served, self.session, self.table = request, served, session, table
        self.n = self.best_of = self.count = 1
        self.name_and_check()
        moment = session.moment
        assert moment is not None
        tokens, held = self._prompt(moment)
        self.prompts = [tokens]
        self.feed = Feed()
        self.draws = moment.draws
        if request.seed is not None:
            self.draws.seed, self.draws.count = request.seed, 0
        choice = make_choice(
            request,
            served,
            self.feed.emitter(0),
            self.draws,
            held=held,
            logprobs=request.logprobs,
            keep=True,
        )
        before = [] if moment.pending is None else [moment.pending]
        self.works = [Work([*before, *tokens], [choice], stream=moment.stream)]
        session.running = choice

    def _prompt(self, moment: Moment) -> tuple[list[int], bytes]:
        """The new tokens, and the bytes of a character that they leave incomplete."""
        if self.request.prompt in ("", [], None) and moment.pending is not None:
            return [], moment.held
        prompts = self.served.prompts(self.request.prompt)
        if len(prompts) != 1:
            raise ApiError(400, "prompt: a session takes one prompt", param="prompt", code="invalid_value")
        return prompts[0], incomplete(self.served.text.tokenizer.decode_bytes(prompts[0][-8:]))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        async for index, event in self.feed.events(1):
            if isinstance(event, Finished) and event.reason != "cancelled":
                draws = self.draws
                found = Moment(event.stream, event.pending, event.held, draws.seed, draws.count)
                self.table.commit(self.session, found)
            yield index, event

    def _head(self) -> dict[str, Any]:
        return {**super()._head(), "session": self.session.name}


@router.post("")
async def create(request: Request) -> Response:
    """A new session. A prompt is read, and nothing is generated."""
    server = server_of(request)
    asked = await parse(request, CreateSession)
    served = server.models.find(asked.model)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    session = server.sessions.add(served, Moment(None, None, b"", seed, 0))
    if asked.prompt not in ("", [], None):
        try:
            with server.sessions.hold(session):
                reading = ContinueRequest(prompt=asked.prompt, max_tokens=0)
                turn = Continuation(reading, served, session, server.sessions)
                submit(served.engine, turn.works, server.settings)
                done = await unless_disconnected(request, turn.works, turn.whole(), server.settings)
        except BaseException:
            await server.sessions.delete(session)
            raise
        if done is None:
            await server.sessions.delete(session)
            return Response(status_code=499)
    return JSONResponse(session.describe(), 201)


@router.post("/import")
async def import_session(request: Request) -> Response:
    """A session from the file that `GET /v1/sessions/ID/state` returned, on this machine or another."""
    sessions = server_of(request).sessions
    try:
        served, moment = await asyncio.to_thread(sessions.decode, await request.body(), "in the upload")
    except LongspanError as error:
        raise ApiError(400, str(error), code="invalid_state") from None
    return JSONResponse(sessions.add(served, moment).describe(), 201)


@router.get("/{name}")
async def describe(request: Request, name: str) -> dict[str, Any]:
    return server_of(request).sessions.find(name).describe()


@router.get("/{name}/state")
async def export(request: Request, name: str) -> Response:
    """The session as a file."""
    sessions = server_of(request).sessions
    return Response(await sessions.content(sessions.find(name)), media_type="application/octet-stream")


@router.post("/{name}/continue")
async def continue_(request: Request, name: str) -> Response:
    """Read a prompt and generate. The answer has the shape of a completion."""
    server = server_of(request)
    sessions, settings = server.sessions, server.settings
    session = sessions.find(name)
    asked = await parse(request, ContinueRequest)
    with sessions.hold(session):
        served, _ = await sessions.load(session)
        turn = Continuation(asked, served, session, sessions)
        submit(served.engine, turn.works, settings)
        if not asked.stream:
            whole = await unless_disconnected(request, turn.works, turn.whole(), settings)
            return JSONResponse(whole) if whole is not None else Response(status_code=499)
        response = EventStream(turn.stream(), turn.works, settings, lambda: sessions.release(session))
    session.busy, session.running = True, turn.works[0].choices[0]
    return response


@router.post("/{name}/stop")
async def stop(request: Request, name: str) -> dict[str, Any]:
    """End the running turn after its present token and keep what was generated."""
    session = server_of(request).sessions.find(name)
    await parse(request, Nothing)
    if session.running is not None:
        session.running.stop_now = "stop"
    return session.describe()


@router.post("/{name}/fork")
async def fork(request: Request, name: str) -> Response:
    """A copy of the session. With the same seed it continues with the same bytes."""
    sessions = server_of(request).sessions
    session = sessions.find(name)
    asked = await parse(request, ForkSession)
    served, moment = await sessions.load(session)
    if asked.seed is not None:
        moment = Moment(moment.stream, moment.pending, moment.held, asked.seed, 0)
    return JSONResponse(sessions.add(served, moment).describe(), 201)


@router.post("/{name}/save")
async def save(request: Request, name: str) -> dict[str, Any]:
    """Write the session to disk. It survives the end of the process from then on."""
    sessions = server_of(request).sessions
    session = sessions.find(name)
    await parse(request, Nothing)
    with sessions.hold(session):
        await sessions.save(session)
    return session.describe()


@router.post("/{name}/restore")
async def restore(request: Request, name: str) -> dict[str, Any]:
    """Return to the state that was saved last."""
    sessions = server_of(request).sessions
    session = sessions.find(name)
    await parse(request, Nothing)
    with sessions.hold(session):
        await sessions.restore(session)
    return session.describe()


@router.delete("/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Forget a session and its files."""
    sessions = server_of(request).sessions
    session = sessions.find(name)
    if session.busy:
        raise ApiError(409, f"the session {name} is busy; stop it first", type=CONFLICT, code="session_busy")
    await sessions.delete(session)
    return {"id": name, "object": "session", "deleted": True}
