"""The speculators format: vLLM drafts from it what our drafter drafts, or nothing is written."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats import find_format
from specctl.export.layouts.speculators.p_eagle import mask_token
from specctl.export.readers.vllm_eagle3 import draft_config
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.spare_token import spare_token
from specctl_testing.export.engine_cases import KEPT, Change, exported, faulty, packaged, shaken

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
P_EAGLE = {"num_heads": 4, "layers": 2}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made: Target = make_target(num_layers=4, hidden=16, vocab=48, pad_token_id=9)
    return replace(made, name="some/target", eos_ids=(2,))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"kept": KEPT}),
        ("eagle3", {"kept": tuple(range(48))}),
        ("eagle3", {"fc_norm": True, "norm_output": True, "taps": (3, 1, 2)}),
        ("eagle3", {"qk_norm": True, "heads": 2, "kv_heads": 1, "intermediate": 24}),
        ("eagle3", {"qk_norm": True, "taps": (0, 2)}),
        ("eagle3", {"taps": (2,), "head_dim": 8}),
        ("eagle3", {"kept": KEPT, "head_groups": 4, "head_top": 1}),
        ("eagle3", {"dtype": torch.bfloat16}),
        ("eagle3", {"norm_before_residual": True, "rope_theta": 500.0}),
        ("eagle3", {"window": 5}),
        ("eagle3", {"window": 6, "qk_norm": True, "kept": KEPT}),
        ("p-eagle", P_EAGLE),
        ("p-eagle", {**P_EAGLE, "kept": KEPT, "taps": (3, 2), "dtype": torch.bfloat16}),
        ("p-eagle", {"num_heads": 2, "layers": 1}),
    ],
    ids=str,
)
def test_vllm_drafts_from_it_what_the_drafter_drafts(
    family: str, options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    exported(shaken(family, target, **options), target, tmp_path / "out", "speculators")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    floats = {t.dtype for t in tensors.values() if t.is_floating_point()}
    assert floats == {options.get("dtype", torch.float32)}
    assert config["speculators_model_type"] == family.replace("-", "")
    assert not [name for name in tensors if name.startswith("router")]
    assert ("d2t" in tensors) == (options.get("kept") == KEPT)


@pytest.mark.parametrize("to", ["speculators", "specctl"])
def test_a_target_in_another_dtype_does_not_round_the_weights(
    to: str, make_target: Any, tmp_path: Path
) -> None:
    made = make_target(num_layers=4, hidden=16, vocab=48, dtype=torch.bfloat16)
    drafter = shaken("eagle3", made)
    exported(drafter, replace(made, name="some/target"), tmp_path / "out", to)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in drafter.tensors().items():
        assert torch.equal(written[name], tensor), name


def test_the_files_are_those_of_the_format(target: Target, tmp_path: Path) -> None:
    exported(shaken("eagle3", target, KEPT, fc_norm=True), target, tmp_path / "e", "speculators")
    exported(shaken("p-eagle", target, KEPT, **P_EAGLE), target, tmp_path / "p", "speculators")
    layer = [f"mlp.{part}_proj.weight" for part in ("down", "gate", "up")]
    layer += [f"self_attn.{part}_proj.weight" for part in "kqvo"]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    first = {f"layers.0.{name}" for name in (*layer, "hidden_norm.weight")}
    common = first | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    common.add("embed_tokens.weight")
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(load_file(tmp_path / "e" / "model.safetensors")) == common | norms
    second = {f"layers.1.{name}" for name in layer} | {"mask_hidden"}
    assert set(load_file(tmp_path / "p" / "model.safetensors")) == common | second
    body = json.loads((tmp_path / "p" / "config.json").read_text())
    assert body["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert body["mask_token_id"] == 9
    assert body["draft_vocab_size"] == len(KEPT)
    assert body["transformer_layer_config"]["vocab_size"] == 48
    assert body["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert body["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


# -- silent bugs ---------------------------------------------------------------------------------


def swapped_halves(config: Config, tensors: Tensors) -> None:
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def layer_ids_one_off(config: Config, tensors: Tensors) -> None:
    ids = config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_aux_hidden_state_layer_ids"] = [index - 1 for index in ids]


def no_layer_ids(config: Config, tensors: Tensors) -> None:
    del config["eagle_aux_hidden_state_layer_ids"]


def no_norm_before_residual(config: Config, tensors: Tensors) -> None:
    del config["norm_before_residual"]


def absolute_d2t(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = torch.tensor(KEPT)


def other_t2d(config: Config, tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def no_tables(config: Config, tensors: Tensors) -> None:
    del tensors["d2t"], tensors["t2d"]


def prefixed(config: Config, tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def no_draft_vocab_size(config: Config, tensors: Tensors) -> None:
    del config["draft_vocab_size"]


def other_theta(config: Config, tensors: Tensors) -> None:
    layer = config["transformer_layer_config"]
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"] = 500.0


def scaled_positions(config: Config, tensors: Tensors) -> None:
    config["transformer_layer_config"]["rope_parameters"]["rope_type"] = "linear"


def other_eps(config: Config, tensors: Tensors) -> None:
    config["transformer_layer_config"]["rms_norm_eps"] = 0.1


def swapped_features(config: Config, tensors: Tensors) -> None:
    blocks = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([blocks[1], blocks[0], blocks[2]], dim=1)


def swapped_rows(config: Config, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)


def other_embedding(config: Config, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = torch.randn(48, 16)


def no_norm_output(config: Config, tensors: Tensors) -> None:
    del config["norm_output"]


def no_fc_norm(config: Config, tensors: Tensors) -> None:
    del config["fc_norm"]


def no_feature_count(config: Config, tensors: Tensors) -> None:
    del config["transformer_layer_config"]["num_aux_hidden_states"]


def as_llama(config: Config, tensors: Tensors) -> None:
    config["transformer_layer_config"]["model_type"] = "llama"


def no_verifier(config: Config, tensors: Tensors) -> None:
    del config["speculators_config"]["verifier"]


def no_mask_features(config: Config, tensors: Tensors) -> None:
    del tensors["mask_hidden"]


def other_mask_token(config: Config, tensors: Tensors) -> None:
    config["mask_token_id"] = 1


def no_mask_token(config: Config, tensors: Tensors) -> None:
    del config["mask_token_id"]


def shared_embedding(config: Config, tensors: Tensors) -> None:
    del tensors["embed_tokens.weight"]


def normed_residual(config: Config, tensors: Tensors) -> None:
    config["norm_before_residual"] = True


def swapped_mask_features(config: Config, tensors: Tensors) -> None:
    tensors["mask_hidden"] = tensors["mask_hidden"].flip(-1)


def other_kind(config: Config, tensors: Tensors) -> None:
    config["speculators_model_type"] = "eagle3"


MORE = {"fc_norm": True, "norm_output": True}
WINDOW = {"window": 6}


def narrower_window(config: Config, tensors: Tensors) -> None:
    config["transformer_layer_config"]["sliding_window"] -= 1


def window_of_no_layer(config: Config, tensors: Tensors) -> None:
    del config["transformer_layer_config"]["layer_types"]


FAULTS: list[tuple[str, dict[str, Any], Change]] = [
    ("eagle3", {}, swapped_halves),
    ("eagle3", {}, layer_ids_one_off),
    ("eagle3", {"taps": (0, 1, 3)}, no_layer_ids),
    ("eagle3", {}, no_norm_before_residual),
    ("eagle3", {"kept": KEPT}, absolute_d2t),
    ("eagle3", {"kept": KEPT}, other_t2d),
    ("eagle3", {"kept": KEPT}, no_tables),
    ("eagle3", {"kept": KEPT}, no_draft_vocab_size),
    ("eagle3", {"kept": KEPT}, swapped_rows),
    ("eagle3", {}, prefixed),
    ("eagle3", {}, other_theta),
    ("eagle3", {}, scaled_positions),
    ("eagle3", {}, other_eps),
    ("eagle3", {"taps": (3, 1, 2)}, swapped_features),
    ("eagle3", {}, other_embedding),
    ("eagle3", MORE, no_norm_output),
    ("eagle3", MORE, no_fc_norm),
    ("eagle3", {"taps": (1, 2)}, no_feature_count),
    ("eagle3", {"qk_norm": True}, as_llama),
    ("eagle3", {}, no_verifier),
    ("eagle3", WINDOW, narrower_window),
    ("eagle3", {"window": 512}, narrower_window),
    ("eagle3", WINDOW, window_of_no_layer),
    ("p-eagle", P_EAGLE, swapped_halves),
    ("p-eagle", P_EAGLE, layer_ids_one_off),
    ("p-eagle", P_EAGLE, no_mask_features),
    ("p-eagle", P_EAGLE, swapped_mask_features),
    ("p-eagle", P_EAGLE, other_mask_token),
    ("p-eagle", P_EAGLE, no_mask_token),
    ("p-eagle", P_EAGLE, shared_embedding),
    ("p-eagle", P_EAGLE, normed_residual),
    ("p-eagle", P_EAGLE, other_kind),
]


@pytest.mark.parametrize(
    ("family", "options", "change"), FAULTS, ids=[f"{f}-{c.__name__}" for f, _, c in FAULTS]
)
def test_a_folder_with_a_silent_bug_is_not_left_behind(
    family: str,
    options: dict[str, Any],
    change: Change,
    target: Target,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    faulty(monkeypatch, "speculators", change)
    with pytest.raises(GateError, match="an engine would not compute"):
        exported(shaken(family, target, **options), target, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


def test_what_a_missing_key_means_differs_by_algorithm() -> None:
    body = {
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}, {"speculative_tokens": 7}],
            "verifier": {"name_or_path": None},
        },
        "transformer_layer_config": {"num_attention_heads": 4, "norm_output": True},
        "mask_token_id": 5,
        "norm_output": True,
    }
    eagle3 = draft_config({**body, "speculators_model_type": "eagle3"})
    peagle = draft_config({**body, "speculators_model_type": "peagle", "fc_norm": True})
    assert (eagle3.norm_before_residual, peagle.norm_before_residual) == (True, False)
    assert (eagle3.length, peagle.pard_token, peagle.fc_norm) == (3, 5, False)
    assert eagle3.rope_parameters == {"rope_theta": 10000.0}
    with pytest.raises(GateError, match="eagle3 or peagle"):
        draft_config({**body, "speculators_model_type": "eagle"})


# -- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle3", "p-eagle"])
def test_a_target_that_scales_its_embeddings_gets_the_scaled_rows(
    family: str, make_target: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    made = make_target("gemma2", 4, 16, 48, pad_token_id=9, rms_norm_eps=1e-2)
    gemma = replace(made, name="some/gemma")  # behind a norm, only its epsilon tells the scale
    assert gemma.spec.embed_scale == 4.0
    drafter = shaken(family, gemma)
    exported(drafter, gemma, tmp_path / "out", "speculators")
    rows_VD = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    bare_VD = gemma.borrowed().embedding_VD
    others = torch.arange(48) != 9
    assert torch.allclose(rows_VD[others], 4 * bare_VD[others])

    def unscaled(config: Config, tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = torch.where(others[:, None], bare_VD, rows_VD)

    faulty(monkeypatch, "speculators", unscaled)
    with pytest.raises(GateError, match="differ by"):
        exported(drafter, gemma, tmp_path / "wrong", "speculators")


def test_a_tap_that_no_engine_hands_out_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"distinct taps from 0 to 3.*drafter.options.taps"):
        exported(shaken("eagle3", target, taps=(1, 2, 4)), target, tmp_path / "o", "speculators")
    assert not (tmp_path / "o").exists()


def test_without_a_spare_token_a_masked_place_cannot_be_written(
    plain_target: Target, tmp_path: Path
) -> None:
    drafter = shaken("p-eagle", plain_target, **P_EAGLE)
    with pytest.raises(IncompatibleError, match=r"no token can stand.*--to specctl"):
        exported(drafter, plain_target, tmp_path / "o", "speculators")


def test_the_mask_token_is_one_that_no_text_contains(
    target: Target, word_tokenizer: Any, make_target: Any
) -> None:
    from specctl.export.formats import ExportSource

    class Words:
        def __init__(self, *words: str) -> None:
            self.ids = {**{word: 5 + i for i, word in enumerate(words)}, "x": 47}

        def get_vocab(self) -> dict[str, int]:
            return self.ids

    class Named:
        def __init__(self, spec: Any) -> None:
            self.model_spec = spec

    def chosen(tokenizer: Any, spec: Any, eos: tuple[int, ...] = (2,)) -> int:
        made = replace(target, tokenizer=tokenizer, eos_ids=eos)
        return mask_token(ExportSource(Path(), Named(spec), None, made))  # type: ignore[arg-type]

    larger = replace(target.spec, vocab_size=64)
    assert chosen(word_tokenizer, larger) == 63  # a row without a token
    llama3 = Words("<|eot_id|>", "<|reserved_special_token_7|>", "unused7", "[x]", "reserved")
    assert chosen(llama3, target.spec) == 6
    assert [chosen(Words(word), target.spec) for word in ("<unused9>", "[control_4]")] == [5, 5]
    assert chosen(Words(), target.spec) == 9  # padding
    with pytest.raises(IncompatibleError):
        chosen(Words(), target.spec, eos=(2, 9))
    with pytest.raises(IncompatibleError):
        chosen(word_tokenizer, target.spec)  # whose token 9 is a word


def test_a_spare_token_is_no_row_outside_and_nothing_that_texts_have(target: Target) -> None:
    """Of 48 ids; as configurations and tokenizers are found."""
    spec = replace(target.spec, vocab_size=48, pad_id=None)

    def chosen(words: dict[str, int], spec: Any = spec, template: str = "") -> int | None:
        special = {i: SimpleNamespace(content=w, special=w[0] in "<[") for w, i in words.items()}
        tokenizer = SimpleNamespace(
            get_vocab=lambda: {"x": 47, **words}, added_tokens_decoder=special, pad_token_id=None,
            chat_template=template,
        )  # fmt: skip
        return spare_token(tokenizer, spec, (2,))

    assert chosen({"<unused3>": 7, "<image>": 48}) == 7  # Gemma 3: an id more than rows
    assert chosen({"<image>": 48}) is None
    assert chosen({"<|reserved_1|>": 5, "<|reserved_2|>": 2}) == 5  # the other ends a text
    assert chosen({"<|reserved_1|>": 5, "<|reserved_2|>": 6}, template="<|reserved_2|>{{x}}") == 5
    assert chosen({}, replace(spec, pad_id=-1)) is None  # Llama 2
    assert chosen({"!": 0}, replace(spec, pad_id=0)) is None  # an ordinary word
    assert chosen({"<pad>": 0}, replace(spec, pad_id=0)) == 0
    assert chosen({"<|user|>": 9, "<empty>": 8}, template="{{'<|' + m.role + '|>'}}") == 8


# -- commands ------------------------------------------------------------------------------------


def test_the_commands_name_the_method_and_the_folder(target: Target, tmp_path: Path) -> None:
    alone, named = exported(
        shaken("p-eagle", target, **P_EAGLE), target, tmp_path / "p", "speculators"
    ).served_by
    assert alone == "vllm serve THIS_FOLDER"
    words = shlex.split(named)
    assert words[:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": "THIS_FOLDER",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    card = (tmp_path / "p" / "README.md").read_text()
    assert f"    {alone}\n    {named}\n" in card
    assert "Not measured" in card


def test_a_target_without_a_repository_is_named_on_the_command_line_only(
    target: Target, tmp_path: Path
) -> None:
    local = replace(target, name=str(tmp_path / "models" / "mine"))
    manifest = exported(shaken("eagle3", local), local, tmp_path / "e", "speculators")
    assert len(manifest.served_by) == 1
    assert "TARGET_FOLDER" in manifest.served_by[0]
    body = json.loads((tmp_path / "e" / "config.json").read_text())
    assert body["speculators_config"]["verifier"]["name_or_path"] is None
    for name in ("config.json", "README.md"):
        assert str(tmp_path) not in (tmp_path / "e" / name).read_text(), name


def test_the_command_line_prints_how_it_is_served(
    tiny_target: Target, tmp_path: Path, capfd: Any
) -> None:
    from specctl.cli.main import main

    package = packaged(shaken("eagle3", tiny_target), tiny_target, tmp_path / "package")
    out = tmp_path / "tiny-eagle3"
    words = ["export", "--draft", str(package), "--to", "speculators", "--out", str(out), "--json"]
    assert main(words) == 0
    answer = json.loads(capfd.readouterr().out)
    (command,) = answer["result"]["serve"]
    assert command in answer["next"]
    how = shlex.split(command)
    assert (Path(how[2]) / "config.json").is_file()  # the embedded target's own folder
    assert json.loads(how[4])["model"] == str(out)


def test_other_families_are_sent_to_formats_that_hold_them() -> None:
    with pytest.raises(IncompatibleError, match=r"cannot hold .*small-lm.*formats that fit: .*hf"):
        find_format("speculators", "small-lm")
