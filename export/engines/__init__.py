"""Serving engines as they are run to prove an export: one module of this folder per engine, found
by its ENGINE.

An engine lives in an environment of its own. It is given a target, an export beside it and prompts
as token ids, answers greedily in float32, and is stopped; the scripts of `hosts/` run under its
Python and import nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.errors import IncompatibleError, SpecctlError, nearest
from specctl.core.plugins import Plugins, plugins

if TYPE_CHECKING:
    from specctl.export.package.manifest import Manifest
    from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy continuations as token ids, and what was counted on the way. `rounds` are reads by the
    target in which drafted tokens were verified, `misread` texts that became other tokens there."""

    ids: tuple[tuple[int, ...], ...]
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    version: str = ""
    misread: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of the drafted tokens those that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tau(self) -> float:
        """Tokens per round, the bonus token included."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Prompts for one engine. `folder` holds the export, `place` is the target's folder or
    repository, `scratch` an empty folder for logs and converted targets."""

    target: Target
    place: str
    folder: Path
    manifest: Manifest
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    length: int
    python: str
    scratch: Path


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """`reads` are the formats (of `specctl export --to`) that it loads, `module` what its Python
    must import, `install` how it comes into an environment; `answer(job, drafts)` runs it once,
    with the export or without."""

    name: str
    module: str
    install: str
    reads: tuple[str, ...]
    answer: Callable[[EngineJob, bool], Answers]


@cache
def engines() -> Plugins[ServingEngine]:
    """Every engine by name, in alphabetical order."""
    return plugins(__name__, "ENGINE")


def find_engine(name: str | None, to: str) -> ServingEngine:
    """The engine of that name; without one the first that reads the format."""
    known = engines()
    working = known.working()
    fits = [engine for engine in working.values() if to in engine.reads]
    if name is None and fits:
        return fits[0]
    if name is not None and name not in known:
        raise SpecctlError(
            f"unknown engine {name!r}",
            where="--engine",
            found=name,
            expected="one of " + ", ".join(known),
            do=f"--engine {nearest(name, known, 1)}",
        )
    if name is None or known[name] not in fits:
        raise IncompatibleError(
            f"format {to} cannot be proved in {name or 'an engine'} here",
            where="--prove",
            found=f"format {to}",
            expected="; ".join(f"{e.name} reads {', '.join(e.reads)}" for e in working.values()),
            do=f"--engine {fits[0].name}" if fits else "specctl export without --prove",
        )
    return known[name]
