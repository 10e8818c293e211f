"""Clover and Clover-2 (arXiv 2405.00263, 2408.00264): a recurrence over drafted tokens, on features
that decoder layers have prepared.

With e'_x the row of x in the target's LM head (frozen; its geometry is that of f_t):
  regressive connection  u_t = f_t + gate(f_t, e'_{t+1})      a cosine-gated value, see `CosineCell`
  augmenting block       g_t = decoder layers over u_<=t
  head 0                 o = g_t + W_1 g_t
  head i                 g <- g + gate_2(g, e'_{t+1+i}),  o = g + W_2 [g; e'_{t+1+i}]
logits = the target's LM head on o; head i predicts token t + 2 + i and all i > 0 share their
weights. Loss: per head 10 SmoothL1(o, f_{t+1+i}) + CE to the target's distribution, weighed
decay^i. Our own choice: W_1, W_2, the gates and the layers begin as zero and their output is added,
where the published code norms it with weights of the target; so fresh heads are the base head.
Letters: B rows, D hidden width, T fed tokens, V target vocabulary, X any axes, Y carry (2 D).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.nets.cells import CosineCell
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.prefix import PrefixNet
from specctl.drafters.option_checks import CountOrZero


@dataclass(frozen=True, slots=True)
class CloverOptions(HeadOptions):
    """Trained `num_heads` steps deep, on `layers` augmenting layers. `regressive` False hides the
    tokens (an ablation), as does layers 0 the text."""

    decay: float = 0.8
    layers: CountOrZero = 2
    regressive: bool = True
    feature_weight: float = 10.0


class CloverNet(nn.Module):
    """Two gates, the augmenting block, two read-outs."""

    def __init__(self, options: CloverOptions, spec: ModelSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        if options.regressive:
            self.first_gate = CosineCell(width, spec.num_heads, spec.norm_eps)
        self.augment = PrefixNet(spec, options.layers)
        self.first_out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.first_out.weight)
        if options.num_heads > 1:
            if options.regressive:
                self.later_gate = CosineCell(width, spec.num_heads, spec.norm_eps)
            self.later_out = nn.Linear((1 + options.regressive) * width, width, bias=False)
            nn.init.zeros_(self.later_out.weight)


class Clover(HeadDrafter):
    """The carry is cat(g, e') of the newest token."""

    family = "clover"
    splits_rows = True
    module: CloverNet

    def make_net(self, rows: int) -> CloverNet:
        return CloverNet(self.options, self.spec)

    @property
    def num_stages(self) -> int:
        return min(2, int(self.options.num_heads))

    def prefix(self) -> PrefixNet | None:
        return self.module.augment

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        if not self.options.regressive:
            return state_BTD
        out_BTD: Tensor = self.module.first_gate(state_BTD, self.head_row(next_ids_BT))
        return out_BTD

    def head_row(self, ids_X: Tensor) -> Tensor:
        """[X, D]: rows of the target's whole LM head."""
        assert self.borrowed is not None, "bind() the target's LM head first"
        return F.embedding(ids_X, self.borrowed.head_VD).to(self.dtype)

    def begin(self, state_XD: Tensor) -> Tensor:
        return F.pad(state_XD, (0, state_XD.shape[-1]))

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        """The token t + 1 has been read by `rows`."""
        if depth == 0 or not self.options.regressive or self.options.num_heads == 1:
            return carry_XY
        row_XD = self.head_row(ids_X)
        state_XD = self.module.later_gate(carry_XY.chunk(2, dim=-1)[0], row_XD)
        return torch.cat([state_XD, row_XD], dim=-1)

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        net, state_XD = self.module, carry_XY.chunk(2, dim=-1)[0]
        if depth == 0 or self.options.num_heads == 1:
            added_XD: Tensor = net.first_out(state_XD)
        else:
            added_XD = net.later_out(carry_XY if self.options.regressive else state_XD)
        return state_XD + added_XD


FAMILY = Family(
    name="clover",
    summary=(
        "Decoder layers prepare the target's states, then a light recurrence with a cosine gate "
        "takes in the drafted tokens one by one, all read through the target's own LM head. Made "
        "for large batches, where few nodes may be verified and each must count. It has no head of "
        "its own over the vocabulary, so it stays small for targets with a large one."
    ),
    paper="https://arxiv.org/abs/2408.00264",
    options=CloverOptions,
    build=Clover,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
