"""The text side of a multimodal checkpoint, as the causal language model that it contains.

Text alone never reaches the other towers (images do, where vision.py keeps these), and positions
that advance by text tokens are the same in every axis, so a rotary embedding with several axes is
an ordinary one. What is loaded here gives the logits of the whole model on text, and can be a
target like any other; drafters for it are trained on text (a text-only draft for LLaVA: arXiv
2404.08856).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from specctl.core.errors import IncompatibleError
from specctl.runtime.target.folders.checkpoint_folder import from_folder

# Text towers without a causal model of their own, and the one that computes the same on text.
TWINS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
ROPE_KEYS = ("rope_theta", "rope_type")


def is_multimodal(config: Any) -> bool:
    """True for a model that reads more than text and has no causal class of its own."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return False
    return type(config) in AutoModelForImageTextToText._model_mapping


def text_config(config: Any) -> Any | None:
    """The configuration of the causal language model inside; None if there is none."""
    text = config.get_text_config()
    if type(text) in AutoModelForCausalLM._model_mapping:
        return text
    twin = TWINS.get(text.model_type)
    if twin is None:
        return None
    fields = text.to_dict()
    rope = {k: v for k, v in fields.pop("rope_parameters", {}).items() if k in ROPE_KEYS}
    drop = ("model_type", "layer_types", "transformers_version", "architectures")
    kept = {key: value for key, value in fields.items() if key not in drop}
    if not fields.get("use_sliding_window"):
        kept["sliding_window"] = None
    return AutoConfig.for_model(twin, **kept, rope_parameters={**rope, "rope_type": "default"})


def text_side(full: Any) -> Any:
    """The causal language model inside a multimodal one, over the very same parameters."""
    config = text_config(full.config)
    assert config is not None, "check the configuration before loading weights"
    inner = getattr(full, "model", full)
    if not hasattr(inner, "language_model") or not hasattr(full, "lm_head"):
        raise _laid_out_otherwise(full, "no language_model under an lm_head")
    config.tie_word_embeddings = full.lm_head.weight is full.get_input_embeddings().weight
    tower = inner.language_model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=full.dtype)
    theirs = {f"model.{name}": p for name, p in tower.named_parameters()}
    theirs |= {f"lm_head.{name}": p for name, p in full.lm_head.named_parameters()}
    theirs |= {f"model.{name}": buffer for name, buffer in tower.named_buffers()}
    missing = sorted({n for n, _ in model.named_parameters()} - theirs.keys())
    missing += sorted({n for n, _ in model.named_buffers()} - theirs.keys())
    if missing:
        raise _laid_out_otherwise(full, f"no {missing[0]}")
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, theirs[name])
    model.lm_head.weight = full.lm_head.weight
    model.generation_config = full.generation_config
    return model


def _laid_out_otherwise(full: Any, found: str) -> IncompatibleError:
    return IncompatibleError(
        f"the text side of {type(full).__name__} cannot be taken out of it",
        found=found,
        expected="a language model with the parameters of a causal one",
        do="choose a multimodal target around a Llama, Qwen or Gemma, such as LLaVA or Qwen2-VL",
    )


def load_text_side(
    folder: Path, dtype: torch.dtype, fields: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """The text side of a folder's model, the whole model, and what was loaded. `fields`: what
    `from_pretrained` is given of its place."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what is said of the other towers helps nobody here
    try:
        full, info = from_folder(
            AutoModelForImageTextToText,
            folder,
            dtype=dtype,
            output_loading_info=True,
            **fields,
        )
    finally:
        logging.set_verbosity(level)
    return text_side(full), full, info
