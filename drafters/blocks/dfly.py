"""DFly (AngelSpec, arXiv 2607.25852): DFlash's block, corrected in the states of its slots.

Two additions to DFlash. Every layer reads features of its own, the shared ones with a mixture of
the tapped depths that is the layer's,

    context_l = norm(fc(all depths) + sum_t softmax(w_l)_t depth_t)

and the state of a slot is corrected behind the token before it, ahead of the LM head (equation 1 of
TreeFlash, arXiv 2606.03819), with n two norms and e the token's embedding:

    h' = h + W_d (SiLU(W_g [n(h); n(e)]) * W_u [n(h); n(e)])

W_d begins as zero. There is no matrix over the vocabulary to train; a token costs three products of
the hidden width, and the LM head. Slots are filled in as DFlash's: slot 0 is the root.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes, P path, T fed tokens, X
any axes, Y carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import DraftState, Family, RoundView, Space
from specctl.core.spec import ModelSpec
from specctl.drafters.blocks.corrected_blocks import CorrectedBlocks
from specctl.drafters.blocks.corrected_state import CorrectedState
from specctl.drafters.blocks.dflare import mixtures, nearest
from specctl.drafters.blocks.dflash import STD, DFlashOptions, InjectedNet
from specctl.drafters.corrections.correction import Correction, FilledBlock, at_depth
from specctl.drafters.nets.blocks import RmsNorm
from specctl.drafters.nets.routed import ServedHead, read_head
from specctl.drafters.option_checks import Count


@dataclass(frozen=True, slots=True)
class DFlyOptions(DFlashOptions):
    """DFlash's options. `inner`: width of the correction (None: the hidden width). `fusion`: every
    layer reads a mixture of the depths beside the shared features."""

    inner: Count | None = None
    fusion: bool = True


class SlotCorrection(nn.Module):
    """n (`hidden_norm`, `embed_norm`), W_g, W_u and W_d."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        super().__init__()
        width = spec.hidden_size
        self.hidden_norm = RmsNorm(width, spec.norm_eps)
        self.embed_norm = RmsNorm(width, spec.norm_eps)
        self.gate_proj = nn.Linear(2 * width, inner, bias=False)
        self.up_proj = nn.Linear(2 * width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.gate_proj.weight, std=STD)
        nn.init.normal_(self.up_proj.weight, std=STD)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state_XD: Tensor, before_XD: Tensor) -> Tensor:
        """[X, D]: h'."""
        both = torch.cat([self.hidden_norm(state_XD), self.embed_norm(before_XD)], dim=-1)
        added_XD: Tensor = self.down_proj(F.silu(self.gate_proj(both)) * self.up_proj(both))
        return state_XD + added_XD.to(state_XD)


class FlyNet(InjectedNet):
    """DFlash's module with the mixtures `fusion` [layers, taps] and the correction."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DFlyOptions) -> None:
        super().__init__(spec, num_taps, options)
        if options.fusion:
            self.fusion = nn.Parameter(nearest(options.layers, num_taps))
        self.correction = SlotCorrection(spec, options.inner or spec.hidden_size)


class StateCorrection(Correction):
    """The carry is the embedding of the newest token."""

    first_order = True

    def __init__(
        self, net: SlotCorrection, embed: Callable[[Tensor], Tensor], head: ServedHead
    ) -> None:
        self.net, self.embed, self.head = net, embed, head

    def start(self, block: FilledBlock) -> tuple[FilledBlock, Tensor]:
        return block, block.states_XPD[:, :1] * 0

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        return self.embed(ids_XM)

    def scores(self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        return read_head(self.corrected(shared, depth_XM, carry_XMY), self.head)

    def corrected(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        """[X, M, D]: h'."""
        corrected_XMD: Tensor = self.net(at_depth(block.states_XPD, depth_XM), carry_XMY)
        return corrected_XMD


class DFly(CorrectedBlocks):
    """Slot 0 is the root, as DFlash's."""

    family = "dfly"
    module: FlyNet
    first_slot = 1

    def make_net(self, rows: int) -> FlyNet:
        return FlyNet(self.spec, len(self.own_taps), self.options)

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        if not self.options.fusion:
            return super().rows(state_BTD, next_ids_BT)
        net = self.module
        own = mixtures(net.fusion, state_BTD)
        fused: Tensor = net.fc_norm(net.fc(state_BTD)[..., None, :] + own)
        return fused.flatten(-2)

    @property
    def correction(self) -> StateCorrection:
        return self.corrected_by(self.base_head())

    def corrected_by(self, head: ServedHead) -> StateCorrection:
        """With that form of the LM head."""
        return StateCorrection(self.module.correction, self.embed, head)

    def open(self, space: Space) -> DraftState:
        return FlyState(self, self.features(space))

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        anchor_BA = self.anchors(batch) if anchor_BA is None else anchor_BA
        block, before_XPD = self.blocks(batch, anchor_BA), self.drafted_from(batch, anchor_BA)
        state_XPD = self.module.correction(block.states_XPD, self.embed(before_XPD))
        for state_XD in state_XPD.unbind(1):
            yield self.placed(torch.unflatten(state_XD, 0, anchor_BA.shape), batch, anchor_BA)


class FlyState(CorrectedState):
    """Scores by the LM head as it is prepared for serving; U itself is never needed."""

    @property
    def correction(self) -> StateCorrection:
        assert isinstance(self.drafter, DFly)
        return self.drafter.corrected_by(self._packed[0])

    def filled(self, view: RoundView) -> FilledBlock:
        return FilledBlock(self.drafter.slot_states(self.features.at(view)))

    @torch.no_grad()
    def hidden(self) -> Tensor:
        """[B, D]: h' of the newest node."""
        slot_B1, carry_B1D = self.newest()
        return self.correction.corrected(self.block, slot_B1, carry_B1D)[:, 0]


FAMILY = Family(
    name="dfly",
    summary=(
        "DFlash's block of masked places whose states are corrected behind the token before each "
        "of them, and whose layers read depths of the target of their own. Nothing to train grows "
        "with the vocabulary. Costs one pass of the layers, and three small products and one with "
        "the LM head per token."
    ),
    paper="https://arxiv.org/abs/2607.25852",
    options=DFlyOptions,
    build=DFly,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
