"""Blocks with a correction draft in vLLM, SGLang and llama.cpp what they draft here, and come back
from every published layout of them as they were, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError, SpecctlError
from specctl.export.formats import export, format_for
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import (
    KEPT,
    Change,
    exported,
    faulty,
    saying,
    shaken,
    without,
)
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, stopped, taken

SPEC, FLAT, XPRESS = "speculators", "sglang", "vllm-xpress"
MASK = {"mask_id": 9}
GATED, RNN = {**MASK, "correction": "gated"}, {**MASK, "correction": "rnn"}
CONV = {**MASK, "conv_taps": 2, "conv_group": 4}

# What the layouts of the catalogue add to those of DFlash: keys inside `dflash_config` (of the flat
# XPress at the top) and tensors, for a target of width 16 with 48 tokens and blocks of three.
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, list[int]]]] = [
    (
        "dflash2",
        MASK,
        {
            "block_size": 4,
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 8,
            "selector_top_k": 3,
        },
        {
            "layers.1.attention_conv.base_kernel": [2, 2, 16],
            "layers.1.attention_conv.kernel_projection.weight": [16, 16],
            "layers.0.mlp_conv.base_kernel": [2, 2, 16],
            "candidate_selector.predecessor_codebook": [48, 8],
            "candidate_selector.successor_codebook": [48, 8],
            "candidate_selector.hidden_projection.weight": [8, 16],
        },
    ),
    (
        "lilicorr",
        MASK,
        {
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": 4,
            "lilicorr_hidden_size": 24,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 4,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 12,
            "lilicorr_vector_eps": 1e-4,
            "lilicorr_logit_scale": 8.0,
        },
        {
            "lilicorr.token_proj.weight": [24, 16],
            "lilicorr.feature_norm.bias": [5],
            "lilicorr.feature_mlp.up_proj.weight": [24, 5],
            "lilicorr.feature_mlp.down_proj.weight": [24, 24],
            "lilicorr.slot_embedding": [1, 1, 3, 1, 24],
            "lilicorr.rank_embedding": [1, 1, 1, 4, 24],
            "lilicorr.relative_slot_bias": [4, 7],
            "lilicorr.layers.1.attn.in_proj_weight": [72, 24],
            "lilicorr.layers.0.mlp.up_proj.weight": [48, 24],
            "lilicorr.layers.0.mlp.down_proj.bias": [24],
            "lilicorr.anchor_out_head.weight": [12, 24],
        },
    ),
    (
        "xpress",
        MASK,
        {
            "xpress_rank": 8,
            "xpress_mlp_hidden": 16,
            "xpress_block_size": 4,
            "xpress_num_passes": 3,
            "xpress_topc": 48,
        },
        {
            "xpress_head.w1.weight": [48, 8],
            "xpress_head.w2.weight": [48, 8],
            "xpress_head.down_h.weight": [8, 16],
            "xpress_head.down_g.weight": [8, 16],
            "xpress_head.in_proj.weight": [8, 24],
            "xpress_head.mix.L": [8, 4, 4],
            "xpress_head.mlp.gate_proj.weight": [16, 8],
            "xpress_head.mlp.down_proj.weight": [8, 16],
        },
    ),
    (
        "dspark",
        GATED,
        {"markov_head_type": "gated"},
        {"markov_head.gate_proj.weight": [32, 48], "markov_head.gate_proj.bias": [32]},
    ),
    (
        "dspark",
        RNN,
        {"markov_head_type": "rnn"},
        {"markov_head.joint_proj.weight": [96, 80], "markov_head.joint_proj.bias": [96]},
    ),
]
NAMED = {"dflash2": "DFlash2DraftModel", "lilicorr": "LiLiCorrDraftModel"}
NAMED |= {"xpress": "Qwen3XPressModel", "dspark": "Qwen3DSparkModel"}


def flat_of(family: str) -> str:
    return XPRESS if family == "xpress" else FLAT


@pytest.mark.parametrize(("family", "options", "keys", "tensors"), LAYOUTS)
def test_a_flat_folder_has_the_published_names(
    family: str,
    options: dict[str, Any],
    keys: dict[str, Any],
    tensors: dict[str, list[int]],
    target: Target,
    tmp_path: Path,
) -> None:
    drafter = shaken(family, target, num_heads=3, **options)
    manifest = exported(drafter, target, tmp_path / "out", flat_of(family))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    where = config if family == "xpress" else config["dflash_config"]
    assert {key: where.get(key) for key in keys} == keys
    assert config["architectures"] == [NAMED[family]]
    found = {name: list(t.shape) for name, t in load_file(tmp_path / "out" / WEIGHTS).items()}
    assert {name: found.get(name) for name in tensors} == tensors
    assert len(found) == len(drafter.tensors())
    served = " ".join(manifest.served_by)
    assert ('"method": "dflash"' in served) == (family != "dspark")
    assert ("sglang.launch_server" in served) == (family != "xpress")


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("dflash2", FLAT, MASK),
    ("dflash2", FLAT, {**MASK, "window": 7, "causal": True, "layers": 1}),
    ("dflash2", FLAT, {**MASK, "window": 6, "conv_taps": 3, "dtype": torch.bfloat16}),
    ("dflash2", SPEC, {}),
    ("dflash2", SPEC, {**MASK, "window": 7}),
    ("lilicorr", FLAT, {**MASK, "width": 16, "lattice_layers": 1}),
    ("lilicorr", FLAT, {**CONV, "candidates": 2, "mlp_ratio": 1.5}),
    ("lilicorr", FLAT, {**MASK, "window": 6, "eps": 0.3, "scale": 3.0}),
    ("xpress", XPRESS, {**MASK, "before_root": False, "causal": True}),
    ("xpress", XPRESS, {**MASK, "before_root": False, "mlp_ratio": 3, "window": 6}),
    ("dspark", FLAT, GATED),
    ("dspark", FLAT, {**RNN, "dtype": torch.bfloat16}),
    ("dspark", FLAT, {**MASK, "window": 6}),
    ("dflash", SPEC, {**MASK, "window": 6, "kept": KEPT}),
    ("dflash", FLAT, {**MASK, "window": 6, "causal": True}),
]


@pytest.mark.parametrize(("family", "to", "options"), CASES, ids=str)
def test_a_folder_comes_back_and_goes_out_as_it_was(
    family: str, to: str, options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(to, family=family, num_heads=3, **options)
    report = taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert same_tensors(found, drafter.to(target.device, found.dtype))
    kept = {key: getattr(found.options, key) for key in options if key not in ("dtype", "kept")}
    assert kept == {key: options[key] for key in kept}
    assert report.manifest.serve["length"] == 3
    export(tmp_path / "package", to, tmp_path / "again", target, allow=("eos",))
    for name in ("config.json", WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


# -- other spellings ---------------------------------------------------------------------------


def renamed(pairs: dict[str, str]) -> Change:
    """Parts of names replaced in every tensor's name."""

    def change(config: Config, tensors: Tensors) -> None:
        for name in list(tensors):
            new = name
            for old, part in pairs.items():
                new = new.replace(old, part)
            tensors[new] = tensors.pop(name)

    return change


def called(architecture: str, **nested: Any) -> Change:
    """Another architecture, and these keys inside `dflash_config`."""

    def change(config: Config, tensors: Tensors) -> None:
        config["architectures"] = [architecture]
        config["dflash_config"].update(nested)

    return change


def both(*changes: Change) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        for one in changes:
            one(config, tensors)

    return change


COUNTED = renamed(
    {
        "feature_norm": "feature_mlp.0",
        "feature_mlp.up_proj": "feature_mlp.1",
        "feature_mlp.down_proj": "feature_mlp.3",
    }
)


def as_modelopts_trainer(config: Config, tensors: Tensors) -> None:
    """Parts of the lattice's MLPs by their number."""
    COUNTED(config, tensors)
    for name in list(tensors):
        if name.startswith("lilicorr.layers."):
            new = name.replace("mlp.up_proj", "mlp.0").replace("mlp.down_proj", "mlp.2")
            tensors[new] = tensors.pop(name)


MODELOPT_SPARK = renamed({"markov_head.": "", "confidence_head.proj": "confidence_proj"})


def modelopt_spark(config: Config, tensors: Tensors) -> None:
    MODELOPT_SPARK(config, tensors)
    called("DFlashDraftModel", projector_type="dspark", use_confidence_head=True)(config, tensors)


SPELLINGS: list[tuple[str, str, dict[str, Any], Change]] = [
    ("dflash2", "flat-dflash2", MASK, called("DFlash2BeamDraftModel")),
    ("dflash2", "flat-dflash2", MASK, called("MiniMaxDFlash2DraftModel")),
    ("dflash2", "flat-dflash2", MASK, called("DFlashDraftModel", projector_type="dflash2")),
    ("lilicorr", "flat-lilicorr", CONV, as_modelopts_trainer),
    ("lilicorr", "flat-lilicorr", MASK, called("DFlashDraftModel", projector_type="lilicorr")),
    ("xpress", "flat-xpress", {**MASK, "before_root": False}, called("DFlashQwen3XPressModel")),
    ("dspark", "flat-blocks", MASK, modelopt_spark),
    ("dspark", "flat-blocks", GATED, modelopt_spark),
    ("dspark", "flat-blocks", RNN, modelopt_spark),
]


@pytest.mark.parametrize(("family", "form", "options", "change"), SPELLINGS)
def test_another_spelling_is_the_same_drafter(
    family: str,
    form: str,
    options: dict[str, Any],
    change: Change,
    target: Target,
    publish: Any,
    tmp_path: Path,
) -> None:
    drafter, folder = publish(flat_of(family), change, family=family, num_heads=3, **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == (form, family)
    found = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.options == drafter.options


def as_speculators(kind: str, **fields: Any) -> Change:
    """A folder of DFlash in the speculators format with another kind's keys."""

    def change(config: Config, tensors: Tensors) -> None:
        config |= {"speculators_model_type": kind, **fields}
        config["speculators_config"]["algorithm"] = kind

    return change


REFINER = {
    "before.weight": "token_embed.weight",
    "of_slot.weight": "down_h.weight",
    "of_block.weight": "down_g.weight",
    "joint.weight": "in_proj.weight",
    "mix": "mix_l",
    "gate.weight": "mlp_gate.weight",
    "up.weight": "mlp_up.weight",
    "down.weight": "mlp_down.weight",
    "bias.weight": "readout.weight",
}
XPRESS_KEYS = {"xpress_rank": 8, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}


@pytest.mark.parametrize(
    ("kept", "layers"),
    [(None, {}), (KEPT, {}), (None, {"window": 6}), (None, {"window": 6, "causal": True})],
)
def test_xpress_of_speculators_comes_back(
    kept: Any, layers: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    """With other names than vLLM's, a vocabulary of its own, and the token before the root."""
    drafter = shaken("xpress", target, kept, num_heads=3, mask_id=9)
    inner = drafter.tensors()

    def change(config: Config, tensors: Tensors) -> None:
        as_speculators("xpress", block_size=4, **XPRESS_KEYS)(config, tensors)
        tensors |= {f"refiner_head.{new}": inner[old] for old, new in REFINER.items()}

    options = {"num_heads": 3, "mask_id": 9, "kept": kept, **layers}
    dflash, folder = publish(SPEC, change, family="dflash", **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.engine) == ("speculators-xpress", "speculators 0.9")
    assert any("--to vllm" in note for note in report.notes)
    found: Any = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert found.options.before_root
    assert {name: getattr(found.options, name) for name in layers} == layers
    assert found.options.causal == layers.get("causal", False)
    shared, own = dflash.tensors(), found.tensors()
    assert own.keys() == shared.keys() | REFINER.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, inner[name] if name in REFINER else shared[name]), name


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_that_vllm_lacks_are_read_by_speculators_rules(
    head: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter = shaken("dspark", target, num_heads=3, mask_id=9, correction=head)
    inner = drafter.tensors()
    ours, theirs = ("gate", "gate_proj") if head == "gated" else ("joint", "joint_proj")

    def change(config: Config, tensors: Tensors) -> None:
        config["markov_head_type"] = head
        for part in ("weight", "bias"):
            tensors[f"markov_head.{theirs}.{part}"] = inner[f"{ours}.{part}"]

    _, folder = publish(SPEC, change, family="dspark", num_heads=3, mask_id=9)
    report = taken(folder, target, tmp_path / "package")
    assert report.engine == "speculators 0.9"
    assert any("--to sglang" in note for note in report.notes)
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.options.correction == head
    assert torch.equal(found.tensors()[f"{ours}.weight"], inner[f"{ours}.weight"])


def test_a_flat_xpress_may_mean_the_token_before_the_root(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """vLLM reads the root itself; the other reading is measured beside it."""
    drafter, folder = publish(XPRESS, family="xpress", num_heads=3, mask_id=9)
    found = stopped(folder, target, tmp_path / "out")
    (other,) = found.readings.values()
    assert not found.drafter.options.before_root
    assert other.options.before_root
    assert same_tensors(other, drafter)


@pytest.mark.parametrize("before_root", [True, False])
def test_an_export_says_where_vllm_reads_another_token(
    before_root: bool, target: Target, tmp_path: Path
) -> None:
    drafter = shaken("xpress", target, mask_id=9, before_root=before_root)
    notes = exported(drafter, target, tmp_path / "out", XPRESS).notes
    assert any("before_root=false" in note for note in notes) == before_root


# -- mistakes ----------------------------------------------------------------------------------


def lost(key: str) -> Change:
    """A key that is in `dflash_config` no more, but at the top, where no engine looks for it."""
    return lambda config, tensors: config.update({key: config["dflash_config"].pop(key)})


def inner(**fields: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(fields)


def scaled(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name] * 1.5})


CODEBOOK = "candidate_selector.successor_codebook"
WRITTEN: dict[str, tuple[str, dict[str, Any], str, Change, str]] = {
    "lost convolutions": ("dflash2", MASK, FLAT, lost("conv_kernel_size"), "conv_kernel_size"),
    "a lost selector": ("dflash2", MASK, FLAT, lost("selector_top_k"), "selector_top_k"),
    "more candidates": ("dflash2", MASK, FLAT, inner(selector_top_k=4), "other token ids"),
    "another codebook": ("dflash2", MASK, FLAT, scaled(CODEBOOK), "logits by SGLang"),
    "other groups": ("dflash2", MASK, FLAT, inner(conv_group_size=2), "kernel_projection"),
    "a window of the first slot": (
        "dflash2", {**MASK, "window": 7}, FLAT, saying(sliding_window=8), "token ids|logits by",
    ),
    "a causal window": (
        "dflash2",
        {**MASK, "window": 7},
        FLAT,
        lambda config, tensors: config.pop("is_causal"),
        "token ids|logits by",
    ),
    "a window lost in vLLM": (
        "dflash2",
        {"window": 7},
        SPEC,
        lambda config, tensors: config["transformer_layer_config"].update(layer_types=None),
        "token ids|logits by",
    ),
    "no keys for vLLM": ("dflash2", {}, SPEC, lambda c, t: c.pop("selector_rank"), "selector_rank"),
    "another scale": ("lilicorr", MASK, FLAT, inner(lilicorr_logit_scale=7.0), "logits by SGLang"),
    "another epsilon": ("lilicorr", MASK, FLAT, inner(lilicorr_vector_eps=9.0), "by SGLang"),
    "a lost size": ("lilicorr", MASK, FLAT, lost("lilicorr_factor_dim"), "lilicorr_factor_dim"),
    "a lattice without convolutions": ("lilicorr", CONV, FLAT, lost("conv_group_size"), "conv"),
    "the trainer's names": ("lilicorr", MASK, FLAT, as_modelopts_trainer, "goes nowhere"),
    "swapped ends": (
        "lilicorr",
        MASK,
        FLAT,
        renamed({".in_head": ".x", ".out_head": ".in_head"}),
        "out_head|get no tensor",
    ),
    "another mixing matrix": ("xpress", MASK, XPRESS, scaled("xpress_head.mix.L"), "by vLLM"),
    "a folded matrix": (
        "xpress",
        MASK,
        XPRESS,
        lambda config, tensors: tensors["xpress_head.mix.L"].add_(torch.eye(6)),
        "logits by vLLM",
    ),
    "speculators' names": (
        "xpress", MASK, XPRESS, renamed({"xpress_head": "refiner_head"}), "goes nowhere",
    ),
    "a plain head": ("dspark", GATED, FLAT, saying(markov_head_type="vanilla"), "goes nowhere"),
    "a memory lost": (
        "dspark", RNN, FLAT, scaled("markov_head.joint_proj.weight"), "logits by SGLang",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRITTEN)
def test_a_silent_mistake_in_an_export_is_caught(
    mistake: str, target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family, options, to, change, said = WRITTEN[mistake]
    faulty(monkeypatch, to, change)
    with pytest.raises(GateError, match=said):
        exported(shaken(family, target, **options), target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


REFUSED: list[tuple[str, dict[str, Any], Change, str]] = [
    ("dflash2", MASK, called("DFlashDraftModel"), r"candidate_selector.*none such"),
    ("dflash2", MASK, inner(projector_type="dspark"), r"projector_type: dspark"),
    ("dflash2", MASK, lost("conv_kernel_size"), r"conv_kernel_size: None.*1 or more"),
    ("dflash2", MASK, lost("conv_group_size"), r"conv_group_size: None.*1 or more"),
    ("dflash2", MASK, lost("selector_rank"), r"selector_rank: None.*1 or more"),
    ("dflash2", MASK, lost("selector_top_k"), r"selector_top_k: None.*1 or more"),
    ("dflash2", MASK, inner(sample_from_anchor=True), r"sample_from_anchor: True.*false"),
    ("dflash2", MASK, inner(shift_label=True), r"shift_label: True.*false"),
    ("dflash2", MASK, inner(output_multiplier=0.5), r"output_multiplier: 0.5"),
    ("dflash2", MASK, inner(input_embedding_scale=2.0), r"input_embedding_scale: 2.0"),
    ("dflash2", MASK, inner(final_logit_softcapping=30.0), r"softcapping: 30.0"),
    ("dflash2", MASK, without(CODEBOOK), r"no selector.successor.weight"),
    ("dflash2", MASK, inner(selector_rank=7), r"selector.hidden.weight \(8, 16\).*\(7, 16\)"),
    ("lilicorr", MASK, called("DFlashDraftModel"), r"lilicorr.*none such"),
    ("lilicorr", MASK, lost("lilicorr_logit_scale"), r"lilicorr_logit_scale: None"),
    ("lilicorr", MASK, lost("lilicorr_vector_eps"), r"lilicorr_vector_eps: None"),
    ("lilicorr", MASK, lost("lilicorr_num_heads"), r"lilicorr_num_heads: None"),
    ("lilicorr", MASK, inner(lilicorr_enabled=False), r"lilicorr_enabled: False"),
    ("lilicorr", CONV, lost("conv_kernel_size"), r"conv_kernel_size: None"),
    (
        "lilicorr",
        CONV,
        both(lost("conv_kernel_size"), lost("conv_group_size")),
        r"attention_conv.*none such",
    ),
    (
        "lilicorr",
        MASK,
        lambda config, tensors: tensors.update(
            {"lilicorr.feature_mlp.0.bias": tensors["lilicorr.feature_norm.bias"] + 0}
        ),
        r"a tensor under two names",
    ),
    ("xpress", MASK, called("DFlashDraftModel"), r"xpress_head.*none such"),
    ("xpress", MASK, lambda c, t: c.pop("xpress_rank"), r"xpress_rank: None"),
    ("xpress", MASK, lambda c, t: c.pop("xpress_mlp_hidden"), r"xpress_mlp_hidden: None"),
    ("xpress", MASK, saying(xpress_mlp_hidden=17), r"xpress_mlp_hidden: 17"),
    ("xpress", MASK, saying(xpress_block_size=5), r"xpress_block_size: 5, block_size: 4"),
    ("xpress", MASK, saying(sample_from_anchor=True), r"sample_from_anchor: True"),
    ("xpress", MASK, saying(logit_scale=0.5), r"logit_scale: 0.5"),
    ("dspark", GATED, saying(markov_head_type="vanilla"), r"markov_head_type: vanilla, and gated"),
    (
        "dflash2",
        {**MASK, "window": 6},
        both(lambda c, t: c.pop("is_causal"), lambda c, t: c["dflash_config"].pop("causal")),
        r"without is_causal",
    ),
    (
        "dflash2",
        {**MASK, "window": 6},
        saying(layer_types=["sliding_attention", "full_attention"]),
        r"some layers.*have a window",
    ),
    ("dflash2", {**MASK, "window": 6}, saying(use_swa=True, swa_window_size=7), r"forced upon all"),
]


@pytest.mark.parametrize(("family", "options", "change", "said"), REFUSED)
def test_a_folder_that_does_not_say_what_it_is_is_refused(
    family: str,
    options: dict[str, Any],
    change: Change,
    said: str,
    target: Target,
    publish: Any,
    tmp_path: Path,
) -> None:
    _, folder = publish(flat_of(family), change, family=family, num_heads=3, **options)
    with pytest.raises(SpecctlError, match=said):
        taken(folder, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


ZLAB = (  # the keys of z-lab/Qwen3.8-27B-DFlash2 besides dflash_config's
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "is_causal",
    "dflash_config", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "num_target_layers", "pad_token_id", "rms_norm_eps", "rope_parameters", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
)  # fmt: skip


def test_the_published_dflash2_has_fewer_keys(target: Target, publish: Any, tmp_path: Path) -> None:
    """The length of its block stands in `dflash_config` alone, causality at the top alone."""

    def as_published(config: Config, tensors: Tensors) -> None:
        for key in config.keys() - set(ZLAB):
            del config[key]
        assert set(config) == set(ZLAB)
        del config["dflash_config"]["causal"]
        config |= {"max_window_layers": 5, "use_cache": True, "transformers_version": "5.15.0"}

    options = {"mask_id": 9, "window": 2048, "num_heads": 7}
    drafter, folder = publish(FLAT, as_published, family="dflash2", **options)
    report = taken(folder, target, tmp_path / "package")
    assert report.notes == ()
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.options == drafter.options


def test_a_window_that_sglang_would_take_for_causal_is_read_and_said(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """A window that is forced upon all layers is the same, where they have it anyway."""

    def change(config: Config, tensors: Tensors) -> None:
        del config["is_causal"]
        config["dflash_config"].update(use_swa=True, swa_window_size=6)

    _, folder = publish(FLAT, change, family="dflash2", num_heads=3, mask_id=9, window=6)
    report = taken(folder, target, tmp_path / "package")
    assert [note.split(",")[0] for note in report.notes] == ["the block is not causal"]
    found: Any = load_drafter(tmp_path / "package", target)
    assert (found.options.window, found.options.causal) == (6, False)


@pytest.mark.parametrize(
    ("to", "family"),
    [
        (SPEC, "dflash"), (SPEC, "dspark"), (SPEC, "dflash2"), (SPEC, "eagle3"), (FLAT, "dflash"),
        (FLAT, "domino"), (FLAT, "lilicorr"), (XPRESS, "xpress"), ("gguf", "dspark"),
        ("openvino", "dflash"), ("angelslim", "dfly"), ("angelslim", "dflare"),
    ],
)  # fmt: skip
def test_a_window_that_keeps_the_first_tokens_is_written_for_no_engine(
    to: str, family: str, target: Target, tmp_path: Path
) -> None:
    """None of the layouts has a word for them: the folder would be one without."""
    own = {} if family == "eagle3" else {**MASK, "num_heads": 3}
    said = "no published layout says.*window: 6, sink: 2.*--to specctl"
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(family, target, window=6, sink=2, **own), target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["dflash2", "eagle3"])
def test_a_package_keeps_its_window_and_sinks(family: str, target: Target, tmp_path: Path) -> None:
    drafter = shaken(family, target, window=7, sink=2)
    exported(drafter, target, tmp_path / "out", "specctl")
    found: Any = load_drafter(tmp_path / "out", target)
    assert same_tensors(found, drafter)
    assert found.options == drafter.options
    assert (found.options.window, found.options.sink) == (7, 2)


@pytest.mark.parametrize(
    ("to", "family", "options", "said"),
    [
        (FLAT, "dflash2", {}, "mask_id: null"),
        (FLAT, "dflash2", {**MASK, "kept": KEPT}, "a vocabulary of 14 ids"),
        (SPEC, "dflash2", {"kept": KEPT}, "a vocabulary of 14 ids"),
        (FLAT, "dflash2", {**MASK, "candidates": 0}, "conv_taps: 2, candidates: 0"),
        (SPEC, "dflash2", {"conv_taps": 0}, "conv_taps: 0, candidates: 3"),
        (FLAT, "lilicorr", {**MASK, "candidates": 6}, "candidates: 6"),
        (FLAT, "lilicorr", {**MASK, "lattice_layers": 0}, "lattice_layers: 0"),
        (XPRESS, "xpress", {**MASK, "kept": KEPT}, "a vocabulary of 14 ids"),
        (XPRESS, "xpress", {}, "mask_id: null"),
        (SPEC, "dspark", {"correction": "rnn"}, "correction: rnn"),
    ],
)
def test_what_an_engine_cannot_hold_is_refused(
    to: str, family: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(family, target, **options), target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "family", "form"),
    [
        ("vllm", "dflash2", SPEC),
        ("vllm", "lilicorr", FLAT),
        ("vllm", "xpress", XPRESS),
        ("sglang", "dflash2", FLAT),
        ("sglang", "lilicorr", FLAT),
        ("llama.cpp", "dflash2", "gguf"),
        ("sglang", "xpress", None),
        ("llama.cpp", "lilicorr", None),
        ("vllm", "domino", None),
        ("vllm", "eagle", None),
    ],
)
def test_an_engine_is_given_the_layout_that_it_reads(
    engine: str, family: str, form: str | None
) -> None:
    if form is not None:
        assert format_for(engine, family) == form
        return
    with pytest.raises(IncompatibleError, match=f"no format lets {engine} read"):
        format_for(engine, family)
