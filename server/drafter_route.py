"""/v1/drafter, for who runs the server: which drafter serves, and another one in its place.

The route exists where an admin key and a folder of drafters were given, and API keys do not open
it. It loads nothing from outside that folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from specctl.core.errors import SpecctlError
from specctl.server.auth import DRAFTER
from specctl.server.engine_thread.exchange import Drafting
from specctl.server.errors import ApiError, ErrorBody
from specctl.server.logs import log
from specctl.server.requests.fields import Strict, Word

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 409, 413, 415, 429, 503)
}

# Reads and checks a package; what it returns runs in the engine thread (`Exchange.prepare`).
Load = Callable[[Path], Callable[[], Drafting]]


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folder of the drafters that may be served, and how one is read."""

    root: Path
    load: Load

    def find(self, name: str) -> Path:
        """A folder below the root, links followed; ApiError for any other."""
        root = self.root.resolve()
        try:
            folder = (root / name).resolve(strict=True)
            is_inside = folder.is_relative_to(root) and folder.is_dir()
        except (OSError, ValueError):
            is_inside = False
        if not is_inside:
            message = f"no drafter {name[:100]!a} in the server's access.drafter_folder"
            listed = f"; {self._listed(root)}"
            raise ApiError(404, message + listed, param="path", code="drafter_not_found")
        return folder

    def _listed(self, root: Path) -> str:
        """What a caller may name instead; the folder may be gone by now."""
        try:
            known = sorted(each.name for each in root.iterdir() if each.is_dir())[:8]
        except OSError as error:
            return f"it cannot be read: {error.strerror or type(error).__name__}"
        return f"there are {', '.join(map(ascii, known))}" if known else "it is empty"


class Exchanging(Protocol):
    """What the route needs of the service."""

    @property
    def drafting(self) -> Drafting: ...

    async def exchange(self, prepare: Callable[[], Drafting], wait: float) -> Drafting: ...


class DrafterRequest(Strict):
    """Another drafter: a package, named by its `path` below the folder of drafters. `wait`: for how
    many seconds answers that are under way may keep it waiting."""

    path: Word
    wait: float = Field(60.0, ge=1.0, le=600.0)


class DrafterAnswer(Strict):
    """What drafts: null where nothing does; `since` in seconds of Unix time, and for a change how
    long it took."""

    drafter: str | None
    since: int
    seconds: float | None = None


def drafter_routes(app: FastAPI, service: Exchanging, shelf: Shelf) -> None:
    """Add the route."""
    turn = asyncio.Lock()

    def shown(now: Drafting, seconds: float | None = None) -> DrafterAnswer:
        name = None if now.drafter is None else now.name
        return DrafterAnswer(drafter=name, since=now.since, seconds=seconds)

    @app.get(DRAFTER, responses=REFUSALS)
    async def drafter() -> DrafterAnswer:
        """What drafts, and since when."""
        return shown(service.drafting)

    @app.post(DRAFTER, responses=REFUSALS)
    async def exchange(body: DrafterRequest) -> DrafterAnswer:
        """Put another drafter in its place. Answers under way are finished first, new requests
        wait; where it fails nothing has changed."""
        if turn.locked():
            raise ApiError(409, "the drafter is being exchanged already", code="conflict")
        async with turn:
            began, folder = time.monotonic(), shelf.find(body.path)
            try:
                prepare = await run_in_threadpool(shelf.load, folder)
                now = await service.exchange(prepare, body.wait)
            except SpecctlError as error:
                log("drafter_refused", path=body.path, error=str(error))
                raise
            log("drafter", drafter=now.name)
            return shown(now, round(time.monotonic() - began, 3))
