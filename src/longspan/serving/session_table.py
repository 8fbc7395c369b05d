"""The sessions of a server: in memory, or in a file if they were not used for a while."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from longspan.errors import CheckpointError, StateError
from longspan.serving.errors import CONFLICT, NOT_FOUND, RATE_LIMIT, ApiError
from longspan.serving.models import Models, Served
from longspan.serving.settings import Settings
from longspan.serving.store import NAME, Moment, Store, decode, encode, hash_in, new_name
from longspan.serving.work import Choice


@dataclass(eq=False)
class Session:
    """One session. `moment` is None while it is on disk."""

    name: str
    served: Served | None
    moment: Moment | None
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    saved: bool = False
    dirty: bool = True
    """The state in memory is newer than the file."""
    busy: bool = False
    running: Choice | None = None
    disk_bytes: int = 0
    files: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its files are read or written."""

    def describe(self) -> dict[str, Any]:
        moment = self.moment
        return {
            "id": self.name,
            "object": "session",
            "model": None if self.served is None else self.served.name,
            "created": int(self.created),
            "tokens": None if moment is None else moment.tokens,
            "state_bytes": self.disk_bytes if moment is None else moment.nbytes,
            "saved": self.saved,
            "in_memory": moment is not None,
            "busy": self.busy,
        }


class Sessions:
    """All sessions by name. Its methods run in the event loop; files are written in threads."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.models, self.settings = models, settings
        self.store = None if settings.state_folder is None else Store(settings.state_folder)
        self.table: dict[str, Session] = {}
        if self.store is not None:
            for name, kind, size, modified in self.store.sizes():
                session = self.table.setdefault(name, Session(name, None, None, modified, modified, dirty=False))
                session.saved = session.saved or kind == "saved"
                session.disk_bytes = max(session.disk_bytes, size)

    @property
    def state_bytes(self) -> int:
        return sum(session.moment.nbytes for session in self.table.values() if session.moment is not None)

    def find(self, name: str) -> Session:
        session = self.table.get(name) if NAME.fullmatch(name) else None
        if session is None:
            raise ApiError(
                404,
                f"there is no session {name[:48]!r}; it may have been deleted, or expired",
                type=NOT_FOUND,
                code="session_not_found",
            )
        return session

    def add(self, served: Served, moment: Moment) -> Session:
        if len(self.table) >= self.settings.max_sessions:
            raise ApiError(
                429,
                f"this server has {len(self.table)} sessions, as many as --max-sessions allows; delete one",
                type=RATE_LIMIT,
                code="too_many_sessions",
                retry_after=self.settings.retry_after,
            )
        session = Session(new_name(), served, moment)
        self.table[session.name] = session
        return session

    @contextmanager
    def hold(self, session: Session) -> Iterator[None]:
        """Mark a session as busy; one that is busy is refused."""
        if session.busy:
            raise ApiError(
                409,
                f"the session {session.name} is busy with another request; try again later",
                type=CONFLICT,
                code="session_busy",
            )
        session.busy = True
        try:
            yield
        finally:
            self.release(session)

    def release(self, session: Session) -> None:
        session.busy, session.running, session.used = False, None, time.time()

    async def load(self, session: Session) -> tuple[Served, Moment]:
        """A session in memory; it is read from its file if it is not there."""
        if session.moment is None:
            async with session.files:
                if session.moment is None:
                    await self._read(session, ("idle", "saved"))
        assert session.served is not None
        assert session.moment is not None
        session.used = time.time()
        return session.served, session.moment

    async def _read(self, session: Session, kinds: tuple[Any, ...]) -> None:
        store = self.store
        if store is None:
            raise _no_folder()

        def read() -> tuple[Served, Moment]:
            for kind in kinds:
                content = store.read(session.name, kind)
                if content is not None:
                    return self.decode(content, f"of the session {session.name}")
            raise StateError(f"the session {session.name} has no saved state; save it first")

        try:
            session.served, session.moment = await asyncio.to_thread(read)
        except (CheckpointError, StateError) as error:
            raise ApiError(409, str(error), type=CONFLICT, code="session_unusable") from None
        session.dirty = False

    def decode(self, content: bytes, name: str) -> tuple[Served, Moment]:
        """A session and the model it belongs to."""
        wanted = hash_in(content, name)
        for served in self.models:
            if served.hash == wanted:
                return served, decode(content, name, served.text, served.hash)
        raise StateError(f"the state {name} belongs to model {wanted[:12]}, which this server does not have")

    def commit(self, session: Session, moment: Moment) -> None:
        session.moment, session.dirty = moment, True

    async def content(self, session: Session) -> bytes:
        served, moment = await self.load(session)
        return await asyncio.to_thread(encode, moment, served.text, served.hash)

    async def save(self, session: Session) -> None:
        if self.store is None:
            raise _no_folder()
        content = await self.content(session)
        self._check_disk(len(content) - session.disk_bytes)
        async with session.files:
            try:
                await asyncio.to_thread(self.store.write, session.name, "saved", content)
            except CheckpointError as error:
                raise ApiError(409, str(error), type=CONFLICT, code="not_saved") from None
            session.saved, session.dirty, session.disk_bytes = True, False, len(content)

    async def restore(self, session: Session) -> None:
        """Return to the state that was saved last."""
        if not session.saved:
            raise ApiError(
                409, f"the session {session.name} was never saved; save it first", type=CONFLICT, code="not_saved"
            )
        async with session.files:
            await self._read(session, ("saved",))
            assert self.store is not None
            self.store.remove(session.name, "idle")

    async def delete(self, session: Session) -> None:
        self.table.pop(session.name, None)
        async with session.files:
            if self.store is not None:
                self.store.remove(session.name, "idle")
                self.store.remove(session.name, "saved")

    def _check_disk(self, size: int) -> None:
        if sum(session.disk_bytes for session in self.table.values()) + size > self.settings.max_disk_bytes:
            raise ApiError(
                429,
                f"saved sessions would take more than {self.settings.max_disk_bytes} bytes; delete some",
                type=RATE_LIMIT,
                code="disk_limit",
                retry_after=self.settings.retry_after,
            )

    async def spill(self, session: Session) -> None:
        """Move a session to disk. If it is used meanwhile it stays in memory as well."""
        store, served = self.store, session.served
        if store is None or served is None:
            return
        async with session.files:
            moment = session.moment
            if moment is None or session.busy:
                return
            if session.dirty:
                content = await asyncio.to_thread(encode, moment, served.text, served.hash)
                await asyncio.to_thread(store.write, session.name, "idle", content)
                if session.moment is not moment:
                    return
                session.disk_bytes, session.dirty = len(content), False
            if not session.busy:
                session.moment = None

    async def tidy(self, now: float | None = None) -> None:
        """Delete expired sessions; move idle ones, and the oldest if memory is short, to disk."""
        now = time.time() if now is None else now
        for session in sorted(self.table.values(), key=lambda one: one.used):
            if session.busy:
                continue
            if now - session.used > self.settings.max_session_age:
                await self.delete(session)
            elif now - session.used > self.settings.idle_after or self.state_bytes > self.settings.max_state_bytes:
                try:
                    await self.spill(session)
                except CheckpointError:
                    return  # the disk is full; they stay in memory

    async def close(self) -> None:
        """Write everything to disk. Sessions that cannot be written are lost, the others are not."""
        for session in list(self.table.values()):
            session.busy = False
            with suppress(CheckpointError):
                await self.spill(session)


def _no_folder() -> ApiError:
    return ApiError(409, "this server has no folder for sessions", type=CONFLICT, code="no_session_folder")
