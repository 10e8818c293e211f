"""What was cut from a target is written as a plain transformers folder of the same kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.export.formats import export
from specctl.export.package.folder import load_drafter, save_package
from specctl.models.llama.slice import Inside, Keep, sliced
from specctl.runtime.target.target import Target
from specctl.train.prune.cut import fitted

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SERVE = {"policy": "chain", "length": 3}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"layer_types": ["full_attention"] * 4, "max_window_layers": 4}),
    ],
)
def test_a_cut_target_comes_back_with_lists_as_long_as_its_layers(
    make_target: Any, tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    target: Target = make_target(model_type, **fields)
    inside = Inside(heads=(2, 3), kv_heads=(1,), neurons=tuple(range(0, 64, 2)))
    module = target.lm.module
    small = sliced(module.shape, module.state_dict(), Keep((0, 3), inside={0: inside, 3: inside}))
    drafter = SmallLm(SmallLmOptions(**options_of(small.shape, target.spec)), target.spec)
    drafter.load_tensors(fitted(drafter, small.tensors, None))
    package = tmp_path / "package"
    save_package(
        drafter, target, package, serve=SERVE, recipe_digest="", acceptance=None, command=()
    )
    back = load_drafter(package, target)
    assert all(torch.equal(t, drafter.tensors()[n]) for n, t in back.tensors().items())
    assert torch.equal(back.module.rotary.inv_freq, module.rotary.inv_freq)
    export(package, "hf", tmp_path / "hf", target)  # compares logits with transformers' own
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.model_type == model_type
    assert config.num_hidden_layers == 2
    lists = {k: v for k, v in config.to_dict().items() if k.endswith(("_types", "_layers_list"))}
    assert all(len(value) == 2 for value in lists.values() if isinstance(value, list))
    if model_type == "mistral":
        assert config.sliding_window == 6
    if model_type == "llama":
        assert config.rope_parameters["rope_type"] == "llama3"
