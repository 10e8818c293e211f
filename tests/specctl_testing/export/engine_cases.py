"""Feature drafters with weights that all count, packages of them, and faults put into an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import ExportSource, export, formats
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import WEIGHTS, Manifest
from specctl.runtime.target.target import Target

KEPT = (0, 2, 3, 4, 5, 7, 11, 20, 21, 22, 30, 31, 40, 47)

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]  # of config and tensors

# Fewer layers and depths than the published ones, which a target of four layers has not.
SMALL: dict[str, dict[str, Any]] = {
    name: {"layers": 2, "taps": (1, 2, 3)}
    for name in ("dflare", "dflash", "dflash2", "dfly", "domino", "dspark", "lilicorr", "xpress")
}
SMALL["dflash2"] |= {"candidates": 3, "rank": 8, "conv_group": 4}
SMALL["lilicorr"] |= {"candidates": 4, "width": 24, "factor": 12}
SMALL["xpress"] |= {"rank": 8}


def shaken(
    family: str,
    target: Target,
    kept: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Drafter:
    """A random drafter of the family: nothing zero, nothing the identity."""
    vocab = None if kept is None else VocabMap(torch.tensor(kept), target.spec.vocab_size)
    found = families()[family]
    torch.manual_seed(0)
    drafter = found.build(found.options(**SMALL.get(family, {}) | options), target.spec, vocab)
    drafter.bind(target.borrowed())
    assert drafter.module is not None
    with torch.no_grad():
        for name, weight in drafter.module.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    drafter.module.to(dtype)
    return drafter


def packaged(drafter: Drafter, target: Target, out: Path, **fields: Any) -> Path:
    about: dict[str, Any] = {"serve": {"policy": "chain", "length": 3}, "acceptance": None}
    command = ["specctl", "train-draft", "--target", target.name]
    save_package(drafter, target, out, recipe_digest="d" * 64, command=command, **about | fields)
    return out


def exported(drafter: Drafter, target: Target, out: Path, to: str) -> Manifest:
    """The manifest of an export of that drafter at `out`."""
    package = packaged(drafter, target, out.with_name(f"{out.name}-package"))
    return export(package, to, out, target)


def faulty(monkeypatch: pytest.MonkeyPatch, to: str, change: Change, file: str = WEIGHTS) -> None:
    """From now on that format is written with a mistake in it."""
    form = formats()[to]

    def write(source: ExportSource, folder: Path) -> None:
        form.write(source, folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / file)
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file)

    monkeypatch.setitem(formats(), to, replace(form, write=write))


def saying(**fields: Any) -> Change:
    """Other values in config.json."""
    return lambda config, tensors: config.update(fields)


def swapped(first: str, second: str) -> Change:
    """Two tensors under each other's names."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def without(name: str) -> Change:
    """A tensor left out."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def zeroed(name: str) -> Change:
    """A tensor of zeros."""
    return lambda config, tensors: tensors.update({name: torch.zeros_like(tensors[name])})
