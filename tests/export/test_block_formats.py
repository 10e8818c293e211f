"""Block drafters draft in vLLM what they draft here: the published names, the mask in a row of the
folder's own embedding, the correction and the confidence of DSpark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import KEPT, Change, exported, faulty, shaken
from safetensors.torch import load_file

from specctl.export.manifest import WEIGHTS
from specctl.recipes.errors import GateError, IncompatibleError
from specctl.runtime.target import Target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    """One whose constants are nobody's defaults."""
    rope = {"rope_type": "default", "rope_theta": 77.0}
    made = make_target(
        "qwen3", hidden=16, vocab=48, pad_token_id=9, rope_parameters=rope, rms_norm_eps=0.03
    )
    found: Target = replace(made, name="some/target", eos_ids=(2,))
    return found


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("options", [{}, {"taps": (3, 0, 1), "layers": 1, "num_heads": 3}])
def test_a_block_passes_the_gate(
    name: str, options: dict[str, Any], trimmed: bool, target: Target, tmp_path: Path
) -> None:
    drafter: Any = shaken(name, target, KEPT if trimmed else None, **options)
    manifest = exported(drafter, target, tmp_path / name, "speculators")
    config = json.loads((tmp_path / name / "config.json").read_text())
    tensors = load_file(tmp_path / name / WEIGHTS)
    assert config["speculators_model_type"] == name
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == drafter.options.num_heads
    assert config["block_size"] == drafter.options.num_heads + (name == "dflash")
    assert config["aux_hidden_state_layer_ids"] == sorted(drafter.own_taps)
    assert f'"method": "{name}"' in manifest.served_by[-1]
    assert ("lm_head.weight" in tensors) == ("d2t" in tensors) == trimmed
    mask_V = (tensors["embed_tokens.weight"] - target.borrowed().embedding_VD).abs().amax(1)
    assert mask_V.nonzero().flatten().tolist() == [config["mask_token_id"]]
    assert torch.equal(tensors["embed_tokens.weight"][config["mask_token_id"]], drafter.module.mask)


def rename(old: str, new: str) -> Change:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def put(key: str, value: Any) -> Change:
    return lambda config, tensors: config.update({key: value})


def drop(key: str) -> Change:
    return lambda config, tensors: config.pop(key)


def drop_tensor(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def in_layer(key: str, value: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update({key: value})


def more_tokens(config: Config, tensors: Tensors) -> None:
    del tensors
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] += 1


MISTAKES: dict[str, tuple[str, Change, str]] = {
    "no embedding of its own": ("dflash", drop_tensor("embed_tokens.weight"), "logits by vLLM"),
    "another mask id": ("dflash", put("mask_token_id", 7), "logits by vLLM"),
    "layers one too high": ("dflash", put("aux_hidden_state_layer_ids", [1, 2]), "logits by vLLM"),
    "slots that see only those before": (
        "dflash",
        put("sliding_window_non_causal", False),
        "logits by vLLM",
    ),
    "a longer block": ("dflash", more_tokens, "other token ids|logits by vLLM"),
    "our name of the norm": ("dflash", rename("hidden_norm.weight", "fc_norm.weight"), "hidden_no"),
    "a prefix": ("dflash", rename("fc.weight", "model.fc.weight"), "model.fc.weight goes nowhere"),
    "no table of ids": ("dflash", drop_tensor("d2t"), "d2t"),
    "sliding layers": ("dspark", in_layer("layer_types", ["sliding_attention"] * 2), "by vLLM"),
    "a norm at the wrong place": (
        "dspark",
        lambda config, tensors: tensors["norm.weight"].copy_(tensors["hidden_norm.weight"]),
        "logits by vLLM",
    ),
    "an anchor that does not speak": ("dspark", drop("sample_from_anchor"), "logits by vLLM"),
    "the correction's tables swapped": (
        "dspark",
        rename("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        "markov_head",
    ),
    "no confidence head": ("dspark", drop("enable_confidence_head"), "goes nowhere"),
    "another confidence": (
        "dspark",
        lambda config, tensors: tensors["confidence_head.proj.bias"].add_(0.1),
        "confidences differ",
    ),
    "other positions": (
        "dspark",
        in_layer("rope_parameters", {"rope_type": "default"}),
        "logits by vLLM",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_silent_mistake_in_a_block_is_caught(
    mistake: str, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, change, said = MISTAKES[mistake]
    faulty(monkeypatch, "speculators", change)
    drafter = shaken(name, target, KEPT, taps=(0, 1))
    with pytest.raises(GateError, match=said):
        exported(drafter, target, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dspark", {"rank": 0}, "rank: 0"),
        ("dflash", {"taps": (2, 4)}, "distinct taps from 0 to 3"),
    ],
)
def test_what_vllm_cannot_hold_is_refused(
    name: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(name, target, **options), target, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
