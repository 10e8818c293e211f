"""Targets with LoRA adapters: peft's own numbers, one identity, and folders that are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    RecipeError,
    SpecctlError,
)
from specctl.drafters import families
from specctl.export.package.card import render_card
from specctl.export.package.compat import mismatches
from specctl.export.package.folder import load_drafter, save_package
from specctl.export.package.manifest import read_manifest
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.recipes.load import load_recipe
from specctl.runtime.target import target as targets
from specctl.runtime.target.checkpoint import Loaded
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS, read_adapters

peft = pytest.importorskip("peft")
from specctl_testing.runtime.lora import write_adapter  # noqa: E402

VOCAB = 48
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def build(make_model: Any, kind: str = "llama", **fields: Any) -> Any:
    """Its attention written out: sdpa leaves Gemma's soft caps out in older transformers."""
    model = make_model(kind, num_layers=2, vocab=VOCAB, **fields)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Target]:
    """load(model, adapters...): the target that `load_target` makes of a model in memory."""

    def load_(model: Any, *adapters: object, **fields: Any) -> Target:
        loaded = Loaded(model, None, None, None)
        monkeypatch.setattr(targets, "load_checkpoint", lambda *_: loaded)
        return targets.load_target("tiny", adapters=[str(one) for one in adapters], **fields)

    return load_


def logits(target: Target) -> Tensor:
    B, S = IDS.shape
    masks = target.lm.document_masks(torch.zeros_like(IDS))
    out = target.lm.dense(IDS, torch.arange(S).expand(B, S), masks).logits_BTV
    assert out is not None
    return out


def save(target: Target, folder: Path) -> None:
    kept: dict[str, Any] = {"serve": {}, "recipe_digest": "", "acceptance": None, "command": []}
    torch.manual_seed(3)
    family = families()["small-lm"]
    save_package(family.build(family.options(), target.spec, None), target, folder, **kept)


SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_target_with_an_adapter_says_what_peft_says(
    make_model: Any, load: Any, tmp_path: Path, kind: str, special: str
) -> None:
    """Llama through the fast forward, merged; Gemma 2 through transformers, not merged."""
    wrapped = write_adapter(build(make_model, kind), tmp_path / "one", **SPECIAL[special])
    with torch.no_grad():
        unmerged = wrapped(IDS).logits
        merged = wrapped.merge_and_unload()(IDS).logits
    target = load(build(make_model, kind), tmp_path / "one")
    assert isinstance(target.lm, FastLlama if kind == "llama" else HfLM)
    names = {name for name, _ in target.lm.module.named_parameters()}
    assert any("lora_A" in name for name in names) == (kind == "gemma2")
    for theirs in (unmerged, merged):
        torch.testing.assert_close(logits(target), theirs, atol=1e-5, rtol=1e-5)
    assert (logits(target) - logits(load(build(make_model, kind)))).abs().max() > 0.01


def test_weights_that_are_stored_the_other_way_round_get_their_adapter(
    make_model: Any, load: Any, tmp_path: Path
) -> None:
    """GPT-2 keeps [I, O] in a module of its own, Conv1D."""
    wrapped = write_adapter(
        build(make_model, "gpt2"), tmp_path / "one", target_modules=["c_fc"], fan_in_fan_out=True
    )
    with torch.no_grad():
        wanted = wrapped(IDS).logits
    target = load(build(make_model, "gpt2"), tmp_path / "one")
    torch.testing.assert_close(logits(target), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_several_adapters_are_added_with_their_weights(
    make_model: Any, load: Any, tmp_path: Path, kind: str
) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(build(make_model, kind), tmp_path / name, seed)
    expected = build(make_model, kind)
    with torch.no_grad():
        for name, weight in (("one", 1.0), ("two", 0.5)):
            tensors = load_file(tmp_path / name / TENSORS)
            for key in [key for key in tensors if "lora_A" in key]:
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                product = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
                expected.get_submodule(module).weight += weight * 2.0 * product  # alpha / r = 2
        wanted = expected(IDS).logits
    target = load(build(make_model, kind), tmp_path / "one", f"{tmp_path / 'two'}@0.5")
    torch.testing.assert_close(logits(target), wanted, atol=1e-5, rtol=1e-5)
    assert [one.weight for one in target.adapters] == [1.0, 0.5]


def test_the_fingerprint_covers_base_adapter_weight_and_order_and_no_dtype(
    make_model: Any, load: Any, tmp_path: Path
) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(build(make_model), tmp_path / name, seed)
    one, two = tmp_path / "one", tmp_path / "two"
    kinds = [(), (one,), (two,), (f"{one}@0.5",), (one, two), (two, one)]
    prints = [load(build(make_model), *words).fingerprint for words in kinds]
    prints += [load(build(make_model, seed=1), one).fingerprint]
    assert len({*prints}) == len(prints)
    assert prints[0] == load(build(make_model), one).base_fingerprint
    half = load(build(make_model).bfloat16(), one)
    again = load(build(make_model).bfloat16().float(), one)
    assert half.fingerprint == again.fingerprint


def test_a_package_is_bound_to_base_and_adapter(make_model: Any, load: Any, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(build(make_model), tmp_path / name, seed)
    target = load(build(make_model), tmp_path / "one")
    save(target, tmp_path / "package")
    manifest = read_manifest(tmp_path / "package")
    assert manifest.target.adapter_words() == [str(tmp_path / "one")]
    assert not mismatches(manifest, target)
    assert load_drafter(tmp_path / "package", target).family == "small-lm"
    for words in ((), (tmp_path / "two",), (f"{tmp_path / 'one'}@2",)):
        (found,) = mismatches(manifest, load(build(make_model), *words))
        assert (found.field, found.allow) == ("adapter", "adapter")
        assert str(tmp_path / "one") in found.expected
    (found,) = mismatches(manifest, load(build(make_model, seed=1), tmp_path / "one"))
    assert found.field == "target"
    card = render_card(manifest)
    assert "--adapter one" in card
    assert str(tmp_path) not in card
    plain = replace(target, adapters=(), fingerprint=str(target.base_fingerprint))
    save(plain, tmp_path / "plain")
    assert "adapters" not in (tmp_path / "plain" / "manifest.json").read_text()
    (found,) = mismatches(read_manifest(tmp_path / "plain"), target)
    assert (found.field, found.expected) == ("adapter", "none")


CONFIGS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "biases": {"bias": "all"},
    "saved modules": {"modules_to_save": ["lm_head"]},
    "another method": {"peft_type": "IA3"},
    "a changed base": {"init_lora_weights": "pissa"},
    "a rank of no size": {"r": 0},
    "a huge rank": {"r": 10**9},
    "another rank": {"r": 3},
    "no number": {"lora_alpha": "8"},
    "infinite": {"lora_alpha": float("inf")},
    "an endless pattern": {"alpha_pattern": {"(a+)+$": 4}},
    "a layer twice": {"layer_replication": [[0, 2]]},
    "code": {"megatron_config": {"auto_map": "x--y.z"}},
    "unheard of": {"new_setting": 1},
}


@pytest.fixture(scope="module")
def good(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "adapter"
    write_adapter(build(make_model), folder)
    return folder


def copied(good: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in (CONFIG, TENSORS):
        (folder / name).write_bytes((good / name).read_bytes())
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_beyond_plain_lora_are_refused(good: Path, tmp_path: Path, name: str) -> None:
    folder = copied(good, tmp_path / "bad")
    body = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(body | CONFIGS[name]))
    with pytest.raises((IncompatibleError, IntegrityError)):
        read_adapters([str(folder)])
    assert read_adapters([str(good)])[0].ranks


def test_pickles_links_and_damage_are_refused(good: Path, tmp_path: Path) -> None:
    def refused(name: str, kind: type[SpecctlError], change: Callable[[Path], object]) -> None:
        folder = copied(good, tmp_path / name)
        change(folder)
        with pytest.raises(kind):
            read_adapters([str(folder)])

    def linked(folder: Path) -> None:
        (folder / TENSORS).unlink()
        (folder / TENSORS).symlink_to(good / TENSORS)

    def pipe(folder: Path) -> None:
        (folder / CONFIG).unlink()
        os.mkfifo(folder / CONFIG)

    def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
        def change_(folder: Path) -> None:
            found = load_file(folder / TENSORS)
            change(found)
            save_file(found, folder / TENSORS)

        return change_

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refused("pickle", IntegrityError, lambda f: (f / TENSORS).rename(f / "adapter_model.bin"))
    refused("link", IntegrityError, linked)
    refused("pipe", IntegrityError, pipe)
    refused("none", FileError, lambda f: (f / TENSORS).unlink())
    refused("unset", FileError, lambda f: (f / CONFIG).unlink())
    refused("list", IntegrityError, lambda f: (f / CONFIG).write_text("[]"))
    refused("empty", IntegrityError, lambda f: (f / CONFIG).write_text("{}"))
    refused("cut", IntegrityError, lambda f: os.truncate(f / TENSORS, 100))
    refused("half", IntegrityError, tensors(lambda t: t.pop(key)))
    refused("nothing", IntegrityError, tensors(lambda t: t.clear()))
    whole = torch.zeros(2, 2)
    refused("other", IncompatibleError, tensors(lambda t: t.update({"lm_head.weight": whole})))
    refused("numbers", IncompatibleError, tensors(lambda t: t.update({key: t[key].long()})))


def test_an_adapter_of_another_model_is_refused(
    make_model: Any, load: Any, good: Path, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match="another model"):
        load(build(make_model, hidden=16), good)
    with pytest.raises(IncompatibleError, match="another model"):
        load(make_model("llama", num_layers=1, vocab=VOCAB), good)


def test_a_server_of_the_target_knows_no_adapters_of_ours() -> None:
    sets = ["target.adapters=[./a]", "data.endpoint=http://localhost:1/v1"]
    with pytest.raises(RecipeError, match="which a server of the target does not"):
        load_recipe("distill", sets=sets)


@pytest.mark.parametrize("words", [["X", "X"], ["X@0"], ["X@1000"], ["X/none"], ["X"] * 17])
def test_words_that_name_no_adapters_are_refused(good: Path, words: list[str]) -> None:
    with pytest.raises(SpecctlError):
        read_adapters([word.replace("X", str(good)) for word in words])
