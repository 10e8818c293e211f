"""What can go wrong around an export is reported as what it is, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specctl.core.errors import FileError, IncompatibleError, ResourceError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.export.formats import export
from specctl.export.package.atomic import new_folder
from specctl.export.package.folder import own_files
from specctl.export.package.manifest import read_manifest
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import shaken

SMALL = SmallLmOptions(layers=1, width=16, head_dim=8, heads=2, kv_heads=1, intermediate=24)


@pytest.fixture
def package(plain_target: Target, save: Callable[..., Path]) -> Path:
    return save(SmallLm(SMALL, plain_target.spec, None))


def test_an_export_is_no_package_to_export_again(package: Path, plain_target: Target) -> None:
    first, out = package.parent / "first", package.parent / "out"
    export(package, "hf", first, plain_target)
    with pytest.raises(FileError, match=r"is an export.*format hf.*a package.*exported from"):
        export(first, "specctl", out, plain_target)
    assert not out.exists()


def test_the_folder_of_a_run_stands_for_its_package(
    package: Path, plain_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest = export(
        package.parent, "hf", tmp_path_factory.mktemp("exports") / "out", plain_target
    )
    assert manifest.format == "hf"


def test_a_short_write_of_numpy_is_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="not enough disk space"):  # noqa: SIM117
        with new_folder(tmp_path / "out", own_files):
            np.zeros(1 << 20).tofile("/dev/full")
    assert not any(tmp_path.iterdir())


def test_a_family_that_does_not_fit_is_named(package: Path, plain_target: Target) -> None:
    with pytest.raises(IncompatibleError, match=r"of family small-lm.*formats that fit"):
        export(package, "medusa", package.parent / "out", plain_target)


def test_another_target_is_the_one_that_is_served(
    plain_target: Target, save: Callable[..., Path]
) -> None:
    other = replace(plain_target, name="some/tune", fingerprint="e" * 64)
    package = save(shaken("eagle3", plain_target))
    out = package.parent / "out"
    with pytest.raises(IncompatibleError, match="--allow target"):
        export(package, "speculators", out, other)
    manifest = export(package, "speculators", out, other, allow=["target"])
    assert [line.split()[2] for line in manifest.served_by] == ["THIS_FOLDER", "some/tune"]
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "some/tune"
    assert manifest.target == read_manifest(package).target
    card = (out / "README.md").read_text()
    assert "beside some/tune, not beside some/target" in card
    assert export(package, "speculators", out, plain_target).notes == ()
