"""A target whose requests choose among LoRA adapters (row_adapters.py)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from specctl.core.errors import IncompatibleError
from specctl.core.language_model import LanguageModel
from specctl.models.compiled import PATIENCE, CompiledLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.row_adapters import RowAdapters


def with_row_adapters(target: Target, folders: Mapping[str, str]) -> Target:
    """The target with LoRA adapters that requests choose by name. `folders`: NAME -> FOLDER or
    FOLDER@WEIGHT in peft's format, plain LoRA on linear layers of attentions and MLPs.

    The forward is PyTorch's own from then on, also of rows without one: the compiled step and the
    rounds that a GPU records read no additions, and a text must not depend on whose request stands
    beside it. IncompatibleError for a target whose layers are not at hand one by one: in few bits,
    spread, compiled on request, a mixture, or a hybrid without an attention in every layer."""
    _check_target(target)
    lm = _eager(target.lm)
    return replace(target, lm=lm, row_adapters=RowAdapters.of(lm, folders))


def _eager(lm: LanguageModel) -> LanguageModel:
    """The model without its compiled step, and without recordings of rounds: these hold a forward
    that reads no additions."""
    if isinstance(lm, CompiledLM):
        return _eager(lm.lm)
    if isinstance(lm, FastLlama):
        lm = copy(lm)
        lm.steps = False
    return lm


def _check_target(target: Target) -> None:
    found = {
        "two models": target.mixture is not None or bool(target.beside),
        target.spread or "": target.spread is not None,
        f"weights in {target.dtype_name}": getattr(target.lm, "bits", None) is not None,
        "target.compile": isinstance(target.lm, CompiledLM) and target.lm.patience < PATIENCE,
        "int4 weights": getattr(target.lm, "int4", None) is not None,
        (unlent := _unlent(target.lm)): bool(unlent),
    }
    if given := [what for what, is_so in found.items() if is_so]:
        raise IncompatibleError(
            "requests cannot choose adapters of this target",
            where="api.adapters",
            found=given[0],
            expected="one model on one device, of layers with an attention and an MLP each, not "
            "compiled, in float32, bfloat16 or float16",
            do="leave target.compile out, --dtype float32 or bfloat16 for the target, or --adapter "
            "FOLDER for all requests",
        )


def _unlent(lm: LanguageModel) -> str:
    """Why nothing can be added to its linear layers; empty where it can."""
    try:
        lm.linear_at(0, "q_proj")
    except IncompatibleError as error:
        return error.found or error.what
    return ""
