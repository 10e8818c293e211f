"""Import: what another toolkit published becomes a package that drafts what its engine drafts, or
nothing is written and the reason is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import KEPT, Change, exported, shaken, without
from safetensors.torch import load_file, save_file

from specctl.drafters import families
from specctl.drafters.parts.base import Drafter
from specctl.drafters.parts.batch import TrainBatch
from specctl.drafters.parts.lm import Masks
from specctl.drafters.parts.masks import document_mask
from specctl.drafters.parts.vocab import VocabMap
from specctl.export.check import check_package
from specctl.export.folder import load_drafter
from specctl.export.formats import export
from specctl.export.imports import Report, find_importer, import_published, importers
from specctl.export.manifest import CARD, MANIFEST, WEIGHTS, read_manifest
from specctl.recipes.errors import FileError, GateError, IncompatibleError, SpecctlError
from specctl.runtime.target import Target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
COMMAND = ["specctl", "import"]
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    """Of eight layers: the engines' default layers are three different ones, [2, 4, 5]."""
    made: Target = make_target(num_layers=8, hidden=16, vocab=48, pad_token_id=9)
    return replace(made, name="some/target", eos_ids=(2,))


@pytest.fixture
def publish(target: Target, tmp_path: Path) -> Callable[..., tuple[Drafter, Path]]:
    """publish(to, change, **options): a random head, and a folder as another toolkit leaves it."""

    def make(to: str, change: Change | None = None, **options: Any) -> tuple[Drafter, Path]:
        drafter, out = shaken("eagle3", target, **options), tmp_path / "published"
        exported(drafter, target, out, to)
        for name in (MANIFEST, CARD):
            (out / name).unlink()
        config = json.loads((out / "config.json").read_text())
        tensors = load_file(out / WEIGHTS)
        if change is not None:
            change(config, tensors)
            (out / "config.json").write_text(json.dumps(config))
            save_file({n: t.contiguous() for n, t in tensors.items()}, out / WEIGHTS)
        return drafter, out

    return make


def taken(folder: Path, target: Target, out: Path) -> Report:
    return import_published(folder, target, out, command=COMMAND)


def same_tensors(ours: Drafter, theirs: Drafter) -> bool:
    ours_T, theirs_T = ours.tensors(), theirs.tensors()
    return ours_T.keys() == theirs_T.keys() and all(
        torch.equal(ours_T[name], theirs_T[name]) for name in ours_T
    )


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("speculators", {}),
        ("speculators", {"kept": KEPT, "norm_before_residual": True, "rope_theta": 500.0}),
        ("speculators", {"qk_norm": True, "heads": 2, "kv_heads": 1, "intermediate": 24}),
        ("speculators", {"fc_norm": True, "norm_output": True, "taps": (1, 3, 6, 7)}),
        ("speculators", {"taps": (5,)}),
        ("speculators", {"kept": KEPT, "dtype": torch.bfloat16}),
        ("sglang", {}),
        ("sglang", {"kept": KEPT, "taps": (1, 3, 7), "rope_theta": 500.0}),
        ("sglang", {"fc_norm": True, "norm_output": True, "taps": (4, 6), "head_dim": 8}),
        ("sglang", {"kept": KEPT, "dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_an_export_comes_back_with_the_same_weights_and_drafts(
    to: str, options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(to, **options)
    report = taken(folder, target, tmp_path / "package")
    manifest = report.manifest
    assert manifest.acceptance is None
    assert manifest.dtype == str(options.get("dtype", torch.float32)).removeprefix("torch.")
    assert report.notes == ()
    found = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.needs() == drafter.needs()
    prompts = [[1, 5, 9, 5, 9, 5], [7, 7, 3]]
    checked = check_package(
        tmp_path / "package", target, reference=drafter, prompts=prompts, new_tokens=12
    )
    assert checked.loaded == checked.before


def trained(target: Target, steps: int) -> Drafter:
    """A head that knows one text by heart."""
    family = families()["eagle3"]
    vocab = VocabMap(torch.tensor(KEPT), target.spec.vocab_size)
    drafter = family.build(family.options(ttt_steps=2), target.spec, vocab)
    drafter.bind(target.borrowed())
    ids_1S = torch.tensor([[*KEPT, *KEPT]])
    document_1S, position_1S = torch.zeros_like(ids_1S), torch.arange(ids_1S.shape[1])[None]
    masks, taps = Masks(document_mask(document_1S)), drafter.needs().taps
    with torch.no_grad():
        seen = target.lm.dense(ids_1S, position_1S, masks, taps, logits=True)
    batch = TrainBatch(
        ids_1S, ids_1S >= 0, document_1S, position_1S, dict(seen.taps), seen.logits_BTV
    )
    optimizer, losses = torch.optim.Adam(drafter.trainable().values(), lr=3e-3), []
    for _ in range(steps):
        out = drafter.loss(batch)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
        losses.append(float((out.sum / out.count).detach()))
    assert losses[-1] < losses[0]
    return drafter


@pytest.mark.parametrize("to", ["speculators", "sglang"])
def test_a_trained_head_comes_back(to: str, target: Target, tmp_path: Path) -> None:
    drafter = trained(target, 10)
    exported(drafter, target, tmp_path / to, to)
    taken(tmp_path / to, target, tmp_path / "package")
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)
    again = export(tmp_path / "package", to, tmp_path / "again", target)
    assert again.files[WEIGHTS] == read_manifest(tmp_path / to).files[WEIGHTS]


# -- other toolkits' spellings -------------------------------------------------------------------


def safe_ai_lab(config: Config, tensors: Tensors) -> None:
    """The names of the first EAGLE-3 heads, and the few keys they have."""
    config["architectures"] = ["LlamaForCausalLM"]
    for key in ("eagle_config", LAYERS, "norm_before_residual", "norm_output", "fc_norm"):
        del config[key]
    for key in ("norm_before_fc", "num_aux_hidden_states", "rope_parameters", "rope_scaling"):
        del config[key]
    for name in list(tensors):
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def modelopt(config: Config, tensors: Tensors) -> None:
    """Only the list inside eagle_config, no mask of the vocabulary, code beside it."""
    del config[LAYERS], tensors["t2d"]
    config["auto_map"] = {"AutoModel": "modeling.Evil"}


def top_list_alone(config: Config, tensors: Tensors) -> None:
    del config["eagle_config"]


def no_theta(config: Config, tensors: Tensors) -> None:
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        del config[key]


def whole_tables(config: Config, tensors: Tensors) -> None:
    """Tables of a vocabulary that is not trimmed."""
    tensors["d2t"] = torch.zeros(48, dtype=torch.long)
    tensors["t2d"] = torch.ones(48, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "options", "engine"),
    [
        (safe_ai_lab, {"kept": KEPT}, "SGLang"),
        (modelopt, {"kept": KEPT, "taps": (1, 3, 7)}, "SGLang"),
        (top_list_alone, {"taps": (1, 3, 7)}, "vLLM"),
        (no_theta, {"rope_theta": 10000.0}, "SGLang"),
        (whole_tables, {}, "SGLang"),
    ],
)
def test_flat_folders_of_other_toolkits_are_read_as_their_engines_do(
    change: Change,
    options: dict[str, Any],
    engine: str,
    target: Target,
    publish: Any,
    tmp_path: Path,
) -> None:
    drafter, folder = publish("sglang", change, **options)
    (folder / "modeling.py").write_text("raise SystemExit\n")
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.engine.split()[0]) == ("flat-eagle3", engine)
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter)
    assert found.options.taps == options.get("taps", (2, 4, 5))
    assert found.module.shape.rope_theta == options.get("rope_theta", target.spec.rope_theta)


@pytest.mark.parametrize(("to", "meant"), [("speculators", True), ("sglang", False)])
def test_a_missing_norm_before_residual_is_what_the_engine_of_the_format_takes_it_for(
    to: str, meant: bool, target: Target, publish: Any, tmp_path: Path
) -> None:
    def silent(config: Config, tensors: Tensors) -> None:
        del config["norm_before_residual"]

    _, folder = publish(to, silent)
    taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.options.norm_before_residual is meant


def test_a_flat_head_with_a_normed_residual_is_proved_by_vllm(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    def normed(config: Config, tensors: Tensors) -> None:
        config["norm_before_residual"] = True

    _, folder = publish("sglang", normed)
    assert taken(folder, target, tmp_path / "package").engine.startswith("vLLM")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}


def old_rope(config: Config, tensors: Tensors) -> None:
    part = config.get("transformer_layer_config", config)
    del part["rope_parameters"]
    part["rope_scaling"] = {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}


def other_factor(config: Config, tensors: Tensors) -> None:
    part = config.get("transformer_layer_config", config)
    part["rope_parameters"] = {**LLAMA3, "factor": 4.0}
    part.pop("rope_scaling", None)


@pytest.mark.parametrize("to", ["speculators", "sglang"])
def test_positions_scaled_as_the_targets_are_taken_over_and_others_refused(
    to: str, make_target: Any, tmp_path: Path
) -> None:
    made: Target = make_target(num_layers=8, hidden=16, vocab=48, rope_parameters=LLAMA3)
    made = replace(made, name="some/target")
    drafter = shaken("eagle3", made, scaled_rope=True)
    for at, change in enumerate((None, old_rope, other_factor)):
        out, package = tmp_path / f"head{at}", tmp_path / f"package{at}"
        exported(drafter, made, out, to)
        if change is not None:
            config = json.loads((out / "config.json").read_text())
            change(config, {})
            (out / "config.json").write_text(json.dumps(config))
        (out / MANIFEST).unlink()
        if change is other_factor:
            with pytest.raises(IncompatibleError, match=r"factor 4.0.*just as the target's"):
                taken(out, made, package)
            continue
        taken(out, made, package)
        found: Any = load_drafter(package, made)
        assert found.options.scaled_rope
        assert found.module.shape == drafter.module.shape  # type: ignore[union-attr]


def test_a_drafter_that_forgot_the_scaling_is_caught(
    make_target: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from specctl.export.imports import eagle3

    made: Target = make_target(num_layers=8, hidden=16, vocab=48, rope_parameters=LLAMA3)
    made, right = replace(made, name="some/target"), eagle3._options
    exported(shaken("eagle3", made, scaled_rope=True), made, tmp_path / "head", "sglang")
    monkeypatch.setattr(eagle3, "_options", lambda *w: replace(right(*w), scaled_rope=False))
    with pytest.raises(GateError, match="differ by"):
        taken(tmp_path / "head", made, tmp_path / "package")


# -- mistakes ------------------------------------------------------------------------------------


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
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


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
    ("activation", BOTH, layer_says(hidden_act="gelu"), r"hidden_act: gelu"),
    ("heads", BOTH, layer_says(num_attention_heads="4"), r"num_attention_heads.*4"),
    ("model type", ("sglang",), layer_says(model_type="gemma2"), r"model_type: gemma2.*llama"),
    ("tied", ("sglang",), layer_says(tie_word_embeddings=True), r"tied embeddings"),
    ("no rows told", ("sglang",), layer_says(draft_vocab_size=None), r"no draft_vocab_size"),
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
    with pytest.raises(SpecctlError, match=r"run code.*pytorch_model.bin.*delete it"):
        taken(folder, target, tmp_path / "package")
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
    with pytest.raises(IncompatibleError, match=r"no format.*LlamaForCausalLM.*specctl bench"):
        find_importer(plain)


def test_other_kinds_of_the_speculators_format_are_named(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    def dflash(config: Config, tensors: Tensors) -> None:
        config["speculators_model_type"] = "dflash"

    _, folder = publish("speculators", dflash)
    with pytest.raises(IncompatibleError, match=r"only eagle3.*dflash"):
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


# -- the command ---------------------------------------------------------------------------------


def test_the_command_imports_and_says_what_is_next(
    tiny_target: Target, tmp_path: Path, capfd: Any
) -> None:
    from specctl.cli.main import main

    folder, out = tmp_path / "head", tmp_path / "package"
    exported(shaken("eagle3", tiny_target), tiny_target, folder, "speculators")
    assert main(["import", str(folder), "--target", "tiny", "--out", str(out), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["result"]["format"] == "speculators"
    assert answer["next"] == [
        f"specctl bench --target tiny --draft {out}",
        f"specctl verify {out} --target tiny --level lossless",
    ]
    assert main(["verify", str(out), "--target", "tiny", "--level", "files", "--json"]) == 0


def test_a_hub_id_is_answered_with_how_to_download_it(tmp_path: Path, capfd: Any) -> None:
    from specctl.cli.main import main

    words = ["import", "some/head", "--target", "tiny", "--out", str(tmp_path / "o"), "--json"]
    assert main(words) == 4
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["do"] == "hf download some/head --local-dir head"
