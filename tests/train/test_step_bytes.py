"""Bytes of a step: those of tensors that exist, at sizes that were not traced, and what follows."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.spec import ModelSpec
from specctl.drafters import family as family_named
from specctl.drafters.attention.seen import Seen
from specctl.models.hf.hf_spec import spec_of
from specctl.models.kernels import kept_scalar, rms_norm
from specctl.models.native import kl
from specctl.models.native.library import Library
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.recipes.made_for import made_for, target_of
from specctl.recipes.stages import runs_of
from specctl.runtime.target.target import Target
from specctl.train.planning.capacity import fits, lacking_memory
from specctl.train.planning.hardware import GPUS, Cluster
from specctl.train.planning.live_bytes import LiveBytes, traced
from specctl.train.planning.step_bytes import (
    StepBytes,
    TracedStep,
    fake_drafter,
    fake_target,
    step_bytes,
)
from specctl.train.planning.target_shape import TargetShape, config_of, target_shape
from specctl.train.planning.weighing import Weighing
from specctl_testing.train.of_recipe import drafter_of, step_of

H100 = Cluster.of("h100", 1)
H100_BYTES = 80 * 10**9
SPEC = ModelSpec("llama", 4, 32, 96, 4, 2, 8, 64, 1e-5, 1e4, 1024)
SIZES: dict[str, tuple[str, dict[str, Any], float]] = {
    "8B": ("llama", {"num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 32,
                     "intermediate_size": 14336, "vocab_size": 128256}, 8.03e9),
    "32B": ("qwen3", {"num_attention_heads": 64, "hidden_size": 5120, "num_hidden_layers": 64,
                      "intermediate_size": 25600, "vocab_size": 151936, "head_dim": 128}, 32.8e9),
    "70B": ("llama", {"num_attention_heads": 64, "hidden_size": 8192, "num_hidden_layers": 80,
                      "intermediate_size": 28672, "vocab_size": 128256}, 70.6e9),
    "MoE": ("qwen3_moe", {"num_attention_heads": 32, "hidden_size": 2048, "num_hidden_layers": 48,
                          "num_key_value_heads": 4, "moe_intermediate_size": 768, "head_dim": 128,
                          "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
            30.5e9),
}  # fmt: skip


def shape_named(name: str, layers: int | None = None) -> TargetShape:
    kind, fields, count = SIZES[name]
    given = {"num_key_value_heads": 8} | fields
    given |= {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(kind, tie_word_embeddings=False, **given)
    return TargetShape(spec_of(config), int(count), int(count), torch.bfloat16, config=config)


@pytest.mark.parametrize("name", SIZES)
def test_a_real_target_has_the_weights_that_its_fake_tensors_have(name: str) -> None:
    shape = shape_named(name)
    with traced() as live:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16)
        weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert weights == pytest.approx(2 * shape.parameters, rel=0.01)
    assert live.peak >= weights
    recipe = load_recipe("llama3-8b-eagle3", target="tiny")
    held = Weighing(recipe, shape, Cluster.of("h100", 1)).least()
    assert held.device["target"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(
    ("name", "rows"), [("8B", 4), pytest.param("MoE", 6, marks=pytest.mark.proof)]
)
def test_more_rows_than_are_traced_are_reckoned_right(name: str, rows: int) -> None:
    """At real widths; two layers, because a layer gives back what it takes."""
    sets = ["train.seq_len=128", "drafter.options.ttt_steps=2", "drafter.options.chunk=64"]
    recipe, shape = load_recipe("llama3-8b-eagle3", sets, target="tiny"), shape_named(name, 2)
    found = step_bytes(
        step_of(recipe), shape.config, shape.spec, "bfloat16", is_gpu=True, rows=rows
    )
    with traced() as live:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16).eval()
        model.requires_grad_(False)
        drafter = fake_drafter(recipe.drafter, recipe.train, shape.spec, 32000, is_gpu=True)
        target = fake_target(model, shape.spec)
        drafter.bind(target.borrowed())
        for parameter in drafter.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        step = TracedStep(live, target, drafter, True, lambda: None)
        reckoned = step.reckoned(rows, 128, most=max(2, rows // 2))
    for phase in ("the target reads", "the loss", "the gradient"):
        assert found.phases[phase] == pytest.approx(reckoned[phase], rel=0.03)


def test_a_stretch_of_a_row_takes_its_share_beside_the_features_of_all_of_it() -> None:
    sets = ["drafter.options.ttt_steps=2", "drafter.options.chunk=128", "train.sequence_parallel=4"]
    shape = shape_named("8B", 4)

    def of(seq_len: int, parts: int) -> StepBytes:
        more = [*sets, f"train.seq_len={seq_len}"]
        recipe = load_recipe("llama3-8b-eagle3", more, target="tiny")
        return step_bytes(step_of(recipe), shape.config, shape.spec, "bfloat16", True, 1, parts)

    whole, part, own = of(1024, 1), of(1024, 4), of(256, 1)
    features = 4 * 4096 * 2  # of a token: three taps and the last state, no logits
    grown = whole.phases["its features"] - own.phases["its features"]
    assert grown == pytest.approx(768 * features, rel=0.01)
    assert own.batch < part.batch < 0.9 * whole.batch
    least = max(own.phases["the loss"], own.phases["the gradient"]) + grown
    assert part.batch == pytest.approx(least, rel=1e-3)


def test_fake_tensors_take_what_real_ones_take(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by PyTorch's operators: the compiled KL takes fewer bytes than they."""
    monkeypatch.setattr(kl, "library", lambda: Library(None))
    recipe = load_recipe("eagle3", ["vocab.size=null", "drafter.options.intermediate=64"])
    target = Target.from_model(make_model(dtype=torch.float32))
    drafter = drafter_of(recipe, target.spec)
    drafter.bind(target.borrowed())
    for parameter in drafter.trainable().values():
        parameter.grad = torch.zeros_like(parameter)
    real = LiveBytes(is_fake=False)
    step = TracedStep(real, target, drafter, False, lambda: None)
    step.peaks(2, 64)  # what is made once: packed weights, of no known size
    with real:
        wanted = step.peaks(2, 64)
    with traced() as live:
        model = AutoModelForCausalLM.from_config(config_of(target.spec), dtype=torch.float32)
        model.eval().requires_grad_(False)
        fake = fake_drafter(recipe.drafter, recipe.train, target.spec, None, is_gpu=False)
        reader = fake_target(model, target.spec)
        fake.bind(reader.borrowed())
        for parameter in fake.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        found = TracedStep(live, reader, fake, False, lambda: None).peaks(2, 64)
    for phase in ("the target reads", "the loss", "the gradient"):
        assert found[phase] == pytest.approx(wanted[phase], rel=0.05, abs=20_000)


def family_of_recipe() -> dict[str, str]:
    """A recipe of the embedded target for each family that it trains."""
    found = dict[str, str]()
    for name in recipe_names():
        recipe = load_recipe(name)
        if target_of(name) == "tiny" and family_named(recipe.drafter.family).trainable:
            found.setdefault(recipe.drafter.family, name)
    return found


# In every run: a draft model, heads, features, and the two that read the content of rows.
TRACED = ("coral", "distill", "eagle3", "falcon", "medusa")


@pytest.mark.parametrize("recipe_name", TRACED)
def test_a_step_is_traced(recipe_name: str) -> None:
    """To its end, without content: CORAL's groups of rows and Falcon's documents read some."""
    recipe = load_recipe(recipe_name, ["train.seq_len=32"])
    shape = target_shape(recipe.target)
    found = step_bytes(step_of(recipe), shape.config, shape.spec, "float32", False, rows=1)
    assert found.untraced == "", recipe_name
    assert (found.batch > 0) == (found.gradient > 0)


@pytest.mark.proof
def test_a_step_of_every_family_is_traced() -> None:
    for name in sorted(family_of_recipe().values()):
        test_a_step_is_traced(name)


def test_traced_text_has_two_documents_a_row() -> None:
    """Attention over every position by itself is as slow to trace as it is long."""
    with traced():
        spans = Seen.text(torch.zeros(3, 16, dtype=torch.long)).spans
    assert spans is not None
    assert [(s.row, s.start, s.stop) for s in spans[:2]] == [(0, 0, 15), (0, 15, 16)]
    assert len(spans) == 6


def test_what_does_not_fit_is_named_with_the_least_change_that_would_do() -> None:
    shape = TargetShape(SPEC, 60_000, 60_000, torch.bfloat16, config=config_of(SPEC))
    recipe = load_recipe("eagle3", ["train.rows=16", "train.seq_len=128", "vocab.size=null"])
    whole = Weighing(recipe, shape, Cluster.of("h100", 1)).held()
    fixed = whole.device_bytes - whole.device["batch"]
    small = Cluster(1, 1, GPUS["h100"].__class__("toy", fixed + whole.device["batch"] // 3, 1, 1))
    weighing = Weighing(recipe, shape, Cluster(1, 1, small.gpu, is_here=False))
    [lack] = lacking_memory(weighing)
    assert lack.need == whole.device_bytes
    assert lack.do.startswith("--set train.rows=4 --set train.accumulate=4")
    halved = recipe.train.model_copy(update={"rows": 4, "accumulate": 4})
    other = Weighing(recipe.model_copy(update={"train": halved}), shape, weighing.cluster)
    assert fits(other.held(), other.cluster)
    assert lacking_memory(other) == []


@pytest.mark.proof
def test_what_is_proposed_for_a_pipeline_is_enough_for_all_its_stages() -> None:
    shape = TargetShape(SPEC, 60_000, 60_000, torch.bfloat16, config=config_of(SPEC))
    sets = ["train.rows=16", "train.seq_len=64", "vocab.size=null", "drafter.options.width=32"]
    sets += ["drafter.options.layers=1", "drafter.options.head_dim=8"]
    recipe = load_recipe("fastdraft", sets)
    stages = [Weighing(part, shape, H100) for part in runs_of(recipe)]
    largest = max(stages, key=lambda stage: stage.held().device_bytes)
    whole, batch = largest.held().device_bytes, largest.held().device["batch"]
    toy = Cluster(1, 1, GPUS["h100"].__class__("toy", whole - batch // 2, 1, 1), is_here=False)
    (lack,) = lacking_memory(replace(largest, cluster=toy), pipeline=Weighing(recipe, shape, toy))
    words = [word for word in shlex.split(lack.do) if word != "--set"]
    changed = load_recipe("fastdraft", [*sets, *words])
    assert changed.train.rows < 16
    assert all(fits(Weighing(part, shape, toy).held(), toy) for part in runs_of(changed))
    stuck = Weighing(
        load_recipe("fastdraft", [*sets, "stages.align.train.rows=16"]), shape, largest.cluster
    )
    assert largest.way_out(lambda held, cluster: held.device_bytes < whole, stuck) != lack.do


def test_spreading_over_gpus_takes_less_of_each() -> None:
    shape = TargetShape(SPEC, 60_000, 60_000, torch.bfloat16, config=config_of(SPEC))

    def step(*sets: str, gpus: int) -> int:
        given = ["train.rows=16", "train.seq_len=128", "vocab.size=null", *sets]
        held = Weighing(load_recipe("eagle3", given), shape, Cluster.of("h100", gpus)).held()
        return sum(size for name, size in held.device.items() if name != "CUDA")

    assert step(gpus=8) < step(gpus=1)
    assert Cluster.of("h100", 64).nodes == 8
    assert Cluster.of("h100", 12, 3).per_node == 4


def test_the_recipes_of_a_target_are_known_by_its_repository() -> None:
    assert made_for("llama3-8b")[0] == "llama3-8b-eagle3"
    assert made_for("meta-llama/Meta-Llama-3-8B-Instruct") == made_for("llama3-8b")
    assert set(made_for("llama3-8b", ("small-lm",))) >= {"llama3-8b-distill"}
    assert target_of("distill") == "tiny"
    assert target_shape(load_recipe("llama3-8b-eagle3").target).parameters > 7e9


def test_nothing_of_a_trace_meets_real_tensors_later() -> None:
    kept_scalar.cache_clear()
    with traced(), torch.no_grad():
        rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
    with torch.no_grad():
        assert type(rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)) is torch.Tensor


ELSEWHERE = ["data.target_source=files", "data.states=states", "data.regenerate=false"]


def test_of_a_target_that_is_elsewhere_only_embedding_norm_and_head_are_counted() -> None:
    shape = shape_named("70B", 4)
    sets = ["train.rows=2", "train.seq_len=128", "drafter.options.ttt_steps=2"]
    here, there = (
        Weighing(load_recipe("llama3-8b-eagle3", [*sets, *more], target="tiny"), shape, H100)
        for more in ([], ELSEWHERE)
    )
    beside = 2 * (2 * 128256 * 8192 + 8192)
    assert there.held().device["target's embedding, norm, head"] == beside
    assert there.held().device_bytes < here.least().device_bytes / 3
    assert there.held().host["states as they come in"] == 2 * 2 * 128 * 4 * 8192 * 2
    assert there.held().moment == "a step"
    assert there.held().device["batch"] == pytest.approx(here_batch(here), rel=0.05)
    assert lacking_memory(there) == []
    (lack,) = lacking_memory(here)
    assert lack.need > H100_BYTES


def here_batch(weighing: Weighing) -> int:
    """Of a batch whose states the target makes here: the same tensors, once they are there."""
    train = weighing.recipe.train
    return step_bytes(
        step_of(weighing.recipe),
        weighing.shape.config,
        weighing.shape.spec,
        "bfloat16",
        True,
        train.rows,
    ).batch
