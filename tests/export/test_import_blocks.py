"""Import of DFlash and DSpark checkpoints, flat and in the speculators format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, SpecctlError
from specctl.export.formats import export
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import CARD, MANIFEST, WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, saying, swapped, without
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, stopped, taken

FAMILIES = ("dflash", "dspark")
NESTED = ("mask_token_id", "target_layer_ids")


def spec_forge(config: Config, tensors: Tensors) -> None:
    """Every setting inside `dflash_config`, and DSpark known by its projector."""
    if config["architectures"] == ["Qwen3DSparkModel"]:
        config["architectures"] = ["DSparkDraftModel"]
        config["dflash_config"]["projector_type"] = "dspark"
    for key in config["dflash_config"]:
        config.pop(key, None)


def deep_spec(config: Config, tensors: Tensors) -> None:
    """Every setting at the top."""
    config |= config.pop("dflash_config")
    del config["causal"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "causal"),
    [(None, False), (None, True), (spec_forge, False), (deep_spec, False), (deep_spec, True)],
)
def test_flat_blocks_come_back(
    family: str, change: Change | None, causal: bool, target: Target, publish: Any, tmp_path: Path
) -> None:
    options = {"mask_id": 9, "num_heads": 3, "causal": causal}
    drafter, folder = publish("sglang", change, family=family, **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == ("flat-blocks", family)
    assert report.manifest.serve["length"] == 3
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert (found.options.mask_id, found.own_taps) == (9, (1, 2, 3))
    assert found.is_causal == causal
    assert report.notes == ()


JETSPEC = (  # the keys of JetSpec/jetspec-qwen3-8b besides dflash_config's
    "architectures", "attention_bias", "attention_dropout", "block_size", "dflash_config", "dtype",
    "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range",
    "intermediate_size", "layer_types", "max_position_embeddings", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers",
    "rms_norm_eps", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window",
    "vocab_size",
)  # fmt: skip


def jet_spec(config: Config, tensors: Tensors) -> None:
    """As published: `causal_head` alone, which SGLang does not read, says that it is causal."""
    for key in config.keys() - set(JETSPEC):
        del config[key]
    config["dflash_config"] = {
        key: config["dflash_config"][key] for key in (*NESTED, "causal_head")
    }


def no_word(config: Config, tensors: Tensors) -> None:
    jet_spec(config, tensors)
    del config["dflash_config"]["causal_head"]


def of_nemo(config: Config, tensors: Tensors) -> None:
    no_word(config, tensors)
    config["architectures"] = ["Qwen3DFlashDraftModel"]


def test_the_published_jetspec_stays_causal_there_and_back(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    own = {"mask_id": 9, "causal": True, "num_heads": 15}
    drafter, folder = publish("sglang", jet_spec, family="dflash", **own)
    report = taken(folder, target, tmp_path / "package")
    assert [note.split(",")[0] for note in report.notes] == ["the block is causal"]
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.is_causal
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    export(tmp_path / "package", "sglang", tmp_path / "again", target)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["dflash_config"]["causal_head"]
    ours, theirs = load_file(tmp_path / "again" / WEIGHTS), load_file(folder / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in (MANIFEST, CARD):
        (tmp_path / "again" / name).unlink()
    assert taken(tmp_path / "again", target, tmp_path / "twice").notes == ()
    assert load_drafter(tmp_path / "twice", target).options == found.options


@pytest.mark.parametrize(("change", "others"), [(no_word, []), (of_nemo, ["with a causal block"])])
def test_without_a_word_a_block_is_dflashs(
    change: Change, others: list[str], target: Target, publish: Any, tmp_path: Path
) -> None:
    """As every reader takes it. NeMo's JetSpec said nothing at first: there both are measured."""
    _, folder = publish("sglang", change, family="dflash", mask_id=9, causal=True)
    found = stopped(folder, target, tmp_path / "out")
    assert not found.drafter.options.causal
    assert [named.split(",")[0] for named in found.readings] == others
    assert all(other.options.causal for other in found.readings.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 3},
        {"num_heads": 3, "kept": KEPT, "mask_id": 9},
        {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24, "rope_theta": 77.0},
        {"num_heads": 3, "causal": True},
    ],
    ids=str,
)
def test_blocks_of_the_speculators_format_come_back(
    family: str, options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish("speculators", family=family, **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.notes) == ("speculators-blocks", ())
    found: Any = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.options.mask_id == options.get("mask_id")
    assert found.net.shape == drafter.net.shape
    assert found.is_causal == options.get("causal", False)


def test_copies_of_what_is_the_targets_are_left_out(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    borrowed = target.borrowed()

    def copied(config: Config, tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = borrowed.embedding_VD.detach().clone()
        tensors["lm_head.weight"] = borrowed.head_VD.detach().clone()

    def other_head(config: Config, tensors: Tensors) -> None:
        copied(config, tensors)
        tensors["lm_head.weight"][5] += 1

    drafter, folder = publish("sglang", copied, family="dspark", mask_id=9)
    taken(folder, target, tmp_path / "package")
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "published-package")
    _, folder = publish("sglang", other_head, family="dspark", mask_id=9)
    with pytest.raises(SpecctlError, match=r"LM head of its own.*1 rows that differ"):
        taken(folder, target, tmp_path / "other")


def test_a_flat_folder_has_no_mask_or_vocabulary_of_its_own(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """SGLang takes the embedding and the rows of the LM head from the target."""

    def own_mask(config: Config, tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = target.borrowed().embedding_VD.detach().clone()
        tensors["embed_tokens.weight"][9] += 1

    def trimmed(config: Config, tensors: Tensors) -> None:
        config["draft_vocab_size"] = len(KEPT)
        tensors["d2t"] = torch.tensor(KEPT) - torch.arange(len(KEPT))

    for change in (own_mask, trimmed):
        _, folder = publish("sglang", change, family="dflash", mask_id=9)
        with pytest.raises(SpecctlError, match="an embedding or a vocabulary of its own"):
            taken(folder, target, tmp_path / "package")
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "published-package")


def inner(**fields: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(fields)


def everywhere(**fields: Any) -> Change:
    """At the top, too."""
    return lambda config, tensors: (inner(**fields)(config, tensors), config.update(fields))


def no_mask(config: Config, tensors: Tensors) -> None:
    for part in (config, config["dflash_config"]):
        part.pop("mask_token_id", None)


def sink_logits(config: Config, tensors: Tensors) -> None:
    """As in MiMo-V2's blocks, without the key that says so."""
    tensors["layers.0.self_attn.attention_sink_bias"] = torch.zeros(4)


def other_row(config: Config, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"][7] += 1


def rotating(**fields: Any) -> Change:
    return lambda config, tensors: config["rope_parameters"].update(fields)


def shared(**fields: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(fields)


def as_dflash(config: Config, tensors: Tensors) -> None:
    """A name under which engines load the stack and drop the head without a word."""
    config["architectures"] = ["DFlashDraftModel"]
    del config["dflash_config"]["projector_type"], config["dflash_config"]["shift_label"]


def outer_only(key: str) -> Change:
    """The key at the top level, where no engine looks for it."""
    return lambda config, tensors: config.update({key: config["dflash_config"].pop(key)})


def as_modelopt(config: Config, tensors: Tensors) -> None:
    """DFlash's architecture, and the projector's type."""
    config["architectures"] = ["DFlashDraftModel"]


def as_jetspec(config: Config, tensors: Tensors) -> None:
    """A causal block that says so by `causal_head` alone, which SGLang does not read."""
    del config["is_causal"], config["dflash_config"]["causal"]


@pytest.mark.parametrize(
    ("change", "causal"), [(None, False), (as_modelopt, False), (None, True), (as_jetspec, True)]
)
def test_domino_comes_back(
    change: Change | None, causal: bool, target: Target, publish: Any, tmp_path: Path
) -> None:
    own = {"mask_id": 9, "num_heads": 3, "state": 24, "causal": causal}
    drafter, folder = publish("sglang", change, family="domino", **own)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == ("flat-domino", "domino")
    assert report.manifest.serve["length"] == 3
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert (found.options.mask_id, found.options.state, found.options.rank) == (9, 24, 64)
    assert found.options.causal == causal
    assert any("is_causal alone" in note for note in report.notes) == (change is as_jetspec)


SPEC, FLAT = "speculators", "sglang"
REFUSED: list[tuple[str, str, Change, str]] = [
    (FLAT, "dflash", no_mask, r"mask_token_id: None.*dflash_config"),
    (FLAT, "dflash", inner(mask_token_id=48), r"mask_token_id: 48.*0 to 47"),
    (FLAT, "dflash", inner(target_layer_ids=[0, 1]), r"fc.weight \(16, 48\).*\(16, 32\)"),
    (FLAT, "dflash", inner(target_layer_ids=[0, 1, 7]), r"\[1, 2, 8\] of 8 layers"),
    (FLAT, "dflash", inner(target_layer_ids=None), r"target_layer_ids: None"),
    (FLAT, "dflash", inner(causal=True, is_causal=False), r"causal: True, is_causal: False"),
    (FLAT, "dflash", inner(causal_head="yes"), r"causal_head: yes"),
    (FLAT, "dflash", inner(projector_type="domino"), r"shift_label: None"),
    (FLAT, "domino", as_dflash, r"embed_proj.0.weight"),
    (FLAT, "domino", outer_only("shift_label"), r"shift_label: None.*shift_label: True"),
    (FLAT, "domino", inner(shift_label=False), r"shift_label: False.*shift_label: True"),
    (FLAT, "domino", inner(pure_draft_prefix_len=0), r"pure_draft_prefix_len: 0"),
    (FLAT, "domino", inner(projector_type="dflash"), r"projector_type: dflash"),
    (FLAT, "domino", saying(emb_dim=7), r"emb_dim: 7, and 64 in dflash_config"),
    (FLAT, "domino", without("prefix_gru.weight_hh_l0"), r"no memory.weight_hh"),
    (FLAT, "dflash", inner(attention_sink_bias=True), r"learned logit.*attention_sink_bias: True"),
    (FLAT, "dflash", saying(add_swa_attention_sink_bias=True), r"learned logit.*add_swa_attention"),
    (FLAT, "dflash", sink_logits, r"net.layers.0.self_attn.attention_sink_bias.*none such"),
    (FLAT, "dflash", inner(use_swa=True), r"use_swa with layer_types.*full_attention"),
    (FLAT, "dflash", inner(attention_value_scale=0.5), r"attention_value_scale: 0.5"),
    (FLAT, "dflash", inner(output_multiplier=0.5), r"output_multiplier: 0.5"),
    (FLAT, "dflash", inner(final_logit_softcapping=30.0), r"final_logit_softcapping: 30.0"),
    (FLAT, "dflash", saying(use_gemma_norm=True), r"use_gemma_norm: True"),
    (FLAT, "dflash", saying(is_neox_style=False), r"is_neox_style: False"),
    (FLAT, "dflash", saying(is_causal=True), r"causal: False, is_causal: True"),
    (FLAT, "dflash", rotating(rope_dim=2), r"rope_dim 2"),
    (FLAT, "dflash", saying(block_size=1), r"block_size: 1"),
    (FLAT, "dflash", saying(layer_types=["full_attention", "sliding_attention"]), r"window"),
    (FLAT, "dflash", saying(model_type="llama"), r"model_type: llama"),
    (FLAT, "dflash", without("layers.1.self_attn.q_norm.weight"), r"no net.layers.1.self_attn.q_n"),
    (FLAT, "dflash", without("hidden_norm.weight"), r"no fc_norm.weight"),
    (FLAT, "dspark", inner(markov_head_type="rnn"), r"markov_head_type: vanilla, and rnn"),
    (FLAT, "dspark", everywhere(markov_head_type="rnn"), r"no joint.bias"),
    (FLAT, "dspark", inner(markov_head_type="fir"), r"markov_head_type: fir.*vanilla, gated, rnn"),
    (FLAT, "dflash", inner(sample_from_anchor=True), r"sample_from_anchor: True.*false"),
    (FLAT, "dflash", inner(shift_label=True), r"shift_label: True.*false"),
    (FLAT, "dspark", inner(sample_from_anchor=False), r"sample_from_anchor: False"),
    (FLAT, "dspark", inner(enable_confidence_head=False), r"enable_confidence_head: False"),
    (FLAT, "dspark", without("confidence_head.proj.bias"), r"no confidence.bias"),
    (SPEC, "dflash", other_row, r"rows that differ"),
    (SPEC, "dflash", shared(num_hidden_layers=1), r"net.layers.1.*none such"),
    (SPEC, "dflash", shared(rms_norm_eps=0.1), r"rms_norm_eps: 0.1"),
    (SPEC, "dflash", shared(layer_types=["full_attention", "sliding_attention"]), r"window"),
    (SPEC, "dflash", shared(logit_scale=0.5), r"logit_scale: 0.5"),
    (SPEC, "dflash", shared(is_neox_style=False), r"is_neox_style: False"),
    (SPEC, "dspark", saying(enable_confidence_head=False), r"enable_confidence_head: False"),
    (SPEC, "dspark", saying(sample_from_anchor=False), r"sample_from_anchor: false"),
    (SPEC, "dspark", saying(markov_rank=7), r"before.weight \(48, 32\).*\(48, 7\)"),
]


def test_blocks_that_vllm_would_take_for_causal_are_read_as_trained(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """speculators 0.9 writes the key so by default; its trainer uses it for windows alone."""
    drafter, folder = publish(SPEC, saying(sliding_window_non_causal=False), family="dflash")
    report = taken(folder, target, tmp_path / "package")
    assert [note.split(":")[0] for note in report.notes] == ["sliding_window_non_causal is false"]
    found = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert same_tensors(found, drafter.to(target.device, target.dtype))


@pytest.mark.parametrize(
    "options", [{}, {"kept": KEPT, "num_heads": 3}, {"layers": 1, "dtype": torch.bfloat16}], ids=str
)
def test_p_eagle_comes_back(
    options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(SPEC, family="p-eagle", **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.notes) == ("speculators-peagle", ())
    found = load_drafter(tmp_path / "package", target, allow=("eos",))
    assert same_tensors(found, drafter.to(target.device, target.dtype))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (saying(mask_token_id=48), r"mask_token_id: 48"),
        (saying(norm_before_residual=True), r"norm_before_residual: True"),
        (shared(num_attention_heads=2), r"num_attention_heads: 2"),
        (shared(num_hidden_layers=1), r"net.layers.1.*none such"),
        (without("mask_hidden"), r"no mask_hidden"),
        (without("layers.0.hidden_norm.weight"), r"no net.layers.0.hidden_norm"),
        (other_row, r"rows that differ"),
    ],
)
def test_a_mistake_of_p_eagle_is_refused(
    change: Change, told: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish(SPEC, change, family="p-eagle")
    with pytest.raises(SpecctlError, match=told):
        taken(folder, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(("to", "family", "change", "told"), REFUSED)
def test_a_mistake_is_refused(
    to: str, family: str, change: Change, told: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    how = {} if to == SPEC else {"mask_id": 9}
    _, folder = publish(to, change, family=family, num_heads=3, **how)
    with pytest.raises(SpecctlError, match=told):
        taken(folder, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("to", [FLAT, SPEC])
def test_a_reader_that_disagrees_stops_the_import(
    to: str, target: Target, publish: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Taps of other layers, another mask and a block of another length are shown by the proof."""
    from specctl.export.imports import blocks

    _, folder = publish(to, family="dflash", mask_id=9, num_heads=3)
    right = blocks.options_of
    for wrong in ({"taps": (1, 2, 4)}, {"mask_id": 11}, {"rope_theta": 77.0}, {"num_heads": 4}):
        monkeypatch.setattr(
            blocks, "options_of", lambda *given, wrong=wrong: {**right(*given), **wrong}
        )
        with pytest.raises(GateError):
            taken(folder, target, tmp_path / "package")
        assert not (tmp_path / "package").exists()


def test_swapped_tensors_are_another_drafter(target: Target, publish: Any, tmp_path: Path) -> None:
    """Nothing tells two equal shapes apart: the folder is read as its engine reads it."""
    change = swapped("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")
    drafter, folder = publish(FLAT, change, family="dflash", mask_id=9)
    taken(folder, target, tmp_path / "package")
    found = load_drafter(tmp_path / "package", target)
    assert not same_tensors(found, drafter)
    assert torch.isfinite(found.tensors()["fc.weight"]).all()
