"""Rows behind the tokenizer's ids: models pad their embedding and head to round sizes, and
fine-tuning pads them otherwise (resize_token_embeddings, pad_to_multiple_of). Padding is no
difference: no text has these ids.
"""

from __future__ import annotations

import copy
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.models.compiled import CompiledLM
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target, fingerprint_of


def fits_both(target: Target, tokenizer_fingerprint: str | None, size: int) -> bool:
    """Whether `size` and the target's own number of rows both hold every id of one tokenizer, so
    that what they differ by is padding."""
    if target.tokenizer is None or target.tokenizer_fingerprint != tokenizer_fingerprint:
        return False
    most = max(target.tokenizer.get_vocab().values(), default=-1)
    return most < min(size, target.spec.vocab_size)


def fingerprint_without(target: Target, size: int) -> str | None:
    """The fingerprint of the same weights with `size` rows of embedding and head; None where it
    is unknown: rows that are gone are not known, and what was added to the weights is in them.
    """
    lm = target.lm.lm if isinstance(target.lm, CompiledLM) else target.lm
    is_plain = not target.adapters and target.inflated is None and target.spread is None
    if size > target.spec.vocab_size or not is_plain or not isinstance(lm, (FastLlama, HfLM)):
        return None
    try:
        model = as_transformers(lm)
    except (AssertionError, AttributeError, SpecctlError):  # made by hand, or of few bits
        return None
    weights = dict(model.named_parameters())
    padded = _padded(model, weights)
    shapes = {
        n: (size, *w.shape[1:]) if n in padded else tuple(w.shape) for n, w in weights.items()
    }
    config = copy.deepcopy(model.config)
    config.get_text_config().vocab_size = size
    return fingerprint_of(
        config, shapes, lambda name, at, n: weights[name].reshape(-1)[at : at + n].cpu()
    )


def _padded(model: Any, weights: dict[str, Any]) -> set[str]:
    """Names of the parameters that have a row for every id."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    parts = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, weight in weights.items() if id(weight) in parts}
