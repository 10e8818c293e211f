"""A target beside the same model in transformers, whose greedy text it must write."""

from __future__ import annotations

import copy
from typing import Any

import torch

from specctl.runtime.target.target import Target


def twins(model: Any) -> tuple[Target, Any]:
    """The target around the model, and a copy of the model with plain attention."""
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    return Target.from_model(model), oracle


def greedy_text(oracle: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` tokens that transformers writes behind a prompt; nothing ends it."""
    ids = torch.tensor([prompt])
    whole = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return tuple(whole[0, len(prompt) :].tolist())
