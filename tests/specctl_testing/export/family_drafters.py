"""A drafter of any family, untrained, with every weight shaken."""

from __future__ import annotations

import torch

from specctl.core.drafter import Drafter
from specctl.core.language_model import Borrowed
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.runtime.target.target import Target

SIZES = {"small-lm": {"layers": 1, "width": 16, "head_dim": 8}}


def made(name: str, target: Target, vocab: VocabMap | None = None) -> Drafter:
    """A drafter of the family with every weight shaken, bound to the target."""
    family = families()[name]
    torch.manual_seed(0)
    drafter = family.build(family.options(**SIZES.get(name, {})), target.spec, vocab)
    if drafter.module is not None:
        with torch.no_grad():
            for weight in drafter.module.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    if drafter.needs().borrow:
        borrowed = target.borrowed()
        assert isinstance(borrowed, Borrowed)
        drafter.bind(borrowed)
    return drafter
