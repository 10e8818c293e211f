"""Run folders seen from outside: found, and how they stand. No torch; nothing is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError
from specctl.core.storage.bounded_read import read_text
from specctl.recipes.files import parse_yaml
from specctl.train.metrics.log import read_log
from specctl.train.runs.finished import read_mark
from specctl.train.saving.integrity import (
    damage,
    left_over,
    progress,
    saved_steps,
    set_aside,
    step_name,
)
from specctl.train.saving.lock import Holder, live_holder

RECORD, LOG, SAVES = "run.yaml", "metrics.jsonl", "checkpoints"
RUNNING, INTERRUPTED, FINISHED, DAMAGED = "running", "interrupted", "finished", "damaged"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of a run. `wrong` says what is damaged; None: whole."""

    step: int
    path: Path
    bytes: int
    is_best: bool
    wrong: str | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run folder stands. `tau` is the best measured so far, at `best_step`."""

    path: Path
    state: str
    record: dict[str, Any]
    step: int
    tau: float | None
    best_step: int | None
    seconds: float
    age: float
    bytes: int
    holder: Holder | None
    saves: tuple[Saved, ...]
    last: dict[str, Any]

    @property
    def recipe(self) -> dict[str, Any]:
        found: dict[str, Any] = self.record["recipe"]
        return found

    @property
    def steps(self) -> int:
        return int(self.recipe["train"]["steps"])

    @property
    def command(self) -> str:
        return str(self.record.get("command") or "")


def is_run(folder: Path) -> bool:
    """True for a folder in which a drafter was trained, or is about to be."""
    return (folder / RECORD).is_file() and any(
        (folder / name).exists() for name in (LOG, SAVES, "run.lock")
    )


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Run folders in `folder`, itself included, at most `depth` levels down, by path. A hidden
    folder is seen where it is a run itself, and not looked into."""
    return sorted(_walk(folder, depth))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    if depth == 0:
        return
    for path in folder.iterdir():
        is_own = path.name in (SAVES, "data", "package")
        if path.is_dir() and not path.is_symlink() and not is_own:
            yield from _walk(path, 0 if path.name[0] == "." else depth - 1)


def read_run(folder: Path, hashes: bool = False) -> RunStatus:
    """The run in a folder; with `hashes` every byte of its checkpoints is checked, else sizes."""
    record = _record(folder)
    lines = read_log(folder / LOG) if (folder / LOG).exists() else []
    holder = live_holder(folder)
    saves = _saves(folder / SAVES, lines, hashes)
    whole = [save for save in saves if save.wrong is None]
    taus = [(line["tau"], -line["step"]) for line in lines if line.get("tau") is not None]
    tau, best = max(taus, default=(None, 0))
    newest = whole[-1].step if whole else 0
    lost = not whole and bool(saves or set_aside(folder / SAVES))
    return RunStatus(
        path=folder,
        state=_state(folder, holder, lost, newest >= int(record["recipe"]["train"]["steps"])),
        record=record,
        step=max([newest, *(line.get("step", 0) for line in lines)]) if holder else newest,
        tau=tau,
        best_step=None if tau is None else -best,
        seconds=max((line.get("seconds") or 0.0 for line in lines), default=0.0),
        age=_age(folder),
        bytes=size_of(folder),
        holder=holder,
        saves=saves,
        last=newest_figures(lines),
    )


def _record(folder: Path) -> dict[str, Any]:
    """run.yaml as written; FileError if the folder holds no run."""
    path = folder / RECORD
    try:
        record = parse_yaml(read_text(path), str(path))
        if int(record["recipe"]["train"]["steps"]) > 0:
            return dict(record)
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        pass
    raise FileError(
        f"{folder} holds no run",
        where=str(path),
        found="no run.yaml of a training run" if folder.is_dir() else "no such folder",
        expected="the --out folder of a training command",
        do="specctl runs ls",
    )


def _saves(folder: Path, lines: list[dict[str, Any]], hashes: bool) -> tuple[Saved, ...]:
    steps = saved_steps(folder) if folder.is_dir() else []
    wrong = {step: damage(folder / step_name(step), hashes) for step in steps}
    best = best_steps(folder, [step for step in steps if wrong[step] is None], lines)
    paths = {step: folder / step_name(step) for step in steps}
    return tuple(
        Saved(step, path, size_of(path), step in best, wrong[step]) for step, path in paths.items()
    )


def best_steps(folder: Path, whole: list[int], lines: list[dict[str, Any]]) -> set[int]:
    """The steps that may be the best one: what the newest whole checkpoint says, and what the log
    says (a run may have measured since)."""
    found = {progress(folder / step_name(whole[-1])).get("best_step")} if whole else set()
    taus = [line for line in lines if line.get("tau") is not None and line["step"] in whole]
    if taus:
        found.add(max(taus, key=lambda line: (line["tau"], -line["step"]))["step"])
    return {step for step in found if step is not None}


def _state(folder: Path, holder: Holder | None, lost: bool, is_at_end: bool) -> str:
    if holder is not None:
        return RUNNING
    if lost:
        return DAMAGED
    has_package = (folder / "package").is_dir()
    is_finished = read_mark(folder) is not None or (is_at_end and has_package)
    return FINISHED if is_finished else INTERRUPTED


def _age(folder: Path) -> float:
    """Seconds since the run last wrote something."""
    paths = [folder / name for name in (RECORD, LOG, SAVES)]
    return time.time() - max(path.stat().st_mtime for path in paths if path.exists())


def size_of(path: Path) -> int:
    """Bytes of a file or of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total if path.is_dir() else path.lstat().st_size


def newest_figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest value of every figure in the log."""
    newest: dict[str, Any] = {}
    for line in lines:
        newest |= {k: v for k, v in line.items() if isinstance(v, (int, float))}
    return newest


def dispensable(run: RunStatus, keep: int = 2, is_ours: bool = False) -> list[Path]:
    """What a run can do without: half-written leftovers, and, where there is a whole checkpoint,
    those set aside as damaged (else they are all that is left of the run) and whole ones beside the
    best and the newest `keep`. Nothing of a run that another process holds; `is_ours`: the holder
    is the caller."""
    folder = run.path / SAVES
    if (run.holder is not None and not is_ours) or not folder.is_dir():
        return []
    whole = [save for save in run.saves if save.wrong is None]
    left = [*left_over(folder), *(set_aside(folder) if whole else ())]
    surplus = [save.path for save in whole[: -max(1, keep)] if not save.is_best]
    return sorted(left) + surplus
