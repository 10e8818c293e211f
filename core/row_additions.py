"""RowAdditions: low-rank additions to a model's matrices on chosen rows of one forward.

A row where the gate is open reads W x + s B A x in place of W x; every other row is that of the
model itself, to the bit. W is never changed, so that one forward serves both kinds of rows.
Letters: B rows, I inputs, O outputs, R rank, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Place = tuple[int, str]  # a layer, and the name of a linear layer inside it, such as q_proj


@dataclass(frozen=True, slots=True)
class Factors:
    """s B A of one matrix."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    def __call__(self, x_BTI: Tensor) -> Tensor:
        """[B, T, O], in the factors' precision."""
        found: Tensor = F.linear(F.linear(x_BTI.to(self.down_RI), self.down_RI), self.up_OR)
        return found * self.scale


@dataclass(frozen=True, slots=True)
class RowAdditions:
    """`gate_BT`: the fed tokens whose rows have them."""

    factors: Mapping[Place, Factors]
    gate_BT: Tensor

    @property
    def learns(self) -> bool:
        """Whether a gradient is to reach them."""
        every = self.factors.values()
        return torch.is_grad_enabled() and any(one.up_OR.requires_grad for one in every)

    def names(self, layer: int) -> set[str]:
        """The linear layers of a layer that have some."""
        return {name for at, name in self.factors if at == layer}

    def onto(
        self, layer: int, names: Sequence[str], sizes: Sequence[int], x_BTI: Tensor, out_BTO: Tensor
    ) -> Tensor:
        """[B, T, O]: the outputs, side by side, of linear layers of these sizes that read `x_BTI`,
        with what is added."""
        if not any((layer, name) in self.factors for name in names):
            return out_BTO
        blank = x_BTI.new_zeros(())
        parts = []
        for name, size in zip(names, sizes, strict=True):
            one = self.factors.get((layer, name))
            none = blank.expand(*x_BTI.shape[:-1], size)
            parts.append(none if one is None else one(x_BTI).to(out_BTO))
        whole_BTO = out_BTO + torch.cat(parts, dim=-1)
        gate_BT1 = self.gate_BT.reshape(*out_BTO.shape[:-1], 1)
        return torch.where(gate_BT1, whole_BTO, out_BTO)
