"""What a drafter's name means, and transformers folders as drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.api.measured.cost_cache import describe
from specctl.core.drafter import Drafter
from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    NetworkError,
    SpecctlError,
)
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.self_speculation import quantspec
from specctl.drafters.team import Team
from specctl.export.package.find import Kind, locate
from specctl.export.package.folder import load_drafter
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, tokenizer_fingerprint


def decode(target: Target, drafter: Any, policy: str) -> tuple[tuple[int, ...], ...]:
    engine = Engine(target, drafter, make_policy({"policy": policy}), num_slots=2)
    asked = Sampling(max_new_tokens=16, ignore_eos=True)
    done = engine.run([Request((1, 5, 9, 5, 9), asked), Request((7, 7, 3), asked)])
    return tuple(c.tokens for c in done)


def test_auto_drafts_with_rounded_weights_where_these_pay(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, in float32, of weights too many for its caches, and nowhere else."""
    usual = ["prompt-lookup", "token-recycling"]

    def names(target: Target) -> list[str]:
        drafter = load_drafter("auto", target)
        assert isinstance(drafter, Team)
        return drafter.names

    assert names(tiny_target) == usual  # 28 MB
    monkeypatch.setattr(quantspec, "LARGE", 1e6)
    halves, module = copy(tiny_target.lm), copy(tiny_target.lm.module)
    halves.bits = 8
    assert names(replace(tiny_target, lm=halves)) == usual
    monkeypatch.setattr(quantspec, "no_int8", lambda: "switched off")
    assert names(tiny_target) == usual
    monkeypatch.setattr(quantspec, "no_int8", lambda: None)
    monkeypatch.setattr(type(module), "native", lambda self, bits=None: None)
    assert names(tiny_target) == usual
    monkeypatch.setattr(type(module), "native", lambda self, bits=None: object())
    monkeypatch.setattr(FastLlama, "token_bytes", 10**8)
    assert names(tiny_target) == [*usual, "quantspec"]
    assert load_drafter("auto", tiny_target).serve["lengths"] == (5, 7, 10)
    sources = [
        load_drafter("auto", each) for each in (tiny_target, replace(tiny_target, lm=halves))
    ]
    about = [describe(tiny_target, each, Chain(4), "auto", 1) for each in sources]
    assert about[0] != about[1], "costs of one are not those of the other"


@pytest.mark.parametrize("name", ["prompt-lookup", "token-recycling"])
def test_a_training_free_family_is_built_with_its_defaults(name: str, plain_target: Target) -> None:
    drafter = load_drafter(name, plain_target)
    assert drafter.family == name
    assert drafter.options == families()[name].options()
    assert decode(plain_target, drafter, "direct") == decode(plain_target, None, "direct")


@pytest.mark.parametrize("name", ["eagle3", "medusa", "small-lm", "toy"])
def test_a_trained_family_is_no_drafter(name: str, plain_target: Target) -> None:
    with pytest.raises(FileError, match="train one with `specctl train-draft"):
        load_drafter(name, plain_target)


def test_a_family_goes_before_a_folder_of_that_name(
    package: Path, plain_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(package, tmp_path / "prompt-lookup")
    shutil.copytree(package, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert locate("prompt-lookup").kind is Kind.FAMILY
    for name in ("./prompt-lookup", Path("prompt-lookup").absolute(), "mine", "./mine/"):
        assert locate(name).kind is Kind.PACKAGE
        assert load_drafter(name, plain_target).family == "toy"


def test_names_joined_by_a_plus_are_a_team_that_copies_where_the_text_repeats(
    package: Path, plain_target: Target
) -> None:
    drafter = load_drafter(f"{package}+prompt-lookup", plain_target)
    assert isinstance(drafter, Team)
    assert drafter.names == ["prompt-lookup", "toy"], "what costs no forward is asked first"
    assert drafter.serve["lengths"] == (3, 4, 6), "from the length of the package to twice it"
    requests = [Request(ids, Sampling(max_new_tokens=24)) for ids in ((1, 5, 9, 5, 9), (7, 7, 3))]

    def decoded(by: Drafter | None) -> list[tuple[int, ...]]:
        policy = None if by is None else make_policy(dict(by.serve))
        engine = Engine(plain_target, by, policy, num_slots=2)
        done = [c.tokens for c in engine.run(requests)]
        if policy is not None:
            played = engine.policy.to_json()["arms"]
            assert {name.split()[0] for name in played} >= {"prompt-lookup", "toy"}
        return done

    assert decoded(drafter) == decoded(None)


def test_each_name_of_a_team_is_one_of_a_drafter(
    package: Path, plain_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match="prompt-lokup") as caught:
        load_drafter(f"{package}+prompt-lokup", plain_target)
    assert "prompt-lookup" in caught.value.do
    called_so = tmp_path / "lookup+eagle"
    shutil.copytree(package, called_so)
    assert load_drafter(called_so, plain_target).family == "toy", "a folder is what it is called"


def test_the_folder_of_a_run_stands_for_its_package(package: Path, plain_target: Target) -> None:
    run = package.parent
    assert load_drafter(run, plain_target).family == "toy"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("prompt-lokup", "prompt-lookup"),
        ("token_recycling", "token-recycling"),
        ("eagl3", "eagle3"),
        ("packag", "package"),
        ("", "small-lm"),
        ("\x00", "small-lm"),
        ("x" * 5000, "small-lm"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(
    name: str, hint: str, package: Path, plain_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package.parent)
    with pytest.raises(SpecctlError) as caught:
        load_drafter(name, plain_target)
    assert len(caught.value.text()) < 900
    if len(name) > 1 and len(name) < 100:
        assert hint in caught.value.text()


def test_a_missing_path_names_its_neighbours(package: Path, plain_target: Target) -> None:
    with pytest.raises(FileError, match=r"no such package folder.*package"):
        load_drafter(package.parent / "pakage", plain_target)
    (package.parent / "empty").mkdir()
    with pytest.raises(FileError, match=r"holds no drafter.*an empty folder"):
        load_drafter(package.parent / "empty", plain_target)


def test_a_hub_id_that_cannot_be_had_is_a_network_error(
    plain_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("someone/some-draft", "someone/some-draft@0123abc"):
        with pytest.raises(NetworkError, match="no folder someone/some-draft here"):
            load_drafter(name, plain_target)


def test_the_embedded_target_is_not_its_own_drafter(plain_target: Target) -> None:
    with pytest.raises(IncompatibleError, match="is a target, not a drafter"):
        load_drafter("tiny", plain_target)


# -- transformers folders -------------------------------------------------------------------------


@pytest.fixture
def bare_target(plain_target: Target) -> Target:
    """The target without a tokenizer, as plain model folders are."""
    return replace(plain_target, tokenizer_fingerprint=None)


@pytest.fixture
def write_model(make_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    def write(model_type: str = "llama", name: str = "draft", **fields: Any) -> Path:
        sizes = {"num_layers": 2, "hidden": 16, "vocab": 48, "seed": 3, **fields}
        make_model(model_type, **sizes).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("llama", FastLlama),
        ("qwen2", FastLlama),
        ("qwen3", FastLlama),
        ("gpt_neox", HfLM),
        ("gemma2", HfLM),
    ],
)
def test_a_transformers_folder_is_an_independent_drafter(
    model_type: str, kind: type, write_model: Any, bare_target: Target
) -> None:
    drafter = load_drafter(write_model(model_type), bare_target)
    assert isinstance(drafter, SmallLm)
    assert type(drafter.lm) is kind
    assert decode(bare_target, drafter, "chain") == decode(bare_target, None, "direct")


def test_a_loaded_folder_can_be_trimmed_and_packaged(
    write_model: Any, bare_target: Target, save: Any, plain_target: Target
) -> None:
    kept = VocabMap(torch.arange(0, 48, 2), 48)
    drafter = load_drafter(write_model(), bare_target)
    small = drafter.trimmed(kept)
    back = load_drafter(save(small), plain_target)
    assert back.vocab is not None
    assert back.options == small.options
    for name, tensor in small.tensors().items():
        assert torch.equal(back.tensors()[name], tensor)


def test_a_draft_of_any_architecture_is_packaged_if_its_options_describe_it(
    write_model: Any, bare_target: Target, plain_target: Target, save: Any
) -> None:
    drafter = load_drafter(write_model("gpt_neox"), bare_target)
    assert drafter.options.architecture["model_type"] == "gpt_neox"
    back = load_drafter(save(drafter), plain_target)
    for name, tensor in drafter.tensors().items():
        assert torch.equal(back.tensors()[name], tensor)
    drafter.options = replace(drafter.options, architecture=None)
    with pytest.raises(IncompatibleError, match="do not describe this drafter"):
        save(drafter, "another")


@pytest.mark.parametrize("vocab", [47, 64])
def test_another_vocabulary_size_is_refused_with_the_fix(
    vocab: int, write_model: Any, bare_target: Target
) -> None:
    with pytest.raises(IncompatibleError, match=r"resize_token_embeddings\(48\)") as caught:
        load_drafter(write_model(vocab=vocab), bare_target)
    assert caught.value.where == "config.json:vocab_size"
    assert f"{vocab} ids" in caught.value.found


def test_another_tokenizer_is_refused_with_the_first_difference(
    write_model: Any, plain_target: Target, word_tokenizer: Any
) -> None:
    target = replace(
        plain_target,
        tokenizer=word_tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(word_tokenizer),
    )
    folder = write_model()
    with pytest.raises(IncompatibleError, match="the draft folder has no tokenizer"):
        load_drafter(folder, target)
    word_tokenizer.save_pretrained(folder)
    load_drafter(folder, target)
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"w7"', '"swap"').replace('"w9"', '"w7"').replace("swap", "w9"))
    with pytest.raises(IncompatibleError) as caught:
        load_drafter(folder, target)
    assert "2 of 48 ids map to other text (first: 7 'w9' vs 'w7')" in caught.value.found
    assert "--allow tokenizer" in caught.value.do
    load_drafter(folder, target, allow=["tokenizer"])
    body = json.loads(text) | {"normalizer": {"type": "Lowercase"}}
    path.write_text(json.dumps(body))  # the same ids: a draft reads no text
    load_drafter(folder, target)
    path.write_text("{broken")
    with pytest.raises(IntegrityError, match="tokenizer cannot be read"):
        load_drafter(folder, target)


Tensors = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing keys.*model.norm.weight"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing keys.*up_proj"),
        (lambda t: t.update(stray=torch.ones(2)), "unexpected keys.*stray"),
        (lambda t: t.update({HEAD: torch.ones(48, 8)}), "lm_head.weight"),
        (lambda t: t.update({"model.embed_tokens.weight": torch.ones(40, 16)}), "40 rows"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    change: Callable[[Tensors], None], named: str, write_model: Any, bare_target: Target
) -> None:
    folder = write_model()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecctlError, match=named):
        load_drafter(folder, bare_target)


@pytest.mark.parametrize(
    ("name", "body", "named"),
    [
        ("config.json", b"{", "JSON file cannot be read"),
        ("config.json", b'{"vocab_size": 48}', "transformers cannot load"),
        ("config.json", b'{"model_type": "t5", "vocab_size": 48}', "transformers cannot load"),
        ("config.json", b'{"model_type": "warp", "vocab_size": 48}', "transformers cannot load"),
        ("config.json", b'{"vocab_size": "48"}', "no vocab_size"),
        ("model.safetensors", b"", "header is not valid"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../x"}}', "no safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "x.bin"}}', "no safetensors file"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "x.safetensors"}}',
            "weights is missing",
        ),
        ("model.safetensors.index.json", b'{"weight_map": 3}', "no weight_map"),
    ],
)
def test_a_damaged_model_folder_is_a_typed_error(
    name: str, body: bytes, named: str, write_model: Any, bare_target: Target
) -> None:
    folder = write_model()
    (folder / name).write_bytes(body)
    with pytest.raises(SpecctlError, match=named):
        load_drafter(folder, bare_target)


def test_a_folder_without_config_or_weights(write_model: Any, bare_target: Target) -> None:
    folder = write_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileError, match="holds no weights"):
        load_drafter(folder, bare_target)
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match="holds no drafter"):
        load_drafter(folder, bare_target)


def test_a_huge_config_allocates_nothing(write_model: Any, bare_target: Target) -> None:
    folder = write_model()
    body = json.loads((folder / "config.json").read_text())
    for key, value in (
        ("hidden_size", 4_000_000),
        ("intermediate_size", 1 << 40),
        ("num_attention_heads", 1 << 20),
        ("num_hidden_layers", 2_000_000_000),
        ("num_hidden_layers", 3),
    ):
        (folder / "config.json").write_text(json.dumps({**body, key: value}))
        with pytest.raises(SpecctlError, match=r"config\.json"):
            load_drafter(folder, bare_target)
