"""export(): write a drafter in another format, read back and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.api.arguments.outputs import check_folder
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.core.errors import SpecctlError
from specctl.core.messages.table import Table, Tabled
from specctl.export.formats import PACKAGE, check_store, filled, find_format, format_for
from specctl.export.formats import export as write
from specctl.export.package.manifest import Manifest, package_in, read_manifest
from specctl.export.package.publication import (
    STORE,
    check_public,
    to_publish,
)
from specctl.recipes.published import path_named
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders.hub import with_file


@dataclass(frozen=True, slots=True, repr=False)
class ExportResult(Tabled):
    """What was written. `serve` are the shell commands that serve it, `notes` what a user must
    know of it."""

    out: Path
    manifest: Manifest
    serve: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.manifest.notes)

    def table(self) -> Table:
        """Where it is, and how it is served."""
        rows = [
            ("format", self.manifest.format),
            ("files", ", ".join(self.files)),
            ("sha256", self.manifest.digest[:12]),
            *(("serve", line) for line in self.serve),
        ]
        return Table(("export", str(self.out)), rows, [f"note: {note}" for note in self.notes])

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "format": self.manifest.format,
            "files": self.files,
            "sha256": self.manifest.digest,
            "serve": list(self.serve),
        }


@raises_user_errors
def export(
    drafter: str | Path,
    to: str,
    out: str | Path,
    *,
    target: TargetLike = None,
    allow: Sequence[str] = (),
    engine_python: str | None = None,
    store: str | None = None,
) -> ExportResult:
    """Write a package (its folder, or its run's) in the format of a serving engine at `out`. What
    was written is read back by that engine's rules and must draft what the drafter drafts.
    `to` is a format, or an engine (vllm, sglang, llama.cpp, trtllm, openvino, mlx), whose
    format is chosen by the family. `target`: the one that it was made for, unless another is given;
    docs/export.md lists formats. `engine_python` is one that has the engine's converter (openvino).
    `store`: with "specctl", the dtype in which the package's weights are written anew, without rows
    that are the target's own.
    """
    folder, out = package_in(path_named(drafter)), Path(out)
    manifest = read_manifest(folder)
    to = format_for(to, manifest.family)
    find_format(to, manifest.family)
    check_store(store, to)
    check_folder(out)
    model = target_or_own(target, folder)
    manifest = write(folder, to, out, model, allow=allow, engine_python=engine_python, store=store)
    try:
        found = with_file(resolve(model.name, model.revision), offline=True)
        place = found.file if to == "gguf" else found.path
    except SpecctlError:  # a model in memory
        place = None
    return ExportResult(
        out, manifest, tuple(filled(line, out, place) for line in manifest.served_by)
    )


@raises_user_errors
def publish(
    drafter: str | Path,
    name: str,
    *,
    license: str,
    target: TargetLike = None,
    measured: str | Path | None = None,
    store: str = STORE,
    force: bool = False,
    allow: Sequence[str] = (),
) -> ExportResult:
    """Put a package (its folder, or its run's) among the drafters that come with specctl, as
    `name`: in `store`, without rows that are the target's. `target` is an alias or a hub id, which
    the package then names; `measured` the card of a benchmark; `force` replaces what is there.
    """
    publication = to_publish(name, license, measured, force)
    check_store(store, PACKAGE)
    folder, out = package_in(path_named(drafter)), publication.place
    model = target_or_own(target, folder)
    check_public(model)
    manifest = write(folder, PACKAGE, out, model, allow=allow, store=store, publication=publication)
    return ExportResult(
        out, manifest, tuple(filled(line, name, None) for line in manifest.served_by)
    )
