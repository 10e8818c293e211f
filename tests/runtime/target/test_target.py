"""Target: identity, names, and every refusal with its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    NetworkError,
    SpecctlError,
)
from specctl.recipes.targets import aliases, resolve
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.placement.device import choose_dtype
from specctl.runtime.target.target import Target, load_target, tokenizer_fingerprint

TINY = resolve("tiny").path
assert TINY is not None


@pytest.fixture
def folder(tmp_path: Path, make_model: Callable[..., Any]) -> Path:
    """A random two-layer Llama with a tokenizer, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 96)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    make_model(num_layers=2, eos_token_id=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def load(folder: Path, **options: Any) -> Target:
    return load_target(str(folder), device="cpu", **options)


def test_a_target_is_frozen(folder: Path) -> None:
    target = load(folder)
    assert not any(p.requires_grad for p in target.lm.module.parameters())
    assert not target.lm.module.training


def test_a_folder_round_trips_text_and_names_its_ends(folder: Path) -> None:
    target = load(folder)
    assert target.decode(target.encode("w5 w17 w90")) == "w5 w17 w90"
    assert target.eos_ids == (1,)


def test_fingerprint_is_the_same_in_every_dtype_and_load(folder: Path) -> None:
    names = [load(folder, dtype=d).fingerprint for d in ("float32", "bfloat16", "float32")]
    assert len(set(names)) == 1


def test_fingerprint_survives_being_saved_again(folder: Path, tmp_path: Path) -> None:
    target = load(folder)
    again = tmp_path / "again"
    shutil.copytree(folder, again, ignore=shutil.ignore_patterns("again"))
    as_transformers(target.lm).save_pretrained(again)
    assert load(again).fingerprint == target.fingerprint


def test_fingerprint_sees_other_weights(make_target: Callable[..., Target]) -> None:
    assert make_target(seed=0).fingerprint != make_target(seed=1).fingerprint


def test_fingerprint_sees_one_changed_matrix(make_model: Callable[..., Any]) -> None:
    model = make_model()
    before = Target.from_model(model).fingerprint
    model.model.layers[2].mlp.down_proj.weight.mul_(1.5)
    assert Target.from_model(model).fingerprint != before


def test_tokenizer_fingerprint_sees_swapped_ids(folder: Path) -> None:
    before = load(folder).tokenizer
    body = json.loads((folder / "tokenizer.json").read_text())
    vocab = body["model"]["vocab"]
    vocab["w5"], vocab["w6"] = vocab["w6"], vocab["w5"]
    (folder / "tokenizer.json").write_text(json.dumps(body))
    after = load(folder).tokenizer
    assert tokenizer_fingerprint(before) != tokenizer_fingerprint(after)


def test_lean_target_equals_transformers_on_the_same_folder(folder: Path) -> None:
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        found = as_transformers(load(folder).lm)(ids).logits
    torch.testing.assert_close(found, oracle, atol=1e-5, rtol=1e-5)


def test_the_embedded_target_loads_without_network(tiny_target: Target) -> None:
    assert tiny_target.fingerprint
    assert tiny_target.tokenizer_fingerprint
    assert tiny_target.decode(tiny_target.encode("def main():")) == "def main():"


def test_chat_needs_a_template(folder: Path) -> None:
    with pytest.raises(IncompatibleError, match="chat template"):
        load(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_text_needs_a_tokenizer(make_target: Callable[..., Target]) -> None:
    with pytest.raises(IncompatibleError, match="no tokenizer"):
        make_target().encode("w5")


def test_unknown_alias_names_the_nearest() -> None:
    with pytest.raises(SpecctlError, match=r"llama3-8b"):
        resolve("lama3-8b")


def test_a_missing_folder_names_its_neighbours(folder: Path) -> None:
    with pytest.raises(FileError, match=f"did you mean {folder}"):
        resolve(str(folder) + "x")


def test_every_alias_resolves_to_a_folder_or_a_repository_with_a_shape() -> None:
    for name in aliases():
        found = resolve(name)
        assert (found.path is None) != (found.repo is None)
        assert found.shape is not None
        assert found.shape.parameters > 1e6


def test_known_shapes_have_the_size_in_their_name() -> None:
    billions = {"llama3-8b": 8.03, "llama3.2-1b": 1.24, "qwen3-8b": 8.19, "qwen3-0.6b": 0.6}
    billions |= {"mistral-7b": 7.25, "gemma2-9b": 9.24, "pythia-1.4b": 1.41, "qwen3-32b": 32.8}
    for name, count in billions.items():
        shape = resolve(name).shape
        assert shape is not None
        assert abs(shape.parameters / (count * 1e9) - 1) < 0.02, name


def test_shape_of_the_embedded_target_is_that_of_its_files(tiny_target: Target) -> None:
    shape, spec = resolve("tiny").shape, tiny_target.spec
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
    )
    assert (shape.head_dim, shape.intermediate, shape.vocab) == (
        spec.head_dim,
        spec.intermediate_size,
        spec.vocab_size,
    )


def test_a_branch_is_not_called_pinned() -> None:
    assert not resolve("qwen3-8b").is_pinned
    assert resolve("qwen3-8b", "0" * 40).is_pinned
    assert not resolve("qwen3-8b", "some-branch").is_pinned


def test_offline_without_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match="--target tiny"):
        load_target("nobody/no-such-model", offline=True)


def test_code_in_the_checkpoint_is_refused(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    with pytest.raises(IntegrityError, match="auto_map"):
        load(folder)


def test_code_named_by_the_tokenizer_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    path.write_text(json.dumps(fields))
    with pytest.raises(IntegrityError, match="auto_map"):
        load(folder)


def test_pickled_weights_are_refused_with_the_fix(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(IntegrityError, match="save_pretrained"):
        load(folder)


def test_damaged_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="do: "):
        load(folder)


def test_missing_weights_are_not_filled_with_random_ones(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(IntegrityError, match="missing"):
        load(folder)


def test_a_recurrent_architecture_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv", "vocab_size": 96}))
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(IncompatibleError, match="RwkvForCausalLM"):
        load(folder)


@pytest.mark.parametrize("model_type", ["bert-of-the-future", "vit"])
def test_what_is_no_causal_model_is_refused(folder: Path, model_type: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(IncompatibleError, match=model_type):
        load(folder)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path) -> None:
    edit_config(folder, vocab_size=50)
    with pytest.raises(IncompatibleError, match="token id 95"):
        load(folder)


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileError, match="no tokenizer"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_config_is_an_error_with_its_place(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"config\.json"):
        load(folder)


def test_unknown_dtype_and_device_are_refused(folder: Path) -> None:
    with pytest.raises(SpecctlError, match="bfloat16"):
        load(folder, dtype="bfloat61")
    with pytest.raises(SpecctlError, match="auto"):
        load_target(str(folder), device="gpu7")


def test_auto_dtype_is_float32_for_small_targets_on_cpu() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu, torch.bfloat16, 7_000_000) == torch.float32
    assert choose_dtype("auto", torch.device("cuda"), torch.float16) == torch.float16
