"""Plans for GPUs that are not here, and runs that are refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.core.errors import Exit
from specctl.train.planning import capacity
from specctl_testing.cli.ran import Run

SMALL = ("--set", "train.seq_len=64", "--set", "vocab.size=512")


def test_a_plan_for_other_gpus_says_what_each_holds_and_what_they_cost(
    run: Run, tmp_path: Path
) -> None:
    words = ("--recipe", "medusa", "--gpu", "l4", "--gpus", "16", "--set", "train.rows=16", *SMALL)
    ran = run("plan", *words, "--out", tmp_path / "new", "--json")
    assert ran.code == 0, ran.err
    plan = ran.json["result"]["plan"]
    assert plan["hardware"] == "16 x l4, 24 GB each, in 2 machines"
    assert 1e9 < plan["device_bytes"] < 24e9
    low, high = plan["gpu_hours_range"]
    assert (low, high) == tuple(16 * s / 3600 for s in plan["seconds_range"])


def test_a_plan_without_the_kind_of_gpu_or_with_an_unknown_one_is_refused(run: Run) -> None:
    for words in (("--gpus", "8"), ("--gpu", "h10"), ("--gpu", "h100", "--nodes", "2")):
        ran = run("plan", *words)
        assert ran.code != 0
        assert "--gpu" in ran.err


def test_a_demonstration_is_not_begun_for_a_real_target(run: Run, tmp_path: Path) -> None:
    ran = run("train-draft", "--target", "llama3-8b", "--out", tmp_path / "run")
    assert ran.code == Exit.RECIPE
    assert "--recipe llama3-8b-eagle3" in ran.err
    small = run("distill", "--target", "llama3-8b", "--out", tmp_path / "run")
    assert "llama3-8b-distill" in small.err
    assert not (tmp_path / "run").exists()


def test_a_target_that_the_machine_cannot_hold_is_refused_with_the_way_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "machine_bytes", lambda: 10 * 10**9)
    data = tmp_path / "chats.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}')
    words = ("--target", "llama3-8b", "--recipe", "llama3-8b-eagle3", "--data", data)
    ran = run("train-draft", *words, "--out", tmp_path / "run")
    assert ran.code == Exit.RESOURCES
    assert "memory of this machine: 10.0 GB" in ran.err
    assert "--gpu h100" in ran.err
    assert not (tmp_path / "run").exists()
