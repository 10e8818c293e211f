"""specctl adapt on a random target and a slightly tuned copy of it, and pipelines by their flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specctl.train.pretrain.data import train_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n\nhello world, how are you {i}?\n" for i in range(120)]
SMALL = [
    "--set", "data.prompts=10", "--set", "data.new_tokens=8", "--set", "data.prompt_tokens=6",
    "--set", "train.rows=4", "--set", "train.seq_len=48", "--set", "train.tau_prompts=2",
    "--set", "train.tau_tokens=6", "--set", "train.tau_every=2", "--set", "train.save_every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, make_model: Any) -> dict[str, Path]:
    """`old` and `new`, folders of a random target and of the same after a little tuning; `data`."""
    root = tmp_path_factory.mktemp("adapt")
    tokenizer = train_tokenizer(TEXTS, 300, 256)
    model = make_model(
        num_layers=2,
        hidden=16,
        vocab=len(tokenizer),
        eos_token_id=0,
        max_position_embeddings=1024,
    )
    for name in ("old", "new"):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    rows = [{"prompt": text[:6], "response": text[6:]} for text in TEXTS]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"old": root / "old", "new": root / "new", "data": root / "data.jsonl", "root": root}


def test_a_drafter_follows_its_target_into_a_package_of_its_own(
    run: Any, places: dict[str, Path]
) -> None:
    root, steps = places["root"], ("--set", "train.steps=4")
    options = "drafter.options={layers: 1, width: 16, heads: 2, head_dim: 8}"
    made = run(
        "distill", "--target", places["old"], "--data", places["data"], "--out", root / "first",
        *SMALL, *steps, "--set", "drafter.init=null", "--set", options,
        "--set", "vocab.size=200", "--set", "serve.length=3",
    )  # fmt: skip
    assert made.code == 0, made.err
    words = (
        "adapt", "--draft", root / "first", "--target", places["new"], "--data", places["data"],
        "--out", root / "second", *SMALL, "--steps", 4, "--rank", 2, "--json",
    )  # fmt: skip
    ran = run(*words)
    assert ran.code == 0, ran.err
    result = ran.json["result"]
    assert result["tau_after"] == result["tau"] >= result["tau_before"] >= 1.0
    old, new = (json.loads((root / r / "package" / "manifest.json").read_text()) for r in
                ("first", "second"))  # fmt: skip
    assert old["target"]["fingerprint"] != new["target"]["fingerprint"]
    assert new["vocabulary"] == old["vocabulary"]
    assert new["options"] == old["options"]
    assert new["serve"]["length"] == 3
    before, after = (load_file(root / r / "package" / "model.safetensors") for r in
                     ("first", "second"))  # fmt: skip
    assert before.keys() == after.keys()
    adapter = load_file(root / "second" / "adapter" / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapter)
    config = json.loads((root / "second" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (2, "LORA")
    told = run("generate", "--target", places["new"], "--draft", root / "second" / "package", "def")
    assert told.code == 0, told.err
    refused = run("generate", "--target", places["new"], "--draft", root / "first" / "package", "d")
    assert refused.code == 5
    again = run(*words)
    assert again.code == 0, again.err
    assert again.json["result"]["tau_before"] == result["tau_before"]
    kept = load_file(root / "second" / "package" / "model.safetensors")
    assert all(torch.equal(kept[name], after[name]) for name in after)


def test_a_drafter_follows_its_target_to_an_adapter(run: Any, places: dict[str, Path]) -> None:
    """--adapter alone: the target is the drafter's own, and the package is bound to both."""
    peft = pytest.importorskip("peft")
    root = places["root"]
    made = run(
        "distill", "--target", places["old"], "--data", places["data"], "--out", root / "plain",
        "--set", "vocab.size=200",
        *SMALL, "--set", "train.steps=2", "--set", "drafter.init=null", "--set",
        "drafter.options={layers: 1, width: 16, heads: 2, head_dim: 8}",
    )  # fmt: skip
    assert made.code == 0, made.err
    model = AutoModelForCausalLM.from_pretrained(places["old"])
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(root / "lora")
    ran = run(
        "adapt", "--draft", root / "plain", "--adapter", root / "lora", "--data", places["data"],
        "--out", root / "followed", *SMALL, "--steps", 2, "--rank", 2, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    package = root / "followed" / "package"
    record = json.loads((package / "manifest.json").read_text())["target"]
    assert [one["name"] for one in record["adapters"]] == [str(root / "lora")]
    assert record["name"] == str(places["old"])
    told = run("generate", "--draft", package, "def")  # the package's own target and adapter
    assert told.code == 0, told.err
    named = run("generate", "--target", places["old"], "--adapter", root / "lora", "--draft",
                package, "def")  # fmt: skip
    assert named.code == 0, named.err
    refused = run("generate", "--target", places["old"], "--draft", package, "def")
    assert refused.code == 5
    assert "adapter of target and drafter differ" in refused.err
    assert str(root / "lora") in run("show", package).out


def test_a_dry_run_of_a_pipeline_plans_every_stage(run: Any) -> None:
    for words in (("train-draft", "--dry-run"), ("plan",)):
        ran = run(*words, "--recipe", "fastdraft", "--json")
        assert ran.code == 0, ran.err
        plans = ran.json["result"]["plans"]
        assert list(plans) == ["fastdraft-pretrain", "fastdraft-continue", "fastdraft-align"]
        assert [plan["steps"] for plan in plans.values()] == [240, 300, 160]
        total = ran.json["result"]["total"]
        assert total["steps"] == 700
        for at in (0, 1):
            every = [part["seconds_range"][at] for p in plans.values() for part in p["parts"]]
            assert total["seconds_range"][at] == pytest.approx(sum(every))
        assert total["disk_bytes"] == sum(plan["disk_bytes"] for plan in plans.values())


def test_an_option_that_a_stage_misspells_is_named(run: Any, tmp_path: Path) -> None:
    wrong = "stages: {one: {drafter: {options: {layerz: 2}}}}"
    (tmp_path / "wrong.yaml").write_text(wrong)
    ran = run("train-draft", "--recipe", tmp_path / "wrong.yaml", "--dry-run")
    assert ran.code == 3
    assert "stages.one" in ran.err
    assert "layers" in ran.err


def test_adapt_takes_the_drafter_by_its_own_flag(run: Any, tmp_path: Path) -> None:
    ran = run("adapt", "--draft", tmp_path, "--init", "x")
    assert ran.code == 4
