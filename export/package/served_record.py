"""What an engine did with an export, as a line of its card."""

from __future__ import annotations

import shutil
from pathlib import Path

from specctl.export.package.atomic import new_folder
from specctl.export.package.folder import own_files, seal_folder
from specctl.export.package.manifest import CARD, Manifest, check_files


def write_served(folder: Path, engine: str, found: str) -> Manifest:
    """The folder with `Served by ENGINE: FOUND` on its card; what was said of that engine before is
    replaced. The folder changes in one step, its other files not at all."""
    manifest, opening = check_files(folder), f"Served by {engine}: "
    about = manifest.to_json()
    notes = [note for note in manifest.notes if not note.startswith(opening)]
    about["notes"] = [*notes, opening + found]
    with new_folder(folder, own_files) as temp:
        for name in manifest.files:
            if name != CARD:
                shutil.copyfile(folder / name, temp / name)
        return seal_folder(temp, {k: v for k, v in about.items() if k not in ("digest", "files")})
