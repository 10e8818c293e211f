"""Block drafters draft in vLLM and SGLang what they draft here: the published names, the mask as a
row of an embedding, the correction and the confidence of DSpark."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError
from specctl.drafters import families
from specctl.export.package.load import parse_options
from specctl.export.package.manifest import WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, exported, faulty, shaken

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
@pytest.mark.parametrize(
    "options", [{}, {"taps": (3, 0, 1), "layers": 1, "num_heads": 3, "dtype": torch.bfloat16}]
)
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
    assert tensors["embed_tokens.weight"].dtype == options.get("dtype", torch.float32)
    rows_VD = target.borrowed().embedding_VD.to(tensors["embed_tokens.weight"])
    mask_V = (tensors["embed_tokens.weight"] - rows_VD).abs().amax(1)
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
    "sliding layers": (
        "dspark",
        in_layer("layer_types", ["sliding_attention"] * 2),
        "without sliding_window",
    ),
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


def test_a_mask_that_is_a_token_needs_no_embedding_in_the_folder(
    target: Target, tmp_path: Path
) -> None:
    drafter = shaken("dspark", target, KEPT, mask_id=21)
    assert "mask" not in drafter.tensors()
    exported(drafter, target, tmp_path / "dspark", "speculators")
    config = json.loads((tmp_path / "dspark" / "config.json").read_text())
    assert config["mask_token_id"] == 21
    assert "embed_tokens.weight" not in load_file(tmp_path / "dspark" / WEIGHTS)


def test_an_lm_head_whose_logits_are_multiplied_goes_along_or_is_refused(
    make_target: Any, tmp_path: Path
) -> None:
    made = make_target("granite", hidden=16, vocab=48, pad_token_id=9, logits_scaling=4.0)
    target = replace(made, name="some/target", eos_ids=(2,))
    drafter = shaken("dspark", target, mask_id=21)
    exported(drafter, target, tmp_path / "dspark", "speculators")
    head_VD = load_file(tmp_path / "dspark" / WEIGHTS)["lm_head.weight"]
    assert torch.equal(head_VD, target.borrowed().head_VD)
    for index, odd in enumerate((drafter, shaken("eagle", target))):
        with pytest.raises(IncompatibleError, match=r"multiplies its logits by 0\.25"):
            exported(odd, target, tmp_path / f"out{index}", "sglang")


def test_packages_of_before_the_mask_token_have_their_own_mask() -> None:
    family = families()["dflash"]
    options = asdict(family.options())
    del options["mask_id"]
    assert parse_options(family, options).mask_id is None
    del options["layers"]
    with pytest.raises(IncompatibleError, match="layers"):
        parse_options(family, options)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize(
    "options", [{}, {"taps": (3, 1), "layers": 1, "num_heads": 3, "dtype": torch.bfloat16}]
)
def test_a_block_whose_mask_is_a_token_passes_sglangs_gate(
    name: str, options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter: Any = shaken(name, target, mask_id=21, **options)
    manifest = exported(drafter, target, tmp_path / name, "sglang")
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == 21
    ids = config["dflash_config"]["target_layer_ids"]
    assert [layer + 1 for layer in ids] == sorted(drafter.own_taps)
    assert f"--speculative-algorithm {name.upper()}" in manifest.served_by[0]
    number = f"--speculative-num-draft-tokens {drafter.options.num_heads + 1}"
    assert manifest.served_by[0].endswith(number)
    assert not {"d2t", "lm_head.weight"} & set(load_file(tmp_path / name / WEIGHTS))


def nested(key: str, value: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update({key: value})


FLAT_MISTAKES: dict[str, tuple[str, Change, str]] = {
    "another mask": ("dflash", nested("mask_token_id", 7), "logits by SGLang"),
    "a causal block": ("dflash", put("is_causal", True), "logits by SGLang"),
    "no mask": ("dflash", lambda config, tensors: config["dflash_config"].pop("mask_token_id"),
                "mask_token_id None"),
    "a shorter block": ("dflash", put("block_size", 3), "other token ids|logits by SGLang"),
    "hidden states for layers": ("dflash", nested("target_layer_ids", [1, 2]), "logits by SGLang"),
    "no layers": ("dflash", lambda config, tensors: config["dflash_config"].pop("target_layer_ids"),
                  "logits by SGLang|states captured"),
    "sliding layers": ("dflash", put("layer_types", ["sliding_attention"] * 2), "without sliding"),
    "our name of the norm": ("dflash", rename("hidden_norm.weight", "fc_norm.weight"), "hidden_no"),
    "a bias on attention": ("dflash", put("attention_bias", True), "attention_bias: true"),
    "heads' settings not at the top": ("dspark", drop("markov_rank"), "no markov head"),
    "a head under another name": (
        "dspark",
        rename("markov_head.markov_w1.weight", "model.markov_head.markov_w1.weight"),
        "goes nowhere",
    ),
    "a confidence of the state alone": (
        "dspark",
        put("confidence_head_with_markov", False),
        "confidence_head",
    ),
    "a root that does not predict": ("domino", nested("shift_label", False), "shift_label: False"),
    "another first correction": ("domino", nested("pure_draft_prefix_len", 0), "prefix_len: 0"),
    "two widths of Domino's head": ("domino", put("emb_dim", 7), "two values of emb_dim"),
    "a memory under another name": (
        "domino",
        rename("prefix_gru.weight_hh_l0", "prefix_gru.weight_hh"),
        "goes nowhere",
    ),
    "a GRU of another input": (
        "domino",
        lambda config, tensors: tensors["prefix_gru.weight_ih_l0"].mul_(1.1),
        "logits by SGLang",
    ),
}  # fmt: skip


CASES = [("speculators", *case) for case in MISTAKES.items()]
CASES += [("sglang", *case) for case in FLAT_MISTAKES.items()]


@pytest.mark.parametrize(("to", "mistake", "case"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_silent_mistake_in_a_block_is_caught(
    to: str,
    mistake: str,
    case: tuple[str, Change, str],
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    name, change, said = case
    faulty(monkeypatch, to, change)
    options: dict[str, Any] = {"taps": (0, 1), "kept": KEPT}
    if to == "sglang":
        options = {"taps": (1, 3), "mask_id": 21}
    with pytest.raises(GateError, match=said):
        exported(shaken(name, target, **options), target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists(), mistake


@pytest.mark.parametrize(
    ("to", "name", "options", "said"),
    [
        ("sglang", "dflash", {}, "mask_id: null.*--to speculators"),
        ("sglang", "dspark", {"mask_id": 21, "kept": KEPT}, "a vocabulary of 14 ids"),
        ("sglang", "dflash", {"mask_id": 21, "taps": (0, 2)}, "distinct taps from 1 to 3"),
        ("speculators", "dspark", {"rank": 0}, "rank: 0"),
        ("speculators", "dspark", {"correction": "gated"}, "correction: gated"),
        ("sglang", "domino", {"mask_id": 21, "recurrent": False}, "recurrent: false"),
        ("speculators", "dflash", {"taps": (2, 4)}, "distinct taps from 0 to 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_an_engine_cannot_hold_of_a_block_is_refused(
    to: str, name: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(name, target, **options), target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
