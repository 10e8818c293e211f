"""Multimodal targets by their text side: the logits of the whole model on text, and drafting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from specctl.core.errors import IncompatibleError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import check_config
from specctl.runtime.target.target import Target, load_target
from specctl.train.joint.check import check_target
from specctl.train.pretrain.data import train_tokenizer

TEXT = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.25,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": None,
}  # fmt: skip
SEEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 8,
        "patch_size": 4, "num_attention_heads": 2}  # fmt: skip
QWEN = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
        "mlp_ratio": 2}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {"text_config": {"model_type": "llama", **TEXT},
              "vision_config": {"model_type": "clip_vision_model", **SEEN}},
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN},
    "gemma3": {"text_config": {**TEXT, "sliding_window": 6, "query_pre_attn_scalar": 8},
               "vision_config": {"model_type": "siglip_vision_model", **SEEN}},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = [f"hello world {i}, how are you?\ndef f{i}(x):\n    return x" for i in range(40)]
    return train_tokenizer(words, 300, 256)


def whole_model(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CONFIGS[name], image_token_id=7, image_token_index=7)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def loaded(request: Any, tokenizer: Any, tmp_path_factory: Any) -> tuple[Any, Target]:
    """A random multimodal model, and what specctl loads from its folder."""
    folder, full = tmp_path_factory.mktemp("multi"), whole_model(request.param)
    full.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return full, load_target(str(folder), dtype="float32", device="cpu")


def test_the_text_side_gives_the_logits_of_the_whole_model(loaded: tuple[Any, Target]) -> None:
    full, target = loaded
    ids_BS = torch.randint(8, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    masks = target.lm.document_masks(torch.zeros_like(ids_BS))
    with torch.no_grad():
        ours = target.lm.dense(ids_BS, torch.arange(20).expand(2, 20), masks).logits_BTV
        torch.testing.assert_close(ours, full(input_ids=ids_BS).logits, rtol=1e-3, atol=1e-4)
    assert isinstance(target.lm, FastLlama)
    assert target.spec.vocab_size == 300
    assert target.eos_ids == (5, 1)  # its configuration's, its tokenizer's


def test_a_text_only_drafter_serves_a_multimodal_target(loaded: tuple[Any, Target]) -> None:
    _, target = loaded
    prompts = [target.encode("hello world"), target.encode("def f(")]
    torch.manual_seed(0)
    drafter = SmallLm(SmallLmOptions(layers=1, width=16), target.spec)
    sampling, chain = Sampling(max_new_tokens=12), make_policy({"policy": "chain", "length": 3})
    plain = generate(target, prompts, sampling=sampling)
    fast = generate(target, prompts, drafter=drafter, sampling=sampling, policy=chain, batch=2)
    assert [o.token_ids for o in fast.outputs] == [o.token_ids for o in plain.outputs]
    assert fast.stats.drafted > 0


def test_a_multimodal_model_with_a_causal_class_of_its_own_is_left_to_transformers(
    tokenizer: Any, tmp_path: Path
) -> None:
    full = whole_model("gemma3")
    full.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(IncompatibleError, match="reads no images") as caught:
        load_target(str(tmp_path), images=True)
    assert "gemma3" in str(caught.value.found)
    ids_BS = torch.arange(8, 24)[None]
    masks = target.lm.document_masks(torch.zeros_like(ids_BS))
    with torch.no_grad():
        ours = target.lm.dense(ids_BS, torch.arange(16)[None], masks).logits_BTV
        torch.testing.assert_close(ours, full(input_ids=ids_BS).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["florence2", "clip"])
def test_a_multimodal_model_without_a_text_side_for_us_is_refused(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(IncompatibleError):
        check_config(tmp_path)


def test_a_text_side_does_not_learn_with_its_drafter_for_the_rest_would_be_lost(
    loaded: tuple[Any, Target],
) -> None:
    full, target = loaded
    with pytest.raises(IncompatibleError, match="cannot learn together") as caught:
        check_target(target)
    assert full.config.model_type in str(caught.value.found)
    check_target(replace(target, inside_of=None))
