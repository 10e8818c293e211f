"""`specctl targets`: what is here, and what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.api import models_here
from specctl.api.models_here import ModelHere
from specctl.core.errors import Exit
from specctl.runtime.target.target import Target
from specctl_testing.cli.ran import Run
from specctl_testing.export.engine_cases import packaged, shaken


def test_what_is_here_is_listed_with_a_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"1")
    large = ModelHere("a/large", "hub cache", tmp_path, 4 << 30, "qwen2", "t", ("a/small",))
    monkeypatch.setattr(
        models_here, "models_here", lambda: [large, ModelHere(str(file), "llama.cpp", file, 1)]
    )
    ran = run("targets")
    assert ran.code == 0
    assert "a/large" in ran.out
    assert "4.29 GB" in ran.out
    assert "qwen2.5-coder-1.5b" in ran.out
    assert "specctl bench --target a/large a/small" in ran.err
    answer = run("targets", "--here", "--json").json["result"]
    assert [one["name"] for one in answer["models"]] == ["a/large", str(file)]
    assert answer["aliases"] == []


def test_a_machine_without_models_says_where_it_looked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_here, "models_here", list)
    ran = run("targets", "--here")
    assert "no model in the hub's cache" in ran.out
    assert "specctl bench prompt-lookup" in ran.err


def test_a_gguf_file_is_offered_where_it_can_be_a_target(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gguf: Path
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    files = [ModelHere(str(file), "llama.cpp", file, 1) for file in (bad, tiny_gguf)]
    monkeypatch.setattr(models_here, "models_here", lambda: files)
    ran = run("targets", "--here")
    assert f"specctl bench prompt-lookup --target {tiny_gguf}" in ran.err


def test_a_published_drafter_is_listed_beside_its_target_and_drafts_by_its_name(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Target
) -> None:
    monkeypatch.setattr("specctl.recipes.published.published_room", lambda: tmp_path / "room")
    monkeypatch.setattr(models_here, "models_here", list)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    drafter = shaken("eagle3", tiny_target, taps=(1,), intermediate=32)
    package = packaged(drafter, tiny_target, tmp_path / "package")
    publish = ("export", package, "--publish", "tiny-one", "--license", "mit", "--target", "tiny")
    for ignored in ("--public", "--yes", "--prove", "--engine=vllm", "--to=gguf", "--out=x"):
        ran = run(*publish, ignored)
        assert (ran.code, ignored.partition("=")[0] in ran.err) == (Exit.USAGE, True), ignored
    assert run(*publish, "--store", "bf16").code == Exit.RECIPE
    assert run(*publish, "--measured", "gone.md").code == Exit.FILE
    assert "no drafter was given" in run(*publish[:1], *publish[2:]).err
    assert "no --to" in run("export", package, "--push", "a/b", "--store", "float16").err
    assert not Path("room").exists()
    assert run(*publish).code == 0
    assert run(*publish).code == 4, "the name is taken"
    assert run(*publish, "--force").code == 0
    (tiny,) = (
        one for one in run("targets", "--json").json["result"]["aliases"] if one["name"] == "tiny"
    )
    assert "tiny-one" in tiny["drafts"]
    drafted = run("generate", "-d", "tiny-one", "-t", "tiny", "def f(", "--max-new-tokens", "4")
    plain = run("generate", "-t", "tiny", "def f(", "--max-new-tokens", "4")
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert "specctl verify tiny-one\n" in run("show", "tiny-one").err
    unknown = run("generate", "-d", "tiny-two", "-t", "tiny", "def f(")
    assert unknown.code == 4
    assert "tiny-one" in unknown.err
