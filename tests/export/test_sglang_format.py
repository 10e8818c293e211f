"""A flat checkpoint drafts in SGLang what our drafter drafts here, and every silent way to go wrong
in it is caught before the folder exists."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats import filled
from specctl.export.layouts.sglang.eagle import TOKEN_MAP
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, exported, faulty, shaken


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    """One whose constants are nobody's defaults."""
    rope = {"rope_type": "default", "rope_theta": 77.0}
    made = make_target(hidden=16, vocab=48, pad_token_id=9, rope_parameters=rope, rms_norm_eps=0.03)
    found: Target = replace(made, name="some/target", eos_ids=(2,))
    return found


Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


EAGLE3: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True, "taps": (3, 1)},
    {"heads": 2, "head_dim": 8, "intermediate": 24, "taps": (2, 3)},
    {"head_groups": 4, "head_top": 2, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("options", EAGLE3)
def test_eagle3_passes_the_gate_in_every_shape(
    options: dict[str, Any], trimmed: bool, target: Target, tmp_path: Path
) -> None:
    drafter = shaken("eagle3", target, KEPT if trimmed else None, **options)
    exported(drafter, target, tmp_path / "eagle3", "sglang")
    manifest = check_files(tmp_path / "eagle3")
    assert manifest.format == "sglang"
    assert "EAGLE3" in manifest.served_by[0]
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    hidden = config["eagle_aux_hidden_state_layer_ids"]
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in nested] == hidden == sorted(hidden)
    names = set(load_file(tmp_path / "eagle3" / WEIGHTS))
    assert ({"d2t", "t2d"} <= names) == trimmed
    assert not any(name.startswith(("model.", "router")) for name in names)


def test_tensorrt_llm_is_told_the_layers(target: Target, tmp_path: Path) -> None:
    manifest = exported(shaken("eagle3", target, taps=(3, 1, 2)), target, tmp_path / "e", "sglang")
    write, serve = manifest.served_by[-2:]
    assert serve == "trtllm-serve some/target --config trtllm.yaml"
    words = shlex.split(filled(write, "my drafts/e", None))
    told = json.loads(re.search(r"write\('(.*)'\)", words[-1])[1])["speculative_config"]
    assert told["eagle3_layers_to_capture"] == [0, 1, 2]  # outputs of layers
    assert told["speculative_model"] == "my drafts/e"


def renamed(old: str, new: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        del config
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def swapped_halves(config: Config, tensors: Tensors) -> None:
    del config
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{part}.weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


def absolute_ids(config: Config, tensors: Tensors) -> None:
    del config
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def shifted_layers(config: Config, tensors: Tensors) -> None:
    del tensors
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in ids]


def without(*keys: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        del tensors
        for key in keys:
            del config[key]

    return change


MISTAKES: dict[str, tuple[Change, str]] = {
    "a prefix on every name": (renamed("", "draft_model."), "parameters get no tensor"),
    "a prefix on the layer": (renamed("midlayer", "model.model.midlayer"), "layers.0"),
    "a norm under another name": (renamed("norm.", "final_norm."), "model.norm.weight"),
    "embedding and state swapped": (swapped_halves, "logits by SGLang"),
    "a table of ids, not of offsets": (absolute_ids, "d2t"),
    "layer ids one too high": (shifted_layers, "logits by SGLang|features captured"),
    "no nested layer ids": (without("eagle_config"), "logits by SGLang|features captured"),
    "norm_output not said": (without("norm_output"), "drafted token 2: logits by SGLang"),
    "layer ids of the top one too high": (
        lambda config, tensors: config["eagle_aux_hidden_state_layer_ids"].insert(0, 0),
        "by vLLM|hidden states captured",
    ),
    "a norm that vLLM would keep": (
        lambda config, tensors: config.update(norm_before_residual=True),
        "logits by vLLM",
    ),
    "fc_norm not said": (without("fc_norm"), "fc_norm.0.weight goes nowhere"),
    "head width not said": (without("head_dim"), r"_proj\.weight \("),
    "rope not said": (without("rope_parameters", "rope_theta"), "logits by SGLang"),
    "eps not said": (without("rms_norm_eps"), "logits by SGLang"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_silent_mistake_in_eagle3_is_caught(
    mistake: str, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change, said = MISTAKES[mistake]
    options: dict[str, Any] = {"fc_norm": True, "norm_output": True, "taps": (1, 3), "head_dim": 8}
    faulty(monkeypatch, "sglang", change)
    with pytest.raises(GateError, match=said):
        exported(shaken("eagle3", target, KEPT, **options), target, tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {}),
        ("hass", {"intermediate": 24, "dtype": torch.bfloat16}),
        ("coral", {"head_groups": 4, "head_top": 2}),
        ("fspad", {"feature_sampling": False, "split_readout": False}),
    ],
)
@pytest.mark.parametrize("trimmed", [False, True])
def test_families_of_eagles_net_pass_the_gate(
    name: str, options: dict[str, Any], trimmed: bool, target: Target, tmp_path: Path
) -> None:
    drafter = shaken(name, target, KEPT if trimmed else None, **options)
    manifest = exported(drafter, target, tmp_path / "eagle-out", "sglang")
    tensors = load_file(tmp_path / "eagle-out" / WEIGHTS)
    assert "fc.bias" in tensors
    assert not {"lm_head.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight"} & set(
        tensors
    )
    assert ("--speculative-token-map" in manifest.served_by[-1]) == trimmed
    assert any("vLLM" in note for note in manifest.notes)


def test_the_command_makes_the_token_map_of_a_trimmed_eagle(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "it's eagle"
    manifest = exported(shaken("eagle", target, KEPT), target, out, "sglang")
    words = shlex.split(filled(manifest.served_by[0], out, None))
    assert words[:2] == ["python", "-c"]
    assert words[-1] == TOKEN_MAP
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words[2:])
    exec(compile(words[2], "token map", "exec"), {})
    assert torch.load(tmp_path / TOKEN_MAP, weights_only=True) == list(KEPT)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed("fc.bias", "fc.offset"), r"model\.fc\.bias first; model\.fc\.offset goes nowhere"),
        (renamed("layers.0.post", "layers.0.input"), "post_attention_layernorm"),
        (renamed("layers.", "midlayer."), "parameters get no tensor"),
        (without("rms_norm_eps"), "logits by SGLang"),
        (lambda config, tensors: config.update(bias=True), "bias: true"),
    ],
)
def test_a_silent_mistake_in_eagle_is_caught(
    change: Change, said: str, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faulty(monkeypatch, "sglang", change)
    with pytest.raises(GateError, match=said):
        exported(shaken("eagle", target), target, tmp_path / "out", "sglang")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("eagle3", {"qk_norm": True}, "qk_norm: true.*--to speculators"),
        ("eagle3", {"norm_before_residual": True}, "residual: true.*--to speculators"),
        ("eagle3", {"taps": (2,)}, "one tap"),
        ("eagle3", {"window": 8}, "window: 8, sink: 0.*--to speculators"),
        ("eagle3", {"taps": (0, 2)}, "distinct taps from 1 to 3"),
        ("eagle3", {"taps": (2, 4)}, "taps .2, 4. of a target with 4 layers"),
        ("fspad", {}, "fspad with feature_out"),
        ("eagle", {"read_tokens": False}, "read_tokens: false"),
    ],
)
def test_what_sglang_cannot_hold_is_refused_before_anything_is_written(
    name: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(name, target, **options), target, tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "axis", "keys"),
    [
        ("sglang", (0, 1, 1, 2), {"mrope_section": [1, 2, 1]}),
        ("sglang", (0, 1, 2, 0), {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        ("speculators", (0, 1, 2, 0), {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        ("sglang", (2, 1, 0, 0), None),
        ("gguf", (0, 1, 1, 2), None),
    ],
)
def test_axes_are_said_where_engines_read_them(
    to: str, axis: tuple[int, ...], keys: Any, target: Target, tmp_path: Path
) -> None:
    drafter = shaken("eagle3", target, head_dim=8, mrope=axis, norm_before_residual=to == "gguf")
    if keys is None:
        with pytest.raises(IncompatibleError, match="axes of M-RoPE"):
            exported(drafter, target, tmp_path / "out", to)
        return
    exported(drafter, target, tmp_path / "out", to)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    assert keys.items() <= layer["rope_parameters"].items()
    assert ("mrope_interleaved" in layer["rope_parameters"]) == ("mrope_interleaved" in keys)
    if to == "sglang":
        assert layer["rope_scaling"] == {"rope_type": "default", **keys}
        other = shaken("eagle", target, mrope=axis[: target.spec.head_dim // 2])
        with pytest.raises(IncompatibleError, match="EAGLE layer rotates"):
            exported(other, target, tmp_path / "other", to)
