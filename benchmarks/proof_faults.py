"""Proof T2: every system call of a save fails once, with every error; the old state always loads.

    PYTHONPATH=src python benchmarks/proof_faults.py
    PYTHONPATH=src python benchmarks/proof_faults.py --codes ENOSPC

The calls of a save (open, write, fsync, rename, symlink, mkdir, unlink, statvfs) are recorded below
`os`, then the save is repeated once per call and error number on a copy of the run, by one process
and by two of which one fails. Proved if each time the save is refused on all processes by an error
that names the path and the need (or needed nothing of what failed), the newest checkpoint is whole,
nothing half-written is left, and the next save succeeds. The same for the files of a run that are
no checkpoints. And the order: no rename before its bytes are flushed, no pointer before its goal.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from proof_common import Check, checked, parser, report, run_ranks
from syscalls import CHANGING, Call, Syscalls, unflushed_renames

from specctl.core.errors import FileError, ResourceError, SpecctlError
from specctl.core.storage.files import write_bytes
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.distributed.ranks import Ranks
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.integrity import damage, step_name

CODES = ("EIO", "ENOSPC", "EACCES")
OLD, NEW = 2, 3


def snapshot(step: int) -> Snapshot:
    """A small state of every kind of file."""
    weights = {"w": torch.arange(6.0).view(2, 3) + step, "steps": torch.tensor(step)}
    state = {"adamw/w/exp_avg": torch.full((2, 3), float(step))}
    own = {"torch": torch.ones(4)}
    return Snapshot(step, {"model": weights, "optimizer": state}, own, {"at": step})


def filled(folder: Path, ranks: Ranks | None = None) -> None:
    """A run that has saved twice and will drop its oldest checkpoint at the next save."""
    saved = Checkpoints(folder, SilentReporter(), ranks=ranks)
    for step in (1, OLD):
        saved.save(snapshot(step))


def recorded_save(folder: Path) -> list[Call]:
    """The calls of one save."""
    with Syscalls(folder).watching() as seen:
        Checkpoints(folder, SilentReporter()).save(snapshot(NEW))
    return seen.calls


def judge(folder: Path, error: SpecctlError | None, call: Call, code: str) -> str | None:
    """What is wrong after a save with one failed call; None if all is well."""
    where = f"{call.name} {code}"
    is_needless = call.name in ("unlink", "rmdir") or Call("mkdir", str(folder)) == call
    if error is None and not (is_needless and damage(folder / step_name(NEW)) is None):
        return f"{where}: went unnoticed"
    if error is not None:
        kind = ResourceError if code == "ENOSPC" else FileError
        if not isinstance(error, kind) and "failed:" not in str(error):
            return f"{where}: {type(error).__name__}"
        if str(folder) not in error.text() or "bytes" not in error.text():
            return f"{where}: names no path or need: {error.text()}"
    again = Checkpoints(folder, SilentReporter())
    found = again.newest()
    if found is None or found.step not in (OLD, NEW):
        return f"{where}: no state to continue from"
    if damage(folder / step_name(found.step)) or again.reporter.warnings:
        return f"{where}: damaged {again.reporter.warnings}"
    if list(folder.glob(".tmp-*")):
        return f"{where}: leftovers"
    again.save(snapshot(NEW + 1))
    return None if again.steps()[-1] == NEW + 1 else f"{where}: the next save failed"


def attempt(saved: Checkpoints, at: int, code: str) -> SpecctlError | None:
    """A save whose call number `at` fails; returns the error it ended with."""
    with Syscalls(saved.folder, at, getattr(errno, code)).watching():
        try:
            saved.save(snapshot(NEW))
        except SpecctlError as error:
            return error
    return None


def moved(call: Call, source: Path, to: Path) -> Call:
    """The same call in another folder."""
    return Call(call.name, call.path.replace(str(source), str(to), 1))


def fail_every_call(base: Path, codes: Sequence[str]) -> list[str | None]:
    """One process: a copy of the run per call and code."""
    counted = base.with_name("counted")
    shutil.copytree(base, counted, symlinks=True)
    calls = recorded_save(counted)
    found: list[str | None] = []
    for at, call in enumerate(calls):
        for code in codes:
            folder = base.with_name("copy")
            shutil.copytree(base, folder, symlinks=True)
            error = attempt(Checkpoints(folder, SilentReporter()), at, code)
            found.append(judge(folder, error, moved(call, counted, folder), code))
            shutil.rmtree(folder)
    return found


def fail_on_one_of_two(
    scratch: Path, failing: int, codes: Sequence[str], limit: float
) -> list[str | None]:
    """Two processes save together and a call of one of them fails: both must say so."""
    base, folder, results = scratch / "pair", scratch / "pair-copy", scratch / "pair.txt"

    def body(ranks: Ranks) -> None:
        filled(base, ranks)
        calls: list[Call] = []
        with Syscalls(base).watching() as seen:
            Checkpoints(base, SilentReporter(), ranks=ranks).save(snapshot(NEW))
        calls = ranks.gather(seen.calls)[failing]
        if ranks.is_main:
            shutil.rmtree(base)
        dist.barrier()
        filled(base, ranks)
        lines: list[str] = []
        for at, call in enumerate(calls):
            for code in codes:
                if ranks.is_main:
                    shutil.copytree(base, folder, symlinks=True)
                dist.barrier()
                saved = Checkpoints(folder, SilentReporter(), ranks=ranks)
                error = attempt(saved, at if ranks.rank == failing else -1, code)
                errors = ranks.gather(None if error is None else type(error).__name__)
                if ranks.is_main:
                    wrong = judge(folder, error, moved(call, base, folder), code)
                    if (errors[0] is None) != (errors[1] is None):
                        wrong = f"{call.name} {code}: one rank failed, the other did not: {errors}"
                    lines.append(wrong or "")
                    shutil.rmtree(folder)
                dist.barrier()
        if ranks.is_main:
            results.write_text("\n".join(lines) + "\n")

    ended = run_ranks(2, body, scratch / "ranks", limit)
    if ended != [0, 0]:
        traces = [p.read_text()[-800:] for p in (scratch / "ranks").glob("*.trace")]
        return [f"exit codes {ended}: {traces}"]
    lines = results.read_text().splitlines()
    for path in (base, folder):
        shutil.rmtree(path, ignore_errors=True)
    return [line or None for line in lines]


def fail_whole_files(scratch: Path, codes: Sequence[str]) -> list[str | None]:
    """Rows, shards, run.yaml and the like: the old file stands, whole, and nothing beside it."""
    path = scratch / "files" / "manifest.json"
    write_bytes(path, b"old")
    with Syscalls(path.parent).watching() as seen:
        write_bytes(path, b"old")
    found: list[str | None] = []
    for at, call in enumerate(seen.calls):
        for code in codes:
            error: SpecctlError | None = None
            with Syscalls(path.parent, at, getattr(errno, code)).watching():
                try:
                    write_bytes(path, b"new")
                except SpecctlError as caught:
                    error = caught
            where = f"{call.name} {code}"
            if error is None and call.name != "mkdir":
                found.append(f"{where}: went unnoticed")
            elif path.read_bytes() not in (b"old", b"new") or len(list(path.parent.iterdir())) > 1:
                found.append(f"{where}: left {sorted(p.name for p in path.parent.iterdir())}")
            else:
                found.append(None)
            write_bytes(path, b"old")
    return found


def order_of(calls: Sequence[Call], folder: Path) -> list[str | None]:
    """What the order of a save's calls leaves to chance, and None per rename."""
    wrong = [text for text in unflushed_renames(list(calls)) if "latest" not in text]
    renames = [c for c in calls if c.kind == "rename"]
    first = next(i for i, c in enumerate(calls) if c.to == str(folder / step_name(NEW)))
    pointer = next(i for i, c in enumerate(calls) if c.to == str(folder / "latest"))
    dropped = next(i for i, c in enumerate(calls) if ".tmp-old" in c.to)
    flushed = calls.index(Call("fsync", str(folder)), first)
    if not first < flushed < pointer < dropped:
        wrong.append(f"order of rename {first}, flush {flushed}, latest {pointer}, drop {dropped}")
    return [*wrong, *([None] * len(renames))]


def prove(codes: Sequence[str] = CODES, limit: float = 600.0, *, pairs: bool = True) -> list[Check]:
    """All of it."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        base = scratch / "base"
        filled(base)
        shutil.copytree(base, scratch / "order", symlinks=True)
        calls = recorded_save(scratch / "order")
        kinds = {call.kind for call in calls}
        absent = [None if kind in kinds or kind == "link" else f"no {kind}" for kind in KINDS]
        checks = [
            checked("kinds of call in a save", absent),
            checked("flushed, then renamed, then pointed to", order_of(calls, scratch / "order")),
            checked("a call of a save fails", fail_every_call(base, codes), 40),
            checked("a call of writing a file fails", fail_whole_files(scratch, codes), 5),
        ]
        for failing in (0, 1) if pairs else ():
            found = fail_on_one_of_two(scratch, failing, codes, limit)
            checks.append(checked(f"two processes, a call of rank {failing} fails", found, 3))
        return checks


KINDS = sorted({Call(name, "").kind for name in CHANGING})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--codes", default=",".join(CODES), help="errors, by name")
    options.add_argument("--limit", type=float, default=600.0, help="seconds until a pair hangs")
    given = options.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    report(prove(given.codes.split(","), given.limit), given.json)


if __name__ == "__main__":
    main()
