"""Every real family survives its package: same tensors, same options, same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import export, formats
from specctl.export.package.check import check_package
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.runtime.target.target import Target
from specctl_testing.export.family_drafters import made

REAL = [name for name in families() if name != "toy"]
PROMPTS = [[1, 5, 9, 5, 9, 5], [7, 7, 3], [20, 30, 2]]


@pytest.mark.parametrize("name", REAL)
def test_a_package_gives_back_the_family(
    name: str, plain_target: Target, save: Any, tmp_path: Path
) -> None:
    family = families()[name]
    drafter = made(name, plain_target)
    folder = save(drafter, serve={"policy": family.policies[0], "length": 3})
    loaded = load_drafter(folder, plain_target)
    assert type(loaded) is type(drafter)
    assert loaded.options == drafter.options
    assert loaded.needs() == drafter.needs()
    report = check_package(
        folder, plain_target, reference=drafter, prompts=PROMPTS[:2], new_tokens=6
    )
    assert report.loaded == report.before
    assert report.tensors == len(drafter.tensors())
    assert (WEIGHTS in check_files(folder).files) == bool(drafter.tensors())
    copy = export(folder, "specctl", tmp_path / "copy", plain_target)
    assert copy.family == name


@pytest.mark.parametrize("name", ["small-lm", "eagle3", "medusa"])
def test_a_trimmed_family_comes_back_with_its_map(
    name: str, plain_target: Target, save: Any
) -> None:
    vocab = VocabMap(torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 34, 47]), 48)
    small = made(name, plain_target).trimmed(vocab)
    if small.needs().borrow:
        small.bind(plain_target.borrowed())
    folder = save(small, serve={"policy": families()[name].policies[0], "length": 3})
    report = check_package(folder, plain_target, reference=small, prompts=PROMPTS, new_tokens=6)
    assert report.loaded == report.before
    loaded = load_drafter(folder, plain_target)
    assert loaded.vocab is not None
    assert torch.equal(loaded.vocab.ids_K, vocab.ids_K)


def test_formats_say_what_they_hold() -> None:
    for name, form in formats().items():
        assert form.name == name
        assert form.summary
        assert form.families is None or set(form.families) <= set(families())
