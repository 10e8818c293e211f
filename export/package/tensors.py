"""Tensors of a package on the disk: written, read with suspicion, compared bit for bit."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.core.errors import GateError, IntegrityError, is_out_of_memory
from specctl.export.package.atomic import FULL
from specctl.export.package.files import read_header

MAP_NAMES = ("d2t", "t2d")  # the vocabulary map, beside the drafter's own weights


def compare_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> int:
    """The number of tensors, all of them bit for bit equal; else a GateError naming the first."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        is_same = old is not None and new is not None and old.dtype == new.dtype
        if not is_same or not torch.equal(old, new):  # type: ignore[arg-type]
            raise GateError(
                "a tensor changed between memory and disk",
                found=f"{name}: {_shown(new)}",
                expected=_shown(old),
                do="run it again; report it if it happens twice",
                where=name,
            )
    return len(before)


def widest_float(tensors: Mapping[str, Tensor]) -> str:
    """The widest floating dtype among tensors, in which nothing is lost."""
    floats = {t.dtype for t in tensors.values() if t.is_floating_point()}
    widest = max(floats, key=lambda d: (torch.finfo(d).bits, str(d)), default=torch.float32)
    return str(widest).removeprefix("torch.")


def _shown(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a foreign safetensors file: the header first, then finite numbers only."""
    for name, entry in read_header(path).items():
        if math.prod(max(size, 1) for size in entry.shape) >= 1 << 48:  # an empty one may be vast
            raise IntegrityError(
                "a tensor has an absurd shape",
                found=f"{ascii(name)[1:-1][:100]} {entry.shape}",
                expected="sizes that a drafter could have",
                do="get the package again",
                where=path.name,
            )
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, ValueError, OverflowError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise IntegrityError(
            "the weights cannot be read",
            found=str(error)[:200],
            expected="a safetensors file",
            do="get the package again",
            where=path.name,
        ) from error
    refuse_not_finite(tensors)
    return tensors


def refuse_not_finite(
    tensors: Mapping[str, Tensor], do: str = "package an earlier checkpoint of the run"
) -> None:
    """Raise IntegrityError for weights with NaN or infinities, or of a quantised dtype; `do`: what
    helps against the former."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise IntegrityError(
                "the weights are quantised, which no drafter is",
                found=f"{str(tensor.dtype).removeprefix('torch.')} in {ascii(name)[1:-1][:100]}",
                expected="float16, bfloat16, float32 or float64",
                do="get the weights as they were before they were quantised",
                where=name,
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(
                "the drafter's weights are not finite",
                found=f"NaN or Inf in {name}",
                expected="finite numbers",
                do=do,
                where=name,
            )


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library reports a full disk in its own words
        full = any(f"os error {code}" in str(error) for code in FULL)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
