"""Targets of many architectures: what they answer, drafted or not, is what transformers answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.drafters import prompt_lookup
from specctl.models.fast_llama import FastLlama
from specctl.models.hf_lm import HfLM
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target

MakeModel = Callable[..., Any]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied Llama": ("llama", {"tie_word_embeddings": True}),
    "Qwen2 with a window in every layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "Qwen2 with a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "Gemma 2 with soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    ),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", {"embedding_multiplier": 6.0, "logits_scaling": 0.25}),
    "Qwen3 of experts": ("qwen3_moe", MOE),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3 with longrope": ("phi3", {"rope_parameters": LONG}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(make_model: MakeModel, kind: str) -> None:
    model_type, fields = KINDS[kind]
    model = make_model(model_type, num_layers=2, **fields)
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10], [*range(20, 45)]]
    oracle = copy.deepcopy(model)
    target = Target.from_model(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=32)
    drafter = prompt_lookup.FAMILY.build(prompt_lookup.FAMILY.options(), target.spec, None)
    for given in ({}, {"drafter": drafter}, {"batch": 3}):
        made = generate(target, prompts, sampling=sampling, **given)
        for prompt, output in zip(prompts, made.outputs, strict=True):
            most = len(output.token_ids)
            assert most == min(32, target.spec.max_positions - len(prompt)), kind
            wanted = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
            assert list(output.token_ids) == wanted[0, len(prompt) :].tolist(), (kind, given)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("granite", {"logits_scaling": 4.0}),
        ("cohere2", {"logit_scale": 0.25}),
        ("hyperclovax", {"logits_scaling": 0.25}),
    ],
)
def test_a_borrowed_head_speaks_as_loudly_as_the_target(
    make_model: MakeModel, model_type: str, fields: dict[str, Any]
) -> None:
    """Drafters that share the head would be surer, or less sure, than the target by that factor."""
    lm = HfLM(make_model(model_type, num_layers=2, **fields))
    ids = torch.arange(9)[None]
    masks = lm.document_masks(torch.zeros_like(ids))
    with torch.no_grad():
        out = lm.dense(ids, torch.arange(9)[None], masks, (2,))
    product = out.taps[2] @ lm.borrowed().head_VD.T
    torch.testing.assert_close(product, out.logits_BTV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen2 with a window in every layer", "tied Llama"])
def test_the_baseline_is_the_model_as_it_was_published(make_model: MakeModel, kind: str) -> None:
    model_type, fields = KINDS[kind]
    model = make_model(model_type, num_layers=2, **fields)
    target = Target.from_model(model)
    assert isinstance(target.lm, FastLlama)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(as_transformers(target.lm)(ids).logits, model(ids).logits)
