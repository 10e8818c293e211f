"""Names of targets that mean a GGUF file: a file, or a folder that holds one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specctl.core.errors import FileError
from specctl.core.storage.model_folder import PACKAGE, WEIGHTS
from specctl.export.package.folder import target_record
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


def test_a_file_is_taken_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    fill(tmp_path, "model.Q4_K_M.gguf", "sha256-0123")
    for name in ("model.Q4_K_M.gguf", "sha256-0123"):
        found = resolve(str(tmp_path / name))
        assert (found.file, found.path, found.repo) == (tmp_path / name, None, None)
        assert found.place == str(tmp_path / name)


def test_a_folder_stands_for_the_only_model_in_it(tmp_path: Path) -> None:
    fill(tmp_path, "model.gguf", "mmproj-model.gguf")
    assert resolve(str(tmp_path)).file == tmp_path / "model.gguf"


def test_parts_are_one_model(tmp_path: Path) -> None:
    fill(tmp_path, *(f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)))
    assert resolve(str(tmp_path)).file == tmp_path / "big-00001-of-00003.gguf"


def test_of_several_none_is_chosen(tmp_path: Path) -> None:
    fill(tmp_path, "a.Q4_0.gguf", "a.Q8_0.gguf")
    with pytest.raises(FileError, match="several GGUF models") as caught:
        resolve(str(tmp_path))
    assert "a.Q4_0.gguf, a.Q8_0.gguf" in str(caught.value.found)
    assert caught.value.do == f"give the file itself: {tmp_path / 'a.Q4_0.gguf'}"


@pytest.mark.parametrize("beside", [WEIGHTS[0], PACKAGE])
def test_a_folder_with_weights_or_a_package_stays_a_folder(tmp_path: Path, beside: str) -> None:
    fill(tmp_path, "a.gguf", "b.gguf", beside)
    found = resolve(str(tmp_path))
    assert (found.path, found.file) == (tmp_path, None)


def test_another_file_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "model.gguf")
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(FileError, match="a file, not a folder"):
        resolve(str(tmp_path / "model.bin"))


def test_a_model_of_ollama_is_the_file_that_its_manifest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    with pytest.raises(FileError, match="not pulled qwen3") as caught:
        resolve("ollama:qwen3")
    assert "gone" in str(caught.value.found)
    (tmp_path / "blobs").mkdir()
    fill(tmp_path / "blobs", "sha256-ab")
    for name in ("ollama:qwen3", "ollama:qwen3:latest"):
        assert resolve(name).file == tmp_path / "blobs" / "sha256-ab"
    named = replace(tiny_target, name="ollama:qwen3")
    assert target_record(named)["name"] == "ollama:qwen3"
    with pytest.raises(FileError, match="not pulled qwen3:4b") as caught:
        resolve("ollama:qwen3:4b")
    assert str(caught.value.do) == "ollama pull qwen3:4b; here are: ollama:qwen3:latest"


def test_a_digest_never_leads_out_of_the_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    manifest = tmp_path / "manifests" / "r" / "library" / "x" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    with pytest.raises(FileError, match="not pulled x"):
        resolve("ollama:x")
