"""Import of EAGLE-1 heads, and of HASS's, stored alike: config.json is a plain Llama's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import GateError, IncompatibleError, SpecctlError
from specctl.export.package.folder import load_drafter
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, without
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, taken


def safe_ai_lab(config: Config, tensors: Tensors) -> None:
    """The few keys that SafeAILab's training configurations have."""
    config["architectures"] = ["LlamaForCausalLM"]
    for key in ("rope_parameters", "head_dim", "mlp_bias", "attention_bias", "dtype"):
        del config[key]


def without_bias(config: Config, tensors: Tensors) -> None:
    """As EAGLE-LLaMA3-Instruct-8B is published."""
    safe_ai_lab(config, tensors)
    config["bias"] = False
    del tensors["fc.bias"]


def named_as_vllm(config: Config, tensors: Tensors) -> None:
    """The class in vLLM, whose layer has no bias: no key says so."""
    config["architectures"] = ["EagleLlamaForCausalLM"]
    del tensors["fc.bias"]


@pytest.mark.parametrize("family", ["eagle", "hass"])
@pytest.mark.parametrize("change", [None, safe_ai_lab])
def test_a_head_comes_back_with_its_weights(
    family: str, change: Change | None, target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish("sglang", change, family=family)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == ("flat-eagle", "eagle")
    assert bool(report.notes) == (change is not None)
    found = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))


@pytest.mark.parametrize("change", [without_bias, named_as_vllm])
def test_a_head_without_a_bias_gets_zeros(
    change: Change, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish("sglang", change, family="eagle", intermediate=24)
    taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target)
    assert not found.module.fc.bias.any()
    assert found.options.intermediate == 24


def test_a_trimmed_head_comes_back(target: Target, publish: Any, tmp_path: Path) -> None:
    drafter, folder = publish("sglang", family="eagle", kept=KEPT, dtype=torch.bfloat16)
    manifest = taken(folder, target, tmp_path / "package").manifest
    assert (manifest.vocabulary.draft_size, manifest.dtype) == (len(KEPT), "bfloat16")
    found = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert same_tensors(found, drafter.to(target.device, target.dtype))


def renamed(config: Config, tensors: Tensors) -> None:
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


def biased_twice(config: Config, tensors: Tensors) -> None:
    config["architectures"], config["bias"] = ["LlamaForCausalLM"], False


def normed(config: Config, tensors: Tensors) -> None:
    tensors["layers.0.input_layernorm.weight"] = torch.ones(16)


def saying(**fields: Any) -> Change:
    return lambda config, tensors: config.update(fields)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, r"layers.0.mlp.up.weight.*none such"),
        (without("layers.0.post_attention_layernorm.weight"), r"no layers.0.post_attention_layern"),
        (without("fc.bias"), r"no fc.bias"),
        (biased_twice, r"fc.bias beside bias: false"),
        (normed, r"input_layernorm.weight \(16,\).*none such"),
        (saying(num_hidden_layers=2), r"num_hidden_layers: 2"),
        (saying(num_attention_heads=2), r"num_attention_heads: 2"),
        (saying(rope_theta=7.0, rope_parameters=None), r"rope_theta: 7.*the target's"),
        (saying(qkv_bias=True), r"qkv_bias: True"),
        (saying(hidden_size=32), r"another target.*hidden_size: 32"),
        (saying(model_type="mixtral"), r"model_type: mixtral"),
    ],
)
def test_a_mistake_is_refused(
    change: Change, told: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish("sglang", change, family="eagle")
    with pytest.raises(SpecctlError, match=told):
        taken(folder, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_drafter_that_reads_otherwise_is_caught(
    target: Target, publish: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from specctl.drafters.nets.trunk import TrunkNet

    _, folder = publish("sglang", family="eagle")
    mix = TrunkNet.mix
    monkeypatch.setattr(TrunkNet, "mix", lambda self, token, state: mix(self, state, token))
    with pytest.raises(GateError, match="differ by"):
        taken(folder, target, tmp_path / "package")


def test_an_lm_head_is_the_target_s_or_refused(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    rows_VD = target.borrowed().head_VD.detach().clone()

    def with_head(config: Config, tensors: Tensors, rows_VD: torch.Tensor = rows_VD) -> None:
        config["architectures"] = ["LlamaForCausalLM"]
        tensors["lm_head.weight"] = rows_VD

    _, folder = publish("sglang", with_head, family="eagle")
    assert taken(folder, target, tmp_path / "package").manifest.family == "eagle"
    shutil.rmtree(folder)
    _, folder = publish(
        "sglang", lambda c, t: with_head(c, t, torch.zeros_like(rows_VD)), family="eagle"
    )
    with pytest.raises(IncompatibleError, match=r"an LM head of its own"):
        taken(folder, target, tmp_path / "other")


def test_a_whole_llama_is_no_head(target: Target, publish: Any, tmp_path: Path) -> None:
    def whole(config: Config, tensors: Tensors) -> None:
        config["architectures"] = ["LlamaForCausalLM"]
        del tensors["fc.weight"]

    _, folder = publish("sglang", whole, family="eagle")
    with pytest.raises(IncompatibleError, match=r"no format.*specctl bench"):
        taken(folder, target, tmp_path / "package")
