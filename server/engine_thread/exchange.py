"""An exchange: another drafter for a server that runs, between two of its rounds.

An event loop orders it; the engine thread carries it out as soon as no row is active. Answers that
have begun, and requests that the engine already has, are finished with the drafter of before;
requests that come meanwhile wait in the queue. So no request is lost, and no answer is drafted for
by two drafters. Whatever goes wrong leaves the drafter of before in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from specctl.core.drafter import Drafter
from specctl.runtime.batching.base import Batching
from specctl.runtime.engine.team_drafter import drafter_names
from specctl.runtime.policies.base import Policy


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts in a service: nothing with `drafter` None. `name`: what users know it by;
    `since`: seconds of Unix time."""

    drafter: Drafter | None
    policy: Policy
    batching: Batching | None
    name: str | None
    since: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that a request may choose: of a team its members, else what drafts."""
        names = drafter_names(self.drafter)
        return names if len(names) != 1 or self.name is None else (self.name,)


class Exchange:
    """One order. `prepare` runs in the engine thread while nobody is served: it may measure."""

    def __init__(self, prepare: Callable[[], Drafting]) -> None:
        self.prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Drafting] = self._loop.create_future()

    async def done(self) -> Drafting:
        """What drafts now; raises what stood in the way."""
        return await asyncio.shield(self._done)

    def settle(self, outcome: Drafting | Exception) -> None:
        """Called by the engine thread, once. A loop that is closed waits for nothing."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Drafting | Exception) -> None:
        if self._done.done():
            return
        if isinstance(outcome, Exception):
            self._done.set_exception(outcome)
        else:
            self._done.set_result(outcome)
