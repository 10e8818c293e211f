"""Our own format again: the package copied after verification, with a fresh card and manifest; or,
where a dtype is named to store it in, its weights written anew in that."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats import ExportSource, Format
from specctl.export.package.card import adapter_flags, given_target
from specctl.export.package.folder import package_tensors
from specctl.export.package.load import read_package
from specctl.export.package.manifest import CARD, WEIGHTS, check_files
from specctl.export.package.target_rows import rows_left_out
from specctl.export.package.tensors import (
    MAP_NAMES,
    compare_tensors,
    refuse_not_finite,
    widest_float,
    write_tensors,
)


def fits(source: ExportSource) -> None:
    if source.store is None:
        return
    if source.drafter.module is None or source.drafter.memories or source.drafter.holds_data:
        raise IncompatibleError(
            f"a drafter of family {source.manifest.family} has no weights alone to round",
            where="--store",
            found="a memory, or nothing",
            expected="a trained drafter",
            do="leave --store out: the package is copied as it is",
        )


def write(source: ExportSource, folder: Path) -> None:
    if source.store is not None:
        write_tensors(_stored(source), folder / WEIGHTS)
        return
    for name in source.manifest.files:
        if name != CARD:
            shutil.copyfile(source.folder / name, folder / name)


def fields(source: ExportSource) -> dict[str, Any]:
    """What the manifest says of weights that are written anew."""
    if source.store is None:
        return {}
    stored = _stored(source)
    own = {name: t for name, t in stored.items() if name not in MAP_NAMES}
    return {
        "dtype": widest_float(own),
        "parameters": sum(t.numel() for t in own.values() if t.is_floating_point()),
        "target_rows": sorted(package_tensors(source.drafter).keys() - stored.keys()),
    }


def notes(source: ExportSource) -> tuple[str, ...]:
    if source.store is None:
        return ()
    if source.store == source.manifest.dtype and source.manifest.held_file is None:
        return ()
    held = source.manifest.held_file
    were = f"trained in {source.manifest.dtype}" if held is None else "packed in a GGUF file"
    return (
        f"The weights were {were} and are stored in {source.store}; "
        "the acceptance above was measured before they were rounded.",
    )


def check(source: ExportSource, folder: Path) -> None:
    """The copy has the source's hashes and loads as the same drafter; written anew, as the rounded
    one."""
    if source.store is not None:
        found = package_tensors(read_package(folder, source.target, source.allow))
        compare_tensors(_as_read(source, found), found)
        return
    fresh, old = check_files(folder).files, source.manifest.files
    for name in sorted((fresh.keys() | old.keys()) - {CARD}):
        if fresh.get(name) != old.get(name):
            raise GateError(
                "the copy of the weights differs from the source",
                found=str(fresh.get(name)),
                expected=str(old.get(name)),
                do="run the export again; check the disk if it happens twice",
            )
    loaded = read_package(folder, source.target, source.allow, widened=True)
    compare_tensors(package_tensors(source.drafter), package_tensors(loaded))


def _stored(source: ExportSource) -> dict[str, Tensor]:
    """What is written: rounded, and without rows that the target has."""
    tensors = package_tensors(source.drafter)
    left_out = rows_left_out(source.drafter, source.target, tensors)
    kept = {n: _rounded(tensor, source) for n, tensor in tensors.items() if n not in left_out}
    refuse_not_finite(kept, do="--store bfloat16")
    return kept


def _rounded(tensor: Tensor, source: ExportSource) -> Tensor:
    assert source.store is not None
    return tensor.to(getattr(torch, source.store)) if tensor.is_floating_point() else tensor


def _as_read(source: ExportSource, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What must be read: rounded tensors, and the rows of before where these were left out."""
    expected = package_tensors(source.drafter) | _stored(source)
    return {n: tensor.to(like[n].dtype) if n in like else tensor for n, tensor in expected.items()}


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
    notes=notes,
    fields=fields,
    fits=fits,
)
