"""A draft model cut from the target itself: fewer layers, and a narrower rest.

The cutting itself is `specctl.drafters.parts.slice`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.drafters.parts.heads import cut_rows
from specctl.drafters.parts.lean import LeanLM
from specctl.drafters.parts.slice import Keep, sliced
from specctl.drafters.small_lm import SmallLm
from specctl.recipes.errors import IncompatibleError, RecipeError
from specctl.runtime.target import Target
from specctl.train.rows import TokenData


def prunable(target: Target) -> LeanLM:
    """The target's model, if it is one that can be cut; others are refused by name."""
    if type(target.lm) is LeanLM:
        return target.lm
    found = f"inflated to {target.inflated}" if target.inflated else type(target.lm.module).__name__
    raise IncompatibleError(
        f"no drafter can be cut from target {target.name}",
        found=found,
        expected="a Llama, Mistral, Qwen2 or Qwen3 as published, with layers of one kind",
        do="train an independent one: specctl distill, without drafter.init",
        where="drafter.init",
    )


def spread_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """`kept` of the layers, evenly spaced, with the first and the last; a single one is the
    first, which alone reads what it was trained to read."""
    if kept == 1:
        return (0,)
    return tuple(round(i * (num_layers - 1) / (kept - 1)) for i in range(kept))


def cut_like(drafter: SmallLm, whole: SmallLm, data: TokenData) -> dict[str, Tensor]:
    """Tensors for `drafter`, whose options say what is kept of `whole`, the target."""
    assert isinstance(drafter.lm, LeanLM)
    assert isinstance(whole.lm, LeanLM)
    source, shape = whole.lm.module, drafter.lm.module.shape
    layers = _layers(drafter, source.shape.num_layers)
    small = sliced(source.shape, source.state_dict(), Keep(layers=layers))
    tensors = {name: t.to("cpu", torch.float32) for name, t in small.tensors.items()}
    if not shape.tied:
        head_VD = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        vocab = drafter.vocab
        head = head_VD.clone() if vocab is None else cut_rows(head_VD, None, vocab)
        tensors["lm_head.weight"] = head
    return tensors


def _layers(drafter: SmallLm, available: int) -> tuple[int, ...]:
    wanted = drafter.module.shape.num_layers  # type: ignore[union-attr]
    kept = drafter.options.from_layers or spread_layers(available, min(wanted, available))
    if wanted > available or kept[-1] >= available:
        raise RecipeError(
            "the target has fewer layers than the drafter is to keep of it",
            where="drafter.options.layers",
            found=f"layers {list(kept)}" if wanted <= available else f"{wanted} layers",
            expected=f"some of the layers 0 to {available - 1}",
            do=f"--set drafter.options.layers={max(1, available // 4)}",
        )
    return kept
