"""Plans and schedules: right counts without loading anything, times with their basis."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import TrainPart
from specctl.train.assemble import build_drafter
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.init.initial import completed
from specctl.train.metrics.metrics import alphas, means, merged, simulated_tau
from specctl.train.metrics.plot import save_learning_curve
from specctl.train.planning.plan import STATE_BYTES, RunPlan, matrix_speed, plan
from specctl.train.planning.rehearsal import Rehearsal, Stopwatch, small_data, small_train, summary
from specctl.train.planning.work import num_saves
from specctl.train.run import train_draft
from specctl.train.saving.state import load_optimizer_state, optimizer_state
from specctl.train.step.optim import (
    Gradient,
    build_optimizers,
    is_attention,
    is_hidden_matrix,
    learning_rate,
    set_learning_rate,
)
from specctl_testing.train.of_recipe import drafter_of

SPEC = ModelSpec("llama", 4, 32, 88, 4, 2, 8, 64, 1e-5, 1e4, 1024)
SPEED = {"flops_per_second": 1e10}


@pytest.mark.parametrize("name", ["distill", "eagle3", "medusa"])
def test_the_planned_parameters_are_those_of_the_drafter_that_is_built(name: str) -> None:
    vocab = VocabMap(torch.arange(64), SPEC.vocab_size)
    for sets, kept in (("vocab.size=null", None), ("vocab.size=64", vocab)):
        recipe = load_recipe(name, sets=[sets])
        drafter = build_drafter(completed(recipe.drafter, SPEC), recipe.train, SPEC, kept)
        made = plan(recipe, SPEC, **SPEED)
        assert drafter.module is not None
        assert made.parameters == sum(p.numel() for p in drafter.module.parameters())
        assert made.trainable == sum(p.numel() for p in drafter.trainable().values())


@pytest.mark.parametrize(("target", "least", "most"), [("llama3-8b", 7e9, 9e9), ("tiny", 5e6, 9e6)])
def test_a_plan_for_an_alias_needs_neither_weights_nor_network(
    target: str, least: float, most: float
) -> None:
    made = plan(load_recipe("eagle3", target=target), **SPEED)
    assert least < made.target_parameters < most
    assert made.weighing.least().host_bytes > 2 * made.target_parameters
    assert made.disk_bytes > 4 * made.parameters
    assert 0 < made.seconds_range[0] < made.seconds_range[1]


def test_more_steps_take_longer_and_larger_batches_more_memory() -> None:
    def of(*sets: str) -> RunPlan:
        return plan(load_recipe("eagle3", sets=sets), SPEC, **SPEED)

    assert of("train.steps=2000").seconds_range[0] > of("train.steps=200").seconds_range[0]
    wide = of("train.rows=2", "drafter.options.ttt_steps=2")
    assert wide.memory_bytes > of("train.rows=1", "drafter.options.ttt_steps=2").memory_bytes
    assert json.loads(json.dumps(wide.to_json()))["memory_bytes"] == wide.memory_bytes
    many = "train.steps=4000"
    assert of("train.keep=9", many).disk_bytes > of("train.keep=2", many).disk_bytes
    whole = of("data.features=offline").disk["features"]
    assert of("data.features=offline", "data.feature_dtype=fp8").disk["features"] < 0.6 * whole
    assert of("data.features=offline", "data.features_gb=0.001").disk["features"] == 1_000_000
    away = of("data.features=offline", "data.features_at=s3://bucket/features")
    assert "features" not in away.disk
    assert away.features_elsewhere == 0
    near = of("data.features=offline", "data.features_at=/elsewhere/features")
    assert ("features" in near.disk, near.features_elsewhere) == (False, whole)
    assert near.to_json()["features_bytes"] == whole


def test_the_optimizer_state_in_the_plan_is_the_state_that_is_kept() -> None:
    for optimizer in ("muon", "adamw"):
        recipe = load_recipe("medusa", sets=[f"train.optimizer={optimizer}", "vocab.size=null"])
        drafter = drafter_of(recipe, SPEC)
        trainable = drafter.trainable()
        found = build_optimizers(trainable, recipe.train, frozenset({SPEC.vocab_size}))
        for parameter in trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        for each in found.values():
            each.step()
        kept = sum(
            4 * value.numel()
            for each in found.values()
            for state in each.state.values()
            for value in state.values()
            if value.ndim
        )
        made = plan(recipe, SPEC, **SPEED)
        held = min(num_saves(recipe.train), recipe.train.keep)
        assert made.disk["checkpoints"] == held * (4 * made.parameters + kept + STATE_BYTES)


def test_time_is_measured_once_there_are_twenty_steps(tmp_path: Path) -> None:
    recipe = load_recipe("eagle3", sets=["train.steps=100"])
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 10, "loss": 1.0, "seconds": 5.0}\n')
    assert plan(recipe, SPEC, out=tmp_path, **SPEED).basis.startswith("estimate from FLOPs")
    log.write_text('{"step": 40, "loss": 1.0, "seconds": 20.0}\n{"step": 41, "tau": 2.0}\n')
    made = plan(recipe, SPEC, out=tmp_path, **SPEED)
    assert made.basis.startswith("measured 40 steps")
    assert made.seconds_range[0] < 30.0 < made.seconds_range[1]


def test_the_estimate_says_at_what_speed_it_was_made() -> None:
    assert matrix_speed(0.05) > 1e8
    assert "10 GFLOP/s" in plan(load_recipe("medusa"), SPEC, **SPEED).basis


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = train_draft(load_recipe("eagle3"), tmp_path / "run", dry_run=True)
    assert result.plan is not None
    assert result.plan.steps == load_recipe("eagle3").train.steps
    assert not (tmp_path / "run").exists()


def test_an_unknown_target_and_an_untrainable_family_cannot_be_planned() -> None:
    with pytest.raises(SpecctlError, match="unknown target"):
        plan(load_recipe("eagle3", target="llama9"))
    with pytest.raises(RecipeError, match="nothing to train"):
        plan(load_recipe("prompt-lookup"), SPEC)


def rehearsed(**changed: float) -> Rehearsal:
    fields = {
        "once": 20.0, "answer": 0.1, "step": 0.5, "tau": 4.0, "save": 1.0, "memory": 10**9,
        "gpu": 0, "tokens": 64 * 1000,
    }  # fmt: skip
    return Rehearsal.from_json({**fields, **changed})


def test_a_rehearsal_gives_the_time_of_the_whole_run_and_its_memory() -> None:
    sets = ["train.steps=100", "train.tau_every=50", "train.save_every=30", "data.prompts=200"]
    recipe = load_recipe("eagle3", sets=sets)
    made = plan(recipe, SPEC, rehearsal=rehearsed())
    whole = 20 + 200 * 0.1 + 100 * 0.5 + 2 * 4 + 4 * 1
    assert made.seconds_range[0] < whole < made.seconds_range[1]
    assert made.seconds_range[1] / made.seconds_range[0] < 1.4
    assert made.basis.startswith("a rehearsal: 0.5 s a step")
    assert 10**9 <= made.memory_bytes < 1.05e9
    fields = {"data.prompts": 200, "data.prompt_tokens": 40, "data.new_tokens": 60}
    recipe = load_recipe("eagle3", sets=[f"{key}={value}" for key, value in fields.items()])
    tokens = 200 * 100 + min(recipe.data.text_tokens, 200 * 900)  # 1,000 a prompt were found
    disk = plan(recipe, SPEC, rehearsal=rehearsed()).disk
    assert disk["data"] == pytest.approx(tokens * 13 / 0.98 + 200 * 60 * 3, abs=1)
    assert "on the GPU" in plan(recipe, SPEC, rehearsal=rehearsed(gpu=10**9)).memory
    still = load_recipe("eagle3", sets=[*sets, "data.regenerate=false"])
    assert rehearsed().seconds(still.data, still.train) == pytest.approx(whole - 20)


def test_a_rehearsal_is_the_run_with_fewer_prompts_and_steps() -> None:
    recipe = load_recipe("eagle3", sets=["train.rows=3"])
    short = small_train(recipe.train)
    assert (short.steps, small_data(recipe.data).prompts) == (5, 64)
    assert short.model_copy(update={"steps": 7, "tau_every": 7, "save_every": 7}).rows == 3
    changed = {"steps", "tau_every", "save_every", "log_every", "trackers"}
    before, after = recipe.train.model_dump(), short.model_dump()
    assert {key for key in before if before[key] != after[key]} <= changed


def test_a_stopwatch_takes_a_run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specctl.train.planning.rehearsal.time.perf_counter", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    data, watch = small_data(load_recipe("eagle3", sets=["data.prompts=4"]).data), Stopwatch()
    later(3)
    with watch.task("the target writes answers", 4, "prompts"):
        later(8)
    with watch.task("train", 5, "step") as advance:
        advance(0)
        for seconds in (9, 1, 2, 1, 1):  # the first step is slower
            later(seconds)
            advance(1)
        later(6)
        watch.say("step 5: measured tau 1.1 (best so far 1.1 at step 5)")
        later(0.5)
    later(4)
    words = np.arange(20, dtype=np.int32)
    rows = pack([Document(words, words > 0, "text")], 20, 0, 0)
    write_rows(tmp_path / "data", rows, "0" * 64, {}, "source", Defects())
    found = summary(data, tmp_path, watch, whole=40.0, gpu=0)
    assert (found.answer, found.step, found.tau, found.save) == (2.0, 1.0, 6.0, 0.5)
    assert found.once == pytest.approx(40 - 8 - 20.5)
    assert found.memory > 10**8
    assert found.tokens == 20


def schedule(**fields: Any) -> list[float]:
    part = TrainPart(steps=100, learning_rate=1.0, **fields)
    return [learning_rate(step, part) for step in range(100)]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
def test_a_schedule_warms_up_then_falls_towards_zero(name: str) -> None:
    rates = schedule(schedule=name, warmup=0.1, decay=0.3)
    assert rates[:10] == sorted(rates[:10])
    assert 0 < rates[0] < 0.2
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.05
    if name == "wsd":
        assert set(rates[10:71]) == {1.0}
        assert rates[85] == pytest.approx(0.5)
    if name == "cosine":
        assert rates[55] == pytest.approx(0.5)
    if name == "linear":
        assert rates[55] == pytest.approx(0.5)


def test_muon_moves_hidden_matrices_and_adamw_all_the_rest() -> None:
    recipe = load_recipe("eagle3", sets=["vocab.size=null", "drafter.options.lm_head=init"])
    drafter = drafter_of(recipe, SPEC)
    named = drafter.trainable()
    found = build_optimizers(named, recipe.train, frozenset({SPEC.vocab_size}))
    name_of = {id(p): name for name, p in named.items()}
    parts = {
        kind: {name_of[id(p)] for group in each.param_groups for p in group["params"]}
        for kind, each in found.items()
    }
    assert parts["muon"] | parts["adamw"] == set(named)
    assert not parts["muon"] & parts["adamw"]
    assert "lm_head.weight" in parts["adamw"]
    assert "fc.weight" in parts["muon"]
    assert all("norm" not in name for name in parts["muon"])
    assert not is_hidden_matrix(torch.zeros(96, 32), frozenset({96}))
    with pytest.raises(RecipeError, match="nothing to train"):
        build_optimizers({}, recipe.train, frozenset())


def test_matrices_over_a_vocabulary_learn_at_their_own_share_of_the_rate() -> None:
    recipe = load_recipe(
        "distill", sets=["vocab.size=null", "train.vocab_rate=0.25", "train.attention_rate=1"]
    )
    named = drafter_of(recipe, SPEC).trainable()
    found = build_optimizers(named, recipe.train, frozenset({SPEC.vocab_size}))
    set_learning_rate(found, 0.4)
    rates = {id(p): group["lr"] for each in found.values() for group in each.param_groups
             for p in group["params"]}  # fmt: skip
    assert set(rates) == {id(p) for p in named.values()}
    for name, parameter in named.items():
        assert rates[id(parameter)] == pytest.approx(0.1 if "embed_tokens" in name else 0.4), name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_matrices_of_attention_learn_at_a_multiple_of_the_rate(optimizer: str) -> None:
    sets = [f"train.optimizer={optimizer}", "train.attention_rate=3"]
    for name in ("eagle3", "glide", "distill"):
        recipe = load_recipe(name, sets=[*sets, "vocab.size=null", "train.vocab_rate=1"])
        named = drafter_of(recipe, SPEC).trainable()
        found = build_optimizers(named, recipe.train, frozenset({SPEC.vocab_size}))
        assert set(found) == {optimizer, "adamw"}
        set_learning_rate(found, 0.2)
        rates = {id(p): group["lr"] for each in found.values() for group in each.param_groups
                 for p in group["params"]}  # fmt: skip
        assert set(rates) == {id(p) for p in named.values()}
        of_attention = {n for n in named if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj",
                                                                 "o_proj")}  # fmt: skip
        assert len(of_attention) >= 4
        for each, parameter in named.items():
            assert rates[id(parameter)] == pytest.approx(0.6 if each in of_attention else 0.2), each


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("layers.0.self_attn.k_proj.weight", True),
        ("cross.q_proj.weight", True),
        ("transformer.h.3.attn.c_attn.weight", True),
        ("gpt_neox.layers.1.attention.query_key_value.weight", True),
        ("layers.0.mlp.up_proj.weight", False),
        ("layers.0.mlp.down_proj.weight", False),
        ("fc.weight", False),
    ],
)
def test_attention_is_known_by_its_name(name: str, belongs: bool) -> None:
    assert is_attention(name) == belongs


def test_state_is_read_by_name_whatever_rates_and_momentum_are_now() -> None:
    named = drafter_of(load_recipe("eagle3", []), SPEC).trainable()
    sizes = frozenset({SPEC.vocab_size})
    before, after = (
        build_optimizers(named, load_recipe("eagle3", sets).train, sizes)
        for sets in (
            ["train.attention_rate=1", "train.momentum=0.5"],
            ["train.attention_rate=4", "train.momentum=0.6"],
        )
    )
    torch.manual_seed(0)
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    for each in before.values():
        each.step()
    load_optimizer_state(after, named, *optimizer_state(before, named))
    for name, parameter in named.items():
        for kind, optimizer in before.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                assert torch.equal(after[kind].state[parameter][key], value), (name, key)
    assert {group["momentum"] for group in after["muon"].param_groups} == {0.6}


def test_the_momentum_of_a_recipe_is_muons() -> None:
    recipe = load_recipe("eagle3", sets=["train.momentum=0.5"])
    named = drafter_of(recipe, SPEC).trainable()
    found = build_optimizers(named, recipe.train, frozenset({SPEC.vocab_size}))
    assert {group["momentum"] for group in found["muon"].param_groups} == {0.5}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_update_counts_as_a_write_of_every_parameter(optimizer: str) -> None:
    """Copies of weights are renewed by that count; PyTorch's fused update has none."""
    recipe = load_recipe("distill", [f"train.optimizer={optimizer}"])
    weights = drafter_of(recipe, SPEC).trainable()
    Gradient(weights).flat_N.fill_(0.1)
    before = {name: p._version for name, p in weights.items()}
    old = {name: p.detach().clone() for name, p in weights.items()}
    for each in build_optimizers(weights, recipe.train, frozenset({SPEC.vocab_size})).values():
        each.step()
    for name, parameter in weights.items():
        assert not torch.equal(parameter, old[name]), name
        assert parameter._version > before[name], name


def test_a_flat_gradient_is_clipped_to_its_limit() -> None:
    weights = {"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.nn.Parameter(torch.zeros(2, 2))}
    gradient = Gradient(weights)
    (weights["a"].sum() * 6 + weights["b"].sum() * 8).backward()
    norm = gradient.norm(2.0)
    assert norm == pytest.approx(math.sqrt(3 * 9 + 4 * 16))
    gradient.divide(2.0, norm, limit=1.0)
    grads = [p.grad for p in weights.values() if p.grad is not None]
    assert float(torch.cat([g.flatten() for g in grads]).norm()) == pytest.approx(1.0)


def test_simulated_tau_is_the_expected_length_of_a_chain() -> None:
    assert simulated_tau([], 4) is None
    assert simulated_tau([0.5], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert simulated_tau([0.8, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert alphas({"alpha": 0.9, "alpha/1": 0.8, "alpha/3": 0.1}) == (0.9, 0.8)


def test_windows_add_sums_and_counts_and_divide_once() -> None:
    window = merged({"loss": (6.0, 2.0)}, {"loss": (2.0, 6.0), "top1": (1.0, 0.0)})
    assert means(window) == {"loss": 1.0}


def test_the_learning_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = tmp_path / "metrics.jsonl"
    assert save_learning_curve(log, tmp_path / "curve.png") is None
    log.write_text(
        '{"step": 1, "loss": 2.0, "simulated_tau": 1.2}\n{"step": 2, "loss": 1.0}\n'
        '{"step": 2, "tau": 1.5}\n'
    )
    path = save_learning_curve(log, tmp_path / "curve.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
