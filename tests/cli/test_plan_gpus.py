"""Plans for GPUs that are not here, and runs that are refused before a weight is read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specctl.cli.app.launch import use_device
from specctl.core.errors import Exit, ResourceError
from specctl.recipes.load import load_recipe
from specctl.train.planning import capacity, hardware
from specctl.train.planning.memory import way_out, ways
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


def test_a_plan_takes_the_short_flags_of_training(run: Run, tmp_path: Path) -> None:
    words = (
        "plan",
        "--recipe",
        "medusa",
        *SMALL,
        "--out",
        tmp_path / "new",
        "--json",
        "--gpu",
        "l4",
    )
    ran = run(*words, "--steps", "30", "--lr", "0.25", "--batch-size", "2")
    assert ran.code == 0, ran.err
    train = ran.json["result"]["recipe"]["train"]
    assert (train["steps"], train["learning_rate"], train["rows"]) == (30, 0.25, 2)
    refused = run(*words, "--device", "cpu")
    assert refused.code == Exit.USAGE, refused.err


def test_the_change_that_a_plan_proposes_makes_it_fit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs with room for all but half of the batch, and for all but the batch."""
    words = ("plan", "--recipe", "medusa", "--set", "train.rows=16", *SMALL)
    words += ("--out", str(tmp_path / "new"), "--json", "--gpu")
    plan = run(*words, "h100").json["result"]["plan"]
    batch = plan["memory"]["batch"]
    for lack, least in ((batch // 2, "--set train.rows="), (batch, "--gpu ")):
        gpu = hardware.Gpu("toy", plan["device_bytes"] - lack, 1e12, 1e12)
        monkeypatch.setitem(hardware.GPUS, "toy", gpu)
        refused = run(*words, "toy")
        assert refused.code == Exit.RESOURCES
        do = refused.json["error"]["do"]
        assert do.startswith(least), do
        given = run(*words, "toy", *shlex.split(do))
        assert given.code == 0, given.err


def test_a_machine_is_told_nothing_of_gpus_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = hardware.Gpu("toy", 1, 0.0, 0.0)
    train = load_recipe("medusa", ["train.rows=4"]).train
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for is_here, most in ((True, 2), (False, 4)):
        cluster = hardware.Cluster(1, 1, gpu, is_here=is_here)
        found = [way for tried in ways(train, True, cluster) for way in tried]
        assert max(way.cluster.processes for way in found) == most
    here = hardware.Cluster(1, 1, gpu, is_here=True)
    assert way_out(train, True, here, lambda train, cluster: cluster.gpu is not gpu) is None


def test_a_target_whose_states_come_from_a_server_needs_no_room_for_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hardware.GPUS, "toy", hardware.Gpu("toy", 10 * 10**9, 1e12, 1e12))
    words = ("plan", "--target", "llama3-8b", "--recipe", "medusa", "--gpu", "toy", *SMALL)
    words += ("--set", "train.rows=1", "--out", str(tmp_path / "new"), "--json")
    refused = run(*words)
    assert refused.code == Exit.RESOURCES
    do = refused.json["error"]["do"]
    assert "--endpoint URL --set data.target_source=endpoint --set data.states=URL" in do
    states = ("data.target_source=endpoint", "data.states=http://a:8000")
    more = [word for each in states for word in ("--set", each)]
    ran = run(*words, "--endpoint", "http://b:8000", *more)
    assert ran.code == 0, ran.err
    plan = ran.json["result"]["plan"]
    assert "target" not in plan["memory"]
    assert plan["memory"]["target's embedding, norm, head"] < 5e9
    assert plan["basis"].endswith("without the time of servers")
    assert [part["amount"] for part in plan["parts"][:2]] == [
        "800 prompts, by the endpoint: not counted", "by the servers, in every step: not counted"
    ]  # fmt: skip


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


def test_a_plan_is_for_the_gpu_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of different sizes; no CUDA is called."""
    kinds = (
        SimpleNamespace(name="small", total_memory=10),
        SimpleNamespace(name="large", total_memory=20),
    )

    def properties(device: torch.device) -> SimpleNamespace:
        return kinds[device.index or 0]

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    for name in ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "")  # use_device writes them; they are put back after the test
    for device, found in (("auto", "small"), ("cuda", "small"), ("cuda:1", "large")):
        use_device(device, 1)
        gpu = hardware.Cluster.here().gpu
        assert gpu is not None
        assert gpu.name == found
        assert gpu.memory == (20 if found == "large" else 10)
    use_device("cpu", 1)
    assert hardware.Cluster.here().gpu is None
    with pytest.raises(ResourceError, match="3 GPUs"):
        use_device("cuda:2", 1)


def test_a_plan_counts_the_answers_that_a_short_file_has_prompts_for(
    run: Run, tmp_path: Path
) -> None:
    """Forty chats were planned as 800: twenty times the time that writing the answers takes."""
    data = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    data.write_text("".join(json.dumps(chat) + "\n" for _ in range(7)))
    words = ("plan", "--target", "llama3-8b", "--recipe", "medusa", "--gpu", "h100", "--json")
    for more, amount in ((("--data", str(data)), "7 prompts"), ((), "800 prompts")):
        ran = run(*words, *more)
        assert ran.json["result"]["plan"]["parts"][0]["amount"] == amount, ran.err
    data.write_text('{"what": [1, 2]}\n' * 3)
    ran = run(*words, "--data", str(data))
    assert ran.code == 3
    assert ran.json["error"]["what"] == "the data hold nothing to learn from"
    assert ran.json["error"]["found"].startswith("3 x record has no messages")
