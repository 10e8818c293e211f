"""Domino (arXiv 2605.29707): DFlash's block with a recurrent correction over the whole draft.

One GRU without biases reads the target's embeddings of the root x_0 and of the drafted tokens; its
state s_k knows the path, not the last token alone. With h_k the state of slot k, which predicts the
token behind x_k,

    logits_k = U_k + W2 SiLU(W1 [h_k; s_k])   for k > 0,   logits_0 = U_0,

since the block itself has seen all that the first token depends on. The loss is (1 - w) times that
of the corrected logits plus w times that of U, w falling linearly to zero over the training, so
that the block learns before its correction does. The paper scores by cross-entropy to the text
(`loss: ce`); here any loss will do.
Letters: D hidden width, K draft vocabulary, M new nodes, O output width (the rank), P path, X any
axes, Y carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.blocks.corrected_blocks import LowRankBlocks
from specctl.drafters.blocks.dflash import DFlashOptions, InjectedNet
from specctl.drafters.corrections.correction import FilledBlock, LowRankBias, at_depth
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.option_checks import Count, Within


@dataclass(frozen=True, slots=True)
class DominoOptions(DFlashOptions):
    """DFlash's options, the rank of the correction, the width of the GRU's state, and the share of
    the block's own loss at the first step (`base_weight`). `recurrent: false` starts the GRU anew
    at every token, so that it knows the last one alone (an ablation)."""

    rank: Count = 64
    state: Count = 256
    base_weight: Annotated[float, Within(0, 1)] = 1.0
    recurrent: bool = True


class DominoNet(InjectedNet):
    """DFlash's module, the GRU, W1 and W2."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DominoOptions, rows: int) -> None:
        super().__init__(spec, num_taps, options)
        self.memory = nn.GRUCell(spec.hidden_size, options.state, bias=False)
        self.down = nn.Linear(spec.hidden_size + options.state, options.rank, bias=False)
        self.up = nn.Linear(options.rank, rows, bias=False)
        nn.init.zeros_(self.up.weight)


class DominoCorrection(LowRankBias):
    """The carry is the GRU's state."""

    def __init__(
        self, net: DominoNet, embed: Callable[[Tensor], Tensor], is_recurrent: bool
    ) -> None:
        super().__init__(net.up.weight, net.memory.hidden_size)
        self.net, self.embed = net, embed
        self.first_order = not is_recurrent

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        embedding_XMD = self.embed(ids_XM)
        if self.first_order:
            carry_XMY = torch.zeros_like(carry_XMY)
        new: Tensor = self.net.memory(embedding_XMD.flatten(0, 1), carry_XMY.flatten(0, 1))
        new_XMY = torch.unflatten(new, 0, ids_XM.shape)
        return new_XMY.to(carry_XMY)

    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        state_XMD = at_depth(block.states_XPD, depth_XM)
        factor_XMO = F.silu(self.net.down(torch.cat([state_XMD, carry_XMY], dim=-1)))
        return factor_XMO * (depth_XM > 0)[..., None]


class Domino(LowRankBlocks):
    """The whole draft is remembered, at the price of a small product per token."""

    family = "domino"
    module: DominoNet

    def make_net(self, rows: int) -> DominoNet:
        return DominoNet(self.spec, len(self.own_taps), self.options, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.up]

    @property
    def correction(self) -> DominoCorrection:
        return DominoCorrection(self.module, self.embed, self.options.recurrent)

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        share = self.options.base_weight * (1.0 - batch.progress)
        return self.with_base(out, learned, share, 1.0 - share)


FAMILY = Family(
    name="domino",
    summary=(
        "DFlash's block of masked places, corrected by a small recurrent network that has read the "
        "whole draft so far, where DSpark's plain correction sees the last token alone. Costs one "
        "pass of the layers, and a small recurrent step and two products of low rank per token."
    ),
    paper="https://arxiv.org/abs/2605.29707",
    options=DominoOptions,
    build=Domino,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
