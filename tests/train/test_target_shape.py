"""What a plan knows of a target that nobody has loaded is what loading it would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specctl.core.errors import IncompatibleError
from specctl.models.recurrent.state_lm import StateLM
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import TargetPart
from specctl.runtime.target.target import Target
from specctl.train.planning.hardware import GPUS, Cluster
from specctl.train.planning.memory import Moments, RowBytes
from specctl.train.planning.plan import plan
from specctl.train.planning.step_bytes import StepBytes
from specctl.train.planning.target_shape import TargetShape, target_shape
from specctl.train.planning.weighing import Weighing
from specctl_testing.hybrids import FEW, tiny_hybrid

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPEED = {"flops_per_second": 1e10}


def folder_of(model: Any, folder: Path, dtype: str | None = None) -> Path:
    """A folder with the configuration alone."""
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    return folder


def shape_of(folder: Path) -> TargetShape:
    return target_shape(TargetPart(name=str(folder)))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("qwen3_moe", MOE),
    ],
)
def test_parameters_are_those_of_the_model(
    make_model: Any, tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    model = make_model(model_type, num_layers=2, **fields)
    found = shape_of(folder_of(model, tmp_path))
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_a_token_meets_only_its_experts(make_model: Any, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", num_layers=2, **MOE)
    found = shape_of(folder_of(model, tmp_path))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert found.active == found.parameters - experts * 6 // 8
    dense = shape_of(folder_of(make_model("llama", num_layers=2), tmp_path / "dense"))
    assert dense.active == dense.parameters


def test_teachers_on_disk_are_as_wide_as_the_target_s_head_asks(
    make_model: Any, tmp_path: Path
) -> None:
    """Logits that are not the plain product with the head are kept whole."""
    needs: dict[str, int] = {}
    for name in ("llama", "gemma2"):
        folder = folder_of(make_model(name, num_layers=2, vocab=4096), tmp_path / name, "float32")
        sets = ["data.features=offline", "train.seq_len=64", "data.new_tokens=32"]
        recipe = load_recipe("medusa", target=str(folder), sets=sets)
        needs[name] = plan(recipe, **SPEED).disk["features"]
    assert needs["gemma2"] > 20 * needs["llama"]


def test_a_target_counts_in_the_dtype_it_will_be_loaded_in(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = TargetShape(target_shape(TargetPart()).spec, 8 * 10**9, 8 * 10**9, torch.bfloat16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("specctl.train.planning.target_shape.run_device", lambda: cuda)
    assert bytes_of.itemsize(TargetPart()) == 2
    assert bytes_of.itemsize(TargetPart(dtype="float32")) == 4
    monkeypatch.setattr("specctl.train.planning.target_shape.run_device", lambda: cpu)
    small = TargetShape(bytes_of.spec, 10**6, 10**6, torch.bfloat16)
    assert small.itemsize(TargetPart()) == 4


def test_a_plan_refuses_what_cannot_be_a_target(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", vocab_size=96).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="t5 is not a causal language model"):
        plan(load_recipe("medusa", target=str(tmp_path)), **SPEED)


def test_planned_parameters_are_the_loaded_target_s(tiny_target: Target) -> None:
    loaded = sum(p.numel() for p in tiny_target.lm.module.parameters())
    assert target_shape(TargetPart(name="tiny")).parameters == pytest.approx(loaded, rel=0.01)


@pytest.mark.parametrize("kind", [*FEW, "zamba", "nemotron_h"])
def test_states_are_planned_from_the_configuration_alone(kind: str, tmp_path: Path) -> None:
    model = tiny_hybrid(kind)
    found = shape_of(folder_of(model, tmp_path))
    assert found.row == StateLM(model).row_shape


def test_a_plan_counts_latents_and_not_all_heads(tmp_path: Path) -> None:
    widths = {"num_hidden_layers": 3, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "vocab_size": 99}
    AutoConfig.for_model("deepseek_v3", **widths).save_pretrained(tmp_path)
    row = RowBytes.of(shape_of(tmp_path), torch.float32)
    assert row == RowBytes(3 * (64 + 16) * 4)


def test_a_plan_counts_states_where_rows_are_decoded(tmp_path: Path) -> None:
    target = folder_of(tiny_hybrid("qwen3_next"), tmp_path)
    sets = ["train.tau_prompts=8", "data.prompts=20", "train.seq_len=64"]
    recipe = load_recipe("eagle3", target=str(target), sets=sets)
    shape = shape_of(target)
    row = RowBytes.of(shape, torch.float32)
    # Three layers of a convolution of 64 channels and four heads of 8 x 8, one that attends.
    assert row.states == 3 * (64 * 3 * 4 + 4 * 8 * 8 * 4)
    assert row.pending == 3 * (64 * 4 + 4 * (8 + 8 + 1) * 4)
    assert row.position == 2 * 2 * 16 * 4
    assert row.cache(8, 640)["recurrent states"] == 8 * row.states + 640 * row.pending
    assert row.cache(8, 9000)["recurrent states"] == 8 * row.states + 2048 * row.pending

    nothing, step = dict[str, int](), StepBytes(0, 0, 0, 0, 0, 0, {})
    h100 = Cluster(1, 1, GPUS["h100"], is_here=False)
    about = (recipe.target, recipe.data, recipe.train, shape.spec, step)
    measuring = Moments(*about, h100, row).held(nothing, is_fast=False)
    assert measuring.moment == "tau is measured"
    assert measuring.device["recurrent states"] >= 8 * row.states
    writing = Moments(*about, Cluster(1, 1, None, True), row).held(nothing, is_fast=False)
    assert writing.moment == "answers are written"
    assert writing.host["recurrent states"] == 20 * row.states + 20 * 64 * row.pending
    weighing = Weighing(recipe, shape, h100)
    assert "states" in weighing.most().device
    assert weighing.held().device_bytes > 0  # of experts in float32, which are not traced

    llama = RowBytes.of(target_shape(TargetPart()), torch.float32)
    assert list(llama.cache(8, 100)) == ["KV cache"]
