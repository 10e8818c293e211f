"""A target as a folder that transformers and `load_target` read: weights, configuration, tokenizer.

The configuration is the one that the weights came with, whatever our own forward makes of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specctl.models.hf.quiet import without_bars
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.target.target import Target

_PRIVATE = ("name_or_path", "_name_or_path", "tokenizer_file", "is_local", "local_files_only")


def write_target(target: Target, folder: Path) -> None:
    """Write model and tokenizer into a folder that exists."""
    model = _model_of(target)
    with without_bars():
        model.save_pretrained(folder)
    _write_ends(target.eos_ids, folder / "generation_config.json")
    write_tokenizer(target.tokenizer, folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # whoever may read the folder may serve it


def _write_ends(eos_ids: Sequence[int], path: Path) -> None:
    """Every end of the target's texts in the file that engines read them from; what else it says
    is kept."""
    body = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    named = body.get("eos_token_id")
    if not eos_ids or {*(named if isinstance(named, list) else [named])} == {*eos_ids}:
        return
    body.pop("_from_model_config", None)  # else transformers makes it anew from config.json
    body["eos_token_id"] = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The tokenizer's files, without what it remembers of where it was loaded from."""
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*_config.json"):
        body = json.loads(path.read_text(encoding="utf-8"))
        kept = {k: v for k, v in body.items() if k not in _PRIVATE}
        if kept != body:
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _model_of(target: Target) -> Any:
    """transformers' own model over the target's parameters, as its configuration describes it."""
    lm = target.lm
    if not isinstance(lm, FastLlama):
        return lm.module
    assert lm.config is not None, "a model made by hand has no configuration to publish"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(lm.config), dtype=lm.dtype)
    for name, parameter in lm.module.named_parameters():
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, parameter)
    if lm.module.shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without a value: {left}"
    if lm.generation_config is not None:
        model.generation_config = copy.deepcopy(lm.generation_config)
    return model
