"""Import: every silent mistake of a published head is refused with its reason."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import FileError, GateError, IncompatibleError, SpecctlError
from specctl.export.imports import find_importer, importers
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, saying, without
from specctl_testing.export.import_cases import LAYERS, Config, Tensors, taken
from specctl_testing.export.mutations import is_refused, mutated


def absolute(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = torch.tensor(KEPT)


def absolute_without_mask(config: Config, tensors: Tensors) -> None:
    absolute(config, tensors)
    del tensors["t2d"]


def other_mask(config: Config, tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def no_table(config: Config, tensors: Tensors) -> None:
    del tensors["d2t"]


def renamed(config: Config, tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    tensors[name.replace("up_proj", "up")] = tensors.pop(name)


def extra(config: Config, tensors: Tensors) -> None:
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(16)


def fewer_rows(config: Config, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]


def other_count(config: Config, tensors: Tensors) -> None:
    config["draft_vocab_size"] -= 1


def two_lists(config: Config, tensors: Tensors) -> None:
    config["eagle_config"][LAYERS] = config[LAYERS]  # the same numbers mean other layers


def beyond(config: Config, tensors: Tensors) -> None:
    config[LAYERS] = [2, 4, 8]


def two_taps(config: Config, tensors: Tensors) -> None:
    config[LAYERS] = [2, 4]
    config.get("eagle_config", {})[LAYERS] = [1, 3]


def other_embedding(config: Config, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"][7] += 1


def short_embedding(config: Config, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:40]


def scaled(config: Config, tensors: Tensors) -> None:
    part = config.get("transformer_layer_config", config)
    part["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def scaled_in_the_old_spelling(config: Config, tensors: Tensors) -> None:
    config["transformer_layer_config"]["rope_scaling"] = {"type": "dynamic", "factor": 2.0}


def norm_before_fc_as_modelopt_says(config: Config, tensors: Tensors) -> None:
    config["eagle_config"]["norm_before_fc"] = True


def integers(config: Config, tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)


def layer_says(**fields: Any) -> Change:
    return lambda config, tensors: config.get("transformer_layer_config", config).update(fields)


BOTH = ("speculators", "sglang")
REFUSED: list[tuple[str, tuple[str, ...], Change, str]] = [
    ("absolute d2t", BOTH, absolute, r"absolute ids: \[0, 2, 3, 4\].*offsets.*torch.arange"),
    ("no mask tells", BOTH, absolute_without_mask, r"absolute ids.*offsets"),
    ("other t2d", BOTH, other_mask, r"d2t begins.*t2d marks"),
    ("no d2t", BOTH, no_table, r"14 head rows without d2t.*48 rows"),
    ("renamed", BOTH, renamed, r"layers.0.mlp.up.weight.*none such"),
    ("missing", BOTH, without("norm.weight"), r"no norm.weight.*norm.weight \(16,\)"),
    ("extra", BOTH, extra, r"q_proj.bias \(16,\).*none such"),
    ("fewer rows", BOTH, fewer_rows, r"lm_head.weight \(13, 16\).*\(14, 16\)"),
    ("other count", BOTH, other_count, r"int64 \(14,\).*int64 \(13,\)"),
    ("two lists", ("sglang",), two_lists, r"\[2, 4, 5\] at the top, \[3, 5, 6\] by eagle_config"),
    ("no such layer", ("speculators",), beyond, r"\[2, 4, 8\] of 8 layers.*from 0 to 7"),
    ("two taps", BOTH, two_taps, r"fc.weight \(16, 48\).*fc.weight \(16, 32\)"),
    ("embedding", ("speculators",), other_embedding, r"1 rows that differ.*some/target"),
    ("short embedding", ("speculators",), short_embedding, r"\(40, 16\).*\(48, 16\)"),
    ("scaled", BOTH, scaled, r"rope_type linear.*rope_type default"),
    ("old rope", ("speculators",), scaled_in_the_old_spelling, r"type dynamic, factor 2.0"),
    ("quantised", BOTH, integers, r"fc.weight of torch.int8.*float32"),
    ("width", BOTH, layer_says(hidden_size=32), r"another target.*hidden_size: 32.*16.*--target"),
    ("vocabulary", BOTH, layer_says(vocab_size=50), r"vocab_size: 50.*48"),
    ("epsilon", BOTH, layer_says(rms_norm_eps=0.1), r"rms_norm_eps: 0.1"),
    ("layers", BOTH, layer_says(num_hidden_layers=2), r"num_hidden_layers: 2"),
    ("bias", BOTH, layer_says(attention_bias=True), r"attention_bias: True"),
    ("bias of the MLP", BOTH, layer_says(mlp_bias=True), r"mlp_bias: True"),
    ("norm", BOTH, saying(norm_before_fc=True), r"norm_before_fc: True"),
    ("inner norm", ("sglang",), norm_before_fc_as_modelopt_says, r"norm_before_fc: True"),
    ("logits", BOTH, layer_says(logit_scale=0.5), r"logit_scale: 0.5"),
    ("activation", BOTH, layer_says(hidden_act="gelu"), r"hidden_act: gelu"),
    ("heads", BOTH, layer_says(num_attention_heads="4"), r"num_attention_heads.*4"),
    ("model type", ("sglang",), layer_says(model_type="gemma2"), r"model_type: gemma2.*llama"),
    ("at once", ("sglang",), layer_says(eagle_config={"parallel_draft_step": 4}), r"step 4"),
]


@pytest.mark.parametrize(
    ("to", "change", "told"),
    [
        pytest.param(to, change, told, id=f"{to}-{name}")
        for name, formats, change, told in REFUSED
        for to in formats
    ],
)
def test_a_mistake_is_refused_with_the_reason_and_nothing_is_written(
    to: str, change: Change, told: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish(to, change, kept=KEPT)
    with pytest.raises(SpecctlError, match=told) as caught:
        taken(folder, target, tmp_path / "package")
    error = caught.value
    assert error.found
    assert error.expected
    assert error.do
    assert not (tmp_path / "package").exists()


def test_a_single_list_of_layers_is_read_in_the_count_of_its_format(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """A list that its trainer wrote wrongly is read as its engine reads it: nothing else tells."""

    def shifted(config: Config, tensors: Tensors) -> None:
        config[LAYERS] = [index - 1 for index in config[LAYERS]]

    _, folder = publish("speculators", shifted)
    taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.options.taps == (1, 3, 4)


@pytest.mark.parametrize("to", BOTH)
def test_a_reader_that_disagrees_stops_the_import(
    to: str, target: Target, publish: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each thing that the drafter could compute otherwise than the engine, one at a time."""
    from specctl.export.imports import eagle3

    _, folder = publish(to, taps=(1, 3, 7))
    right = eagle3._options
    for wrong in (
        {"norm_before_residual": True},
        {"norm_output": True},
        {"rope_theta": 77.0},
        {"taps": (1, 3, 6)},
    ):
        monkeypatch.setattr(
            eagle3, "_options", lambda *words, wrong=wrong: replace(right(*words), **wrong)
        )
        with pytest.raises(GateError, match=r"not the drafter that its engine .*differ by"):
            taken(folder, target, tmp_path / "package")
        assert not (tmp_path / "package").exists()


def test_pickled_weights_are_never_loaded(target: Target, publish: Any, tmp_path: Path) -> None:
    _, folder = publish("sglang")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    taken(folder, target, tmp_path / "beside-safetensors")
    (folder / WEIGHTS).unlink()
    with pytest.raises(SpecctlError, match=r"weights_only=True.*safetensors.torch.save_file"):
        taken(folder, target, tmp_path / "package")


def test_what_is_no_published_head_is_refused(target: Target, publish: Any, tmp_path: Path) -> None:
    _, folder = publish("speculators")
    with pytest.raises(FileError, match="no such package folder"):
        taken(tmp_path / "absent", target, tmp_path / "out")
    with pytest.raises(IncompatibleError, match="already"):
        taken(tmp_path / "published-package", target, tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileError, match="hf download"):
        taken(empty, target, tmp_path / "out")
    shutil.copy(folder / WEIGHTS, folder / "again.safetensors")
    with pytest.raises(SpecctlError, match="two files hold"):
        taken(folder, target, tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "family"), [("sglang", "eagle3"), ("sglang", "dflash"), ("speculators", "dspark")]
)
def test_no_value_of_a_configuration_is_an_error_of_ours(
    to: str, family: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    """Taken over, or refused as a user can understand."""
    how = {} if family == "eagle3" else {"mask_id": 9}
    _, folder = publish(to, family=family, **how)
    file, draw, refused = folder / "config.json", random.Random(0), 0
    body = file.read_text()
    for _ in range(20):
        config = json.loads(body)
        mutated(config, draw)
        file.write_text(json.dumps(config))
        refused += is_refused(lambda: taken(folder, target, tmp_path / "package"))
        shutil.rmtree(tmp_path / "package", ignore_errors=True)
    assert refused > 5


def test_formats_are_told_apart_by_their_configuration() -> None:
    told = {
        "speculators": {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]},
        "flat-eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    }
    assert set(told) <= set(importers())
    for name, config in told.items():
        assert find_importer(config).name == name
    plain = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert find_importer({**plain, "draft_vocab_size": 32}).name == "flat-eagle3"
    other = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3"}
    assert find_importer(other).name == "flat-eagle3"  # which says that it reads Llama layers
    with pytest.raises(IncompatibleError, match=r"no format.*LlamaForCausalLM.*specctl bench"):
        find_importer(plain)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MiMoOtherModel"], "model_type": "mimo2", "num_nextn_predict_layers": 1},
        {"architectures": ["FlashMapModel"], "model_type": "flashmap"},
        {"architectures": ["LlamaForCausalLMEagle3", "LlamaForCausalLM"], "model_type": "llama"},
    ],
    ids=lambda config: config["architectures"][0],
)
def test_what_is_not_imported_is_no_format(config: Config) -> None:
    with pytest.raises(IncompatibleError, match="no format"):
        find_importer(config, {"model.mtp_layers.0.input_proj.weight", "fc.weight"})


@pytest.mark.parametrize("kind", ["mtp", "eagle", "jetspec"])
def test_other_kinds_of_the_speculators_format_are_named(
    kind: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish("speculators", saying(speculators_model_type=kind))
    told = rf"only some kinds.*{kind}.*eagle3, dflash, dflash2, dspark, peagle, xpress"
    with pytest.raises(IncompatibleError, match=told):
        taken(folder, target, tmp_path / "package")


def test_a_vocabulary_without_the_end_of_text_and_another_target_are_told(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    _, folder = publish("speculators", kept=KEPT)
    other = replace(target, name="some/copy", eos_ids=(1, 2))
    verifier, end = taken(folder, other, tmp_path / "package").notes
    assert "some/target as its target" in verifier
    assert "[1]" in end
    load_drafter(tmp_path / "package", other, allow=("eos",))
