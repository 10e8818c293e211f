"""Whether loaded weights fit the drafter of a recipe; if they do not, the options that would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError
from specctl.drafters.nets.heads import fitting_rows
from specctl.drafters.small_lm import options_of
from specctl.models.fast_llama import LlamaModel


def fitting_vocab(source: Drafter, tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The tensors with as many rows as the target has ids: models of one family pad one vocabulary
    to different sizes (Qwen2.5 0.5B and 7B)."""
    if not isinstance(source.module, LlamaModel):
        return dict(tensors)
    rows = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if source.vocab is None else set())
    return {name: fitting_rows(t, size) if name in rows else t for name, t in tensors.items()}


def check_same_shape(drafter: Drafter, source: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit, and constants that differ."""
    check_shapes(drafter, source, tensors)
    if _constants(drafter) != _constants(source):
        name = "window, norm or rotary constants"
        raise _misfit(drafter, source, name, "other constants", "those of the recipe")


def check_shapes(
    drafter: Drafter,
    source: Drafter,
    tensors: Mapping[str, Tensor],
    aside: frozenset[str] = frozenset(),
) -> None:
    """Refuse tensors that do not fit, naming the first one and the options that would fit."""
    wanted = {name: tuple(t.shape) for name, t in drafter.tensors().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    names = sorted((wanted.keys() | found.keys()) - aside)
    wrong = next((name for name in names if wanted.get(name) != found.get(name)), None)
    if wrong is not None:
        shapes = (str(each.get(wrong, "no such tensor")) for each in (found, wanted))
        raise _misfit(drafter, source, wrong, *shapes)


def _misfit(
    drafter: Drafter, source: Drafter, name: str, found: str, expected: str
) -> IncompatibleError:
    fitting = _fitting_options(drafter, source)
    return IncompatibleError(
        f"the initial weights do not fit the drafter of this recipe: {name}",
        found=found,
        expected=expected,
        do=" ".join(f"--set drafter.options.{k}={v}" for k, v in fitting.items())
        or "give weights of the same shape",
        where=f"drafter.options.{next(iter(fitting))}" if fitting else "drafter.init",
    )


def _constants(drafter: Drafter) -> tuple[Any, ...]:
    """What a Llama computes with beside its tensors."""
    if not isinstance(drafter.module, LlamaModel):
        return ()
    shape, rotary = drafter.module.shape, drafter.module.rotary
    eps = shape.qk_norm_eps or shape.norm_eps
    return shape.window, shape.norm_eps, eps, rotary.scale, rotary.inv_freq.tolist()


def _fitting_options(drafter: Drafter, source: Drafter) -> dict[str, Any]:
    """Options under which the drafter would have the shape of the source."""
    ours, theirs = drafter.module, source.module
    if isinstance(ours, LlamaModel) and isinstance(theirs, LlamaModel):
        here = options_of(ours.shape, drafter.spec)
        there = options_of(theirs.shape, drafter.spec)
        if not here["tied"]:
            del there["tied"]  # a tied head unties itself
    else:
        here, there = asdict(drafter.options), asdict(source.options)
        there = {k: v for k, v in there.items() if k not in _HOW}
    return {k: v for k, v in there.items() if here.get(k) != v}


_HOW = ("loss", "temperature", "chunk")  # options that say how to train, not what
