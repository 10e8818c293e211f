"""Models of this machine: the hub's cache, other programs' folders, and the drafts that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.api import models_here as module
from specctl.api.models_here import aliases_here, drafts_for, models_here


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, in which every place lies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(home: Path, repo: str, size: int, vocab: dict[str, int]) -> Path:
    """A repository in the hub's cache."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (snapshot / "model.safetensors").write_bytes(b"x" * size)
    tokenizer: dict[str, Any] = {"model": {"vocab": vocab, "merges": []}}
    (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
    return snapshot


def names(found: Any) -> list[str]:
    return [one.name for one in found]


def test_an_empty_machine_has_no_models(home: Path) -> None:
    assert models_here() == []


def test_a_small_model_with_the_same_vocabulary_fits_a_large_one(home: Path) -> None:
    large = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    model(home, large, 300, {"a": 0, "b": 1})
    model(home, "Qwen/small", 100, {"b": 1, "a": 0})
    model(home, "other/small", 100, {"a": 0, "c": 1})
    found = {one.name: one for one in models_here()}
    assert found[large].drafts == ("Qwen/small",)
    assert found["Qwen/small"].drafts == ()
    assert found[large].model_type == "qwen2"
    here = {one.name: one.is_here for one in aliases_here([*found.values()])}
    assert here["qwen2.5-coder-1.5b"]
    assert not here["qwen2.5-coder-0.5b"]
    assert here["tiny"]


def test_a_repository_without_weights_is_no_model(home: Path) -> None:
    (model(home, "a/b", 1, {"a": 0}) / "model.safetensors").unlink()
    assert models_here() == []


def test_packages_fit_the_target_that_their_manifest_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(home, "HuggingFaceTB/SmolLM2-135M-Instruct", 10, {"a": 0})
    package = home / "runs" / "mine" / "package"
    package.mkdir(parents=True)
    (package / "manifest.json").write_text("{}")
    broken = home / "runs" / "other"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")

    class Manifest:
        class target:
            name = "smollm2-135m"

    real = module.read_manifest

    def read(folder: Path) -> Any:
        return Manifest if "mine" in str(folder) else real(folder)

    monkeypatch.setattr(module, "read_manifest", read)
    [one] = models_here()
    assert one.drafts == ("runs/mine/package",)
    named = {one.name: one for one in aliases_here()}
    assert named["smollm2-135m"].drafts == ("runs/mine/package",)
    for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        [draft] = drafts_for(name)
        assert (draft.name, draft.is_package) == ("runs/mine/package", True)
    assert [one.name for one in drafts_for("smollm2-1.7b")] == ["smollm2-135m", "smollm2-360m"]
    assert drafts_for("some/model") == []


def test_files_of_other_programs_are_listed(home: Path) -> None:
    studio = home / ".lmstudio" / "models" / "owner" / "repo"
    studio.mkdir(parents=True)
    for name in ("m-Q4_K_M.gguf", "mmproj-m.gguf", "big-00001-of-00002.gguf",
                 "big-00002-of-00002.gguf"):  # fmt: skip
        (studio / name).write_bytes(b"12345")
    llama = home / ".cache" / "llama.cpp"
    llama.mkdir(parents=True)
    (llama / "x.gguf").write_bytes(b"1")
    ollama = home / ".ollama" / "models"
    manifest = ollama / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "4b"
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:aa"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:bb"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    (ollama / "blobs").mkdir()
    (ollama / "blobs" / "sha256-bb").write_bytes(b"123")
    gone = manifest.parent / "gone"
    gone.write_text(json.dumps({"layers": [{**layers[1], "digest": "sha256:cc"}]}))
    found = {Path(one.name).name: (one.place, one.bytes, one.is_gguf) for one in models_here()}
    assert found == {
        "big-00001-of-00002.gguf": ("LM Studio", 10, True),
        "m-Q4_K_M.gguf": ("LM Studio", 5, True),
        "ollama:qwen3:4b": ("Ollama", 3, True),
        "x.gguf": ("llama.cpp", 1, True),
    }


def test_aliases_name_small_models_of_their_family() -> None:
    found = {one.name: one for one in aliases_here()}
    assert "qwen2.5-coder-0.5b" in found["qwen2.5-coder-1.5b"].drafts
    assert "smollm2-135m" in found["smollm2-1.7b"].drafts
    assert found["smollm2-135m"].drafts == ()
    assert found["smollm2-135m"].stands_for == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found["qwen2.5-coder-1.5b"].shape.parameters == pytest.approx(1.54e9, rel=0.01)
    assert found["qwen2.5-coder-0.5b"].shape.parameters == pytest.approx(0.494e9, rel=0.01)
