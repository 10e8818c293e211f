"""Checkpoints: a run that was acknowledged as saved survives a kill, a full disk, a damaged file.

Save: check free space -> write every file into `.tmp-step...` beside its final place, fsync each ->
manifest (sizes, sha256) last -> fsync the folder -> rename -> fsync the parent. Only then move the
`latest` pointer and drop old checkpoints. Load: newest first, every hash verified; what is damaged
is moved aside with the reason once a whole one has been found, and else left where it lies: a run
that has lost its state is refused, however often it is asked for, until a restart is allowed. No
pickle: safetensors and JSON only. SIGKILL cannot lose anything by this order; power loss is covered
only as far as the disk obeys fsync.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from specctl.core.errors import IntegrityError, SpecctlError
from specctl.core.storage.files import SLACK, Disk, FileEntry, naming, write_file
from specctl.runtime.measure.reporter import Reporter
from specctl.train.distributed.ranks import Ranks
from specctl.train.saving.fingerprint import RESTART
from specctl.train.saving.integrity import (
    MANIFEST,
    SCHEMA,
    canonical,
    damage,
    digest,
    drop,
    left_over,
    put_aside,
    read_manifest,
    saved_steps,
    set_aside,
    step_name,
)
from specctl.train.saving.tensorfile import num_bytes, tensor_chunks

WHAT = "a checkpoint"  # as errors call what could not be saved
MIN_VALID = 2  # whole checkpoints that retention always leaves


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a run needs to continue. `tensors` (file stem -> name -> tensor) and `scalars` are
    the same on all ranks and written by the first; `own` is written by every rank."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    own: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


def read_snapshot(folder: Path, rank: int = 0) -> Snapshot:
    """A whole checkpoint, tensors on the CPU. The caller has verified it."""
    manifest = read_manifest(folder)
    files = [Path(name) for name in manifest["files"]]
    shared = [f.stem for f in files if f.suffix == ".safetensors" and not f.stem.startswith("rng-")]
    own = folder / f"rng-{rank:03d}.safetensors"
    return Snapshot(
        step=manifest["step"],
        tensors={stem: load_file(folder / f"{stem}.safetensors") for stem in shared},
        own=load_file(own) if own.exists() else {},
        scalars=json.loads((folder / "state.json").read_bytes()),
        fingerprint=manifest["fingerprint"],
    )


class Checkpoints:
    """The checkpoints of one run folder. One writer: the process (group) that holds its lock."""

    def __init__(
        self,
        folder: Path,
        reporter: Reporter,
        keep: int = MIN_VALID,
        ranks: Ranks | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.reporter, self.keep = folder, reporter, max(keep, MIN_VALID)
        self.ranks, self.disk = ranks or Ranks(), disk or Disk()

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; says nothing about its health."""
        return saved_steps(self.folder)

    def save(self, snapshot: Snapshot, pinned: Collection[int] = ()) -> Path:
        """Write a checkpoint; when this returns it is safe. `pinned` steps are never dropped."""
        final = self.path(snapshot.step)
        part = self.folder / f".tmp-{final.name}"
        need = sum(num_bytes(tensors) for tensors in snapshot.tensors.values())
        need += num_bytes(snapshot.own) * self.ranks.size
        try:
            entries = self._write_parts(part, snapshot, need)
            with self.ranks.together(), naming(part, need, WHAT):
                if self.ranks.is_main:
                    self._publish(part, final, snapshot, entries, pinned)
        except SpecctlError:
            if self.ranks.is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return final

    def _write_parts(self, part: Path, snapshot: Snapshot, need: int) -> dict[str, FileEntry]:
        disk, ranks, entries = self.disk, self.ranks, {}
        with ranks.together(), naming(part, need, WHAT):
            if ranks.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._preflight(need)
                if part.exists():
                    shutil.rmtree(part)
                disk.mkdir(part)
        with ranks.together(), naming(part, need, WHAT):
            own = f"rng-{ranks.rank:03d}.safetensors"
            entries[own] = write_file(disk, part / own, tensor_chunks(snapshot.own))
            if ranks.is_main:
                for stem, tensors in snapshot.tensors.items():
                    name = f"{stem}.safetensors"
                    entries[name] = write_file(disk, part / name, tensor_chunks(tensors))
                body = memoryview(canonical(snapshot.scalars))
                entries["state.json"] = write_file(disk, part / "state.json", iter([body]))
        return {name: e for found in ranks.gather(entries) for name, e in found.items()}

    def _preflight(self, need: int) -> None:
        free = self.disk.free(self.folder)
        if free < SLACK * need:
            raise OSError(errno.ENOSPC, f"{free:,} bytes are free")

    def _publish(
        self,
        part: Path,
        final: Path,
        snapshot: Snapshot,
        entries: Mapping[str, FileEntry],
        pinned: Collection[int],
    ) -> None:
        manifest = {
            "schema": SCHEMA,
            "step": snapshot.step,
            "files": {name: asdict(entry) for name, entry in entries.items()},
            "fingerprint": dict(snapshot.fingerprint),
            "world_size": self.ranks.size,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        }
        body = memoryview(canonical(manifest | {"sha256": digest(manifest)}))
        disk = self.disk
        write_file(disk, part / MANIFEST, iter([body]))
        disk.fsync_path(part)
        disk.replace(part, final)
        disk.fsync_path(self.folder)
        self._point("latest", final.name)
        self._retain(pinned)

    def _point(self, name: str, to: str) -> None:
        link = self.folder / f".tmp-{name}"
        link.unlink(missing_ok=True)
        self.disk.symlink(to, link)
        self.disk.replace(link, self.folder / name)

    def _retain(self, pinned: Collection[int]) -> None:
        """Keep the newest `keep` whole checkpoints and the pinned ones. What goes is renamed first,
        so that no half-deleted folder ever looks like a checkpoint."""
        steps = self.steps()
        whole = [step for step in steps if damage(self.path(step), hashes=False) is None]
        kept = {*whole[-self.keep :], *pinned}
        for step in steps:
            if step not in kept:
                gone = self.folder / f".tmp-old-{step_name(step)}"
                self.disk.replace(self.path(step), gone)
                self._drop(gone)

    def _drop(self, path: Path) -> None:
        kept = drop(path)
        if kept is not None:
            self.reporter.warn(f"a checkpoint went; what else lay in it is kept in {kept}")

    def newest(self, restart: bool = False) -> Snapshot | None:
        """The newest whole checkpoint, None if the run has none. Damaged ones are moved aside. If
        all are damaged it is an IntegrityError, or None where a `restart` is allowed."""
        chosen: int | None = None
        with self.ranks.together():
            if self.ranks.is_main:
                chosen = self._choose(restart)
        chosen = self.ranks.gather(chosen)[0]
        return None if chosen is None else read_snapshot(self.path(chosen), self.ranks.rank)

    def _choose(self, restart: bool) -> int | None:
        for path in left_over(self.folder):
            self._drop(path)
        reasons: dict[Path, str] = {}
        chosen: int | None = None
        for step in reversed(self.steps()):
            reason = damage(self.path(step))
            if reason is None:
                chosen = step
                break
            reasons[self.path(step)] = reason
        if chosen is None and not restart:
            self._refuse_restart(reasons)
        for folder, reason in reasons.items():
            self.reporter.warn(f"skipped checkpoint {folder.name}: {reason}")
            put_aside(folder)
        return chosen

    def _refuse_restart(self, reasons: Mapping[Path, str]) -> None:
        """Raise if the run had a state once, be it only one that was set aside."""
        found = [f"{folder.name}: {reason}" for folder, reason in reasons.items()]
        aside = set_aside(self.folder)
        if aside:
            found.append("set aside: " + ", ".join(path.name for path in aside))
        if found:
            raise IntegrityError(
                "none of the run's checkpoints is whole",
                found="; ".join(found),
                expected="at least one undamaged checkpoint",
                do="restore the files, or choose another --out; to begin at step 0 again, give "
                f"--allow {RESTART}, or delete that folder yourself",
                where=str(self.folder),
            )

    def load(self, step: int) -> Snapshot:
        """The checkpoint of that step, verified."""
        reason = damage(self.path(step))
        if reason is not None:
            raise IntegrityError(
                f"checkpoint {step_name(step)} is damaged",
                found=reason,
                do="resume the run, which falls back to a whole checkpoint",
                where=str(self.path(step)),
            )
        return read_snapshot(self.path(step), self.ranks.rank)
