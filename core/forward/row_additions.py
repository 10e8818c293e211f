"""RowAdditions: low-rank additions to a model's matrices on chosen rows of one forward.

A chosen row reads W x + s B A x in place of W x; every other row is that of the model itself, to
the bit. W is never changed, so that one forward serves both kinds of rows.
Letters: B rows, I input width, O output width, Q picked rows, R flat rows, T fed tokens, X any
axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Place = tuple[int, str]  # a layer, and the name of a linear layer inside it, such as q_proj
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class LlamaSizes(Protocol):
    """Of a Llama-shaped layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def linear_sizes(of: LlamaSizes) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's linear layers, in the order of ATTENTION and MLP."""
    width, inner = of.hidden_size, of.intermediate_size
    query, kv = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    sizes = [(query, width), (kv, width), (kv, width), (width, query)]
    sizes += [(inner, width), (inner, width), (width, inner)]
    return dict(zip(ATTENTION + MLP, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Factors:
    """s B A of one matrix: A is `down` [rank, I], B is `up` [O, rank]."""

    down: Tensor
    up: Tensor
    scale: float

    def __call__(self, x_BTI: Tensor) -> Tensor:
        """[B, T, O], in the factors' precision."""
        found: Tensor = F.linear(F.linear(x_BTI.to(self.down), self.down), self.up)
        return found * self.scale

    def within(self, outputs: int, inputs: int) -> Factors:
        """The same, added to the first rows and columns of a larger matrix."""
        more = inputs - self.down.shape[1], outputs - self.up.shape[0]
        down = F.pad(self.down, (0, more[0]))
        return Factors(down, F.pad(self.up, (0, 0, 0, more[1])), self.scale)


@dataclass(frozen=True, slots=True)
class RowAdditions:
    """The fed tokens whose rows have them: where `gate_BT` is True, or those of the flat indices
    `at_Q` (then nothing is computed for others); all where neither is given."""

    factors: Mapping[Place, Factors]
    gate_BT: Tensor | None = None
    at_Q: Tensor | None = None

    @property
    def learns(self) -> bool:
        """Whether a gradient is to reach them."""
        every = self.factors.values()
        return torch.is_grad_enabled() and any(one.up.requires_grad for one in every)

    def onto(
        self, layer: int, names: Sequence[str], sizes: Sequence[int], x_BTI: Tensor, out_BTO: Tensor
    ) -> Tensor:
        """[B, T, O]: the outputs, side by side, of linear layers of these sizes that read `x_BTI`,
        with what is added."""
        if not any((layer, name) in self.factors for name in names):
            return out_BTO
        x_XI = x_BTI if self.at_Q is None else x_BTI.flatten(0, -2)[self.at_Q]
        blank, parts = x_XI.new_zeros(()), []
        for name, size in zip(names, sizes, strict=True):
            one = self.factors.get((layer, name))
            none = blank.expand(*x_XI.shape[:-1], size)
            parts.append(none if one is None else one(x_XI).to(out_BTO))
        added_XO = torch.cat(parts, dim=-1)
        if self.at_Q is not None:
            out_RO = out_BTO.flatten(0, -2).index_add(0, self.at_Q, added_XO)
            return out_RO.view_as(out_BTO)
        whole_BTO = out_BTO + added_XO
        if self.gate_BT is None:
            return whole_BTO
        gate_BT1 = self.gate_BT.reshape(*out_BTO.shape[:-1], 1)
        return torch.where(gate_BT1, whole_BTO, out_BTO)
