"""A target without its layers: the same identity, the same head, and no forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.errors import IncompatibleError
from specctl.runtime.target.served import ServedLM, load_served
from specctl.runtime.target.target import load_target

TINY = Path(__file__).parents[3] / "recipes" / "tiny"


def sharded(folder: Path, model: Any) -> Path:
    """A model in three files and an index, with the embedded target's tokenizer."""
    folder.mkdir()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        part = {name: weights[name] for name in weights if place[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_same_target_by_name_from_a_sharded_checkpoint(
    tmp_path: Path, make_model: Callable[..., Any], tied: bool
) -> None:
    model = make_model(num_layers=2, vocab=6144, tie_word_embeddings=tied)
    folder = str(sharded(tmp_path / "model", model))
    whole, served = load_target(folder, device="cpu"), load_served(folder, device="cpu")
    assert served.fingerprint == whole.fingerprint
    assert served.tokenizer_fingerprint == whole.tokenizer_fingerprint
    assert served.template_digest == whole.template_digest
    assert (served.eos_ids, served.spec, served.dtype) == (whole.eos_ids, whole.spec, whole.dtype)
    ours, theirs = served.borrowed(), whole.borrowed()
    assert torch.equal(ours.embedding_VD, theirs.embedding_VD)
    assert torch.equal(ours.head_VD, theirs.head_VD)
    assert (ours.head_VD.data_ptr() == ours.embedding_VD.data_ptr()) is tied
    assert isinstance(served.lm, ServedLM)
    state = torch.randn(3, served.spec.hidden_size)
    expected = model.model.norm(state)
    assert torch.allclose(served.lm.normed(state), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_are_stored_one_by_one_have_the_same_fingerprint(
    tmp_path: Path, kind: str
) -> None:
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "num_experts": 3,
        "num_local_experts": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 6144,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    folder = str(sharded(tmp_path / "model", model))
    whole, served = load_target(folder, device="cpu"), load_served(folder, device="cpu")
    assert served.fingerprint == whole.fingerprint
    assert torch.equal(served.borrowed().head_VD, whole.borrowed().head_VD)


def test_it_cannot_be_asked_for_more() -> None:
    served = load_served("tiny")
    assert served.eos_ids == load_target("tiny").eos_ids
    with pytest.raises(IncompatibleError, match="layers are not in this process"):
        served.new_kv(1, 8)
