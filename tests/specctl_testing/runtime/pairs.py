"""Small pairs of models that several tests of the runtime use."""

from __future__ import annotations

from typing import Any

import torch

from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.target.target import Target


def disturbed(make_target: Any, target: Target, **fields: Any) -> SmallLm:
    """A drafter that is the target with a disturbed LM head: agrees often, not always. `fields` are
    those the target was made with."""
    lm = make_target(**fields).lm
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = lm.module.lm_head.weight
        weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return SmallLm.from_lm(lm, target.spec)
