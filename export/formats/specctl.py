"""Our own format again: the package copied after verification, with a fresh card and manifest."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from specctl.core.errors import GateError
from specctl.export.formats import ExportSource, Format
from specctl.export.package.card import adapter_flags, given_target
from specctl.export.package.folder import package_tensors
from specctl.export.package.load import read_package
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors


def write(source: ExportSource, folder: Path) -> None:
    if WEIGHTS in source.manifest.files:
        shutil.copyfile(source.folder / WEIGHTS, folder / WEIGHTS)


def check(source: ExportSource, folder: Path) -> None:
    """The copy has the source's hashes and loads as the same drafter."""
    fresh, old = check_files(folder).files, source.manifest.files
    if fresh.get(WEIGHTS) != old.get(WEIGHTS):
        raise GateError(
            "the copy of the weights differs from the source",
            found=str(fresh.get(WEIGHTS)),
            expected=str(old.get(WEIGHTS)),
            do="run the export again; check the disk if it happens twice",
        )
    loaded = read_package(folder, source.target, source.allow)
    compare_tensors(package_tensors(source.drafter), package_tensors(loaded))


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    record = source.manifest.target
    words = ["specctl", "serve", "--target", given_target(record), *adapter_flags(record)]
    return (shlex.join([*words, "--draft", folder]),)


FORMAT = Format(
    name="specctl",
    summary="package folder of specctl: safetensors, manifest.json, README.md",
    families=None,
    write=write,
    check=check,
    serve=serve,
)
