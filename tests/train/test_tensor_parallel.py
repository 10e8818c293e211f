"""A target whose matrices are spread over processes: what one holds, and what is refused.

Two processes are run in test_sharding.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.recipes.schema import DataPart, Recipe, TargetPart, TrainPart
from specctl.runtime.target.placement.tensor_parallel import bytes_of_process, check_plan
from specctl.runtime.target.target import load_target
from specctl.train.distributed.in_step import check_spread
from specctl.train.planning import memory
from specctl.train.planning.hardware import GPUS, Cluster
from specctl.train.planning.weighing import Weighing


def test_one_process_is_told_how_to_start_several() -> None:
    with pytest.raises(SpecctlError, match="needs several processes") as caught:
        load_target("tiny", tensor_parallel=True)
    assert "torchrun" in caught.value.do


def test_a_process_holds_a_share_of_what_the_plan_spreads() -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    matrices = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    whole = 2 * 100 * 16 + 7 * 16  # embedding and head, unless the plan cuts them, and the norms
    assert bytes_of_process(config, 2, 4) <= 4 * (matrices // 2 + whole)
    assert bytes_of_process(config, 2, 4) >= 4 * ((matrices + 2 * 100 * 16) // 2 + 7 * 16)
    with pytest.raises(IncompatibleError, match="cannot be spread") as caught:
        check_plan(config, 4)
    assert caught.value.found == "num_key_value_heads 2"


@pytest.mark.parametrize(
    ("target", "resident", "least"),
    [
        ({"tensor_parallel": True}, 800 // 4 + 100, 4),
        ({"device_map": "cpu-offload"}, 100 + 50, None),  # the least: where layers go is open
        ({}, 900, 1),
    ],
)
def test_a_plan_counts_what_a_device_then_holds(
    target: dict[str, Any], resident: int, least: int | None
) -> None:
    recipe = Recipe.model_validate({"target": target})
    step: Any = SimpleNamespace(layers=800, beside_layers=100, largest_layer=50, target=900)
    assert memory.resident(recipe.target, step, 4) == resident
    shape: Any = SimpleNamespace(
        config=None, parameters=1000, dtype=lambda part, device: torch.bfloat16
    )
    weighing = Weighing(recipe, shape, Cluster(4, 1, GPUS["h100"], is_here=False))
    assert weighing.least().device["target"] == (0 if least is None else 2000 // least)


@pytest.mark.parametrize(
    ("target", "other", "found"),
    [
        ({"tensor_parallel": True}, {"train": {"parallel": "fsdp"}}, "train.parallel: fsdp"),
        ({"tensor_parallel": True}, {"data": {"features": "offline"}}, "data.features: offline"),
        ({"device_map": "auto"}, {}, "2 processes, each of which would take every GPU"),
        ({"device_map": "cpu-offload"}, {}, None),
        ({}, {"train": {"parallel": "fsdp"}}, None),
    ],
)
def test_ways_that_exclude_each_other_are_refused(
    target: dict[str, Any], other: dict[str, Any], found: str | None
) -> None:
    recipe = Recipe.model_validate({"target": target, **other})
    if found is None:
        check_spread(recipe.target, recipe.data, recipe.train, 2)
        return
    with pytest.raises(RecipeError) as caught:
        check_spread(recipe.target, recipe.data, recipe.train, 2)
    assert caught.value.found == found


def test_one_training_process_is_told_to_be_several() -> None:
    with pytest.raises(RecipeError, match="there is one") as caught:
        check_spread(TargetPart(tensor_parallel=True), DataPart(), TrainPart(), 1)
    assert "--gpus 2" in caught.value.do
