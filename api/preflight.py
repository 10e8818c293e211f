"""What a run would refuse once it has begun, refused before: by its dry run and plan as well."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.api.outputs import check_folder
from specctl.core.errors import FileError, SpecctlError, unknown
from specctl.recipes.stages import PREFIX

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


# What systems leave in a folder that is empty for people.
HARMLESS = frozenset({".DS_Store", ".gitignore", ".gitkeep", "lost+found"})
HALF = "half"  # the first run of `prune --two-step`, which is there before that of the folder


def check_run(recipe: Recipe, out: Path, warn: Callable[[str], None] | None = None) -> None:
    """The folder, the data and the drafters that every stage of a run has yet to ask for. With
    `warn`, data that are not there yet are only warned of: a price may be asked for before they
    are."""
    from specctl.train.data.sources import check_source
    from specctl.train.runs.finished import remaining

    check_folder(out)
    for stage in remaining(recipe, out):
        try:
            check_source(stage.data.source, stage.data.format)
        except FileError as error:
            if warn is None:
                raise
            warn(f"{error.what}, so its size is guessed ({error.found}); the run will need it")
        for name in (stage.drafter.init, stage.train.reference):
            if name is not None:
                _check_drafter(name)


def check_out(out: Path) -> None:
    """Refuse a folder in which something lies and no run has begun: what a run writes would be
    mixed with it."""
    from specctl.train.saving.lock import NAME
    from specctl.train.saving.run_file import RECORD, recorded

    if not out.is_dir() or any((out / part / NAME).is_file() for part in ("", HALF)):
        return
    foreign = sorted({path.name for path in out.iterdir()} - HARMLESS)
    if foreign and recorded(out / RECORD) is None:
        raise FileError(
            f"{out} holds files that no run has written",
            where="--out",
            found=", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else ""),
            expected="a new or empty folder, or one of a run",
            do="choose another --out, or move them away yourself",
        )


def _check_drafter(name: str) -> None:
    """Refuse a drafter that is nowhere here, or a package that was changed; the hub is not
    asked."""
    from specctl.export.package.find import Kind, is_hub_id, locate
    from specctl.export.package.manifest import check_files
    from specctl.recipes.targets import aliases

    if name == "target" or name in aliases() or name.startswith(PREFIX) or is_hub_id(name):
        return
    found = locate(name)
    if found.kind is Kind.PACKAGE and found.folder is not None:
        check_files(found.folder)


def check_allowed(names: Collection[str]) -> None:
    """--allow names parts of a run that may have changed, or its restart; any other word allows
    nothing."""
    from specctl.train.saving.fingerprint import PARTS, RESTART

    known = (*PARTS, RESTART)
    for name in names:
        if name not in known:
            raise unknown("part of a run", name, known, "--allow", kind=SpecctlError)
