"""XPress (arXiv 2608.02438): DFlash's block with a refiner that mixes what every slot knows of the
token before it.

With E a small embedding of its own, h_k the state of slot k, x_{k-1} the token before it (before
the root's slot 0: the token before the root, or with `before_root: false` the root itself, as vLLM
has it) and r the rank,

    a_k = W_in [D_h h_k; D_g mean_j h_j; E[x_{k-1}]],   c_k = a_k + sum_{j <= k} L[:, k, j] * a_j,
    y_k = c_k + SwiGLU(c_k),                            logits_k = U_k + W_2 y_k.

L has a number per channel and pair of slots and begins at zero. Given all tokens the whole block is
one product, so the paper drafts by repeating it until the draft no longer changes. Here tokens are
read from left to right, which is that fixed point; the carry holds the a_j so far. The loss adds to
the teacher-forced one the mean of free-running rounds, each behind the likeliest tokens of the
round before (the first behind those of U), and that of U.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes, O output width (the
rank), P path, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Family, RoundView, Space
from specctl.core.spec import ModelSpec
from specctl.drafters.blocks.corrected_blocks import LowRankBlocks
from specctl.drafters.blocks.corrected_state import CorrectedState
from specctl.drafters.blocks.dflash import DFlashOptions, InjectedNet
from specctl.drafters.corrections.correction import FilledBlock, LowRankBias, at_depth
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.align import shifted
from specctl.drafters.losses.head_losses import (
    LinearHead,
    TeacherLogits,
    fitting_chunk,
    head_loss,
    joined,
)
from specctl.drafters.nets.options import SERVED
from specctl.drafters.nets.routed import read_head
from specctl.drafters.option_checks import Count, CountOrZero, Within


@dataclass(frozen=True, slots=True)
class XPressOptions(DFlashOptions):
    """DFlash's options, the rank of the refiner, how many times wider its MLP is, the number of
    free-running rounds while training (0: none) and the weight of their mean, that of the block's
    own loss, and whether the root's slot reads the token before the root or the root itself."""

    rank: Count = 64
    mlp_ratio: Count = 2
    free_rounds: CountOrZero = 3
    free_weight: Annotated[float, Within(0, 100)] = 0.3
    base_weight: Annotated[float, Within(0, 100)] = 0.6
    before_root: bool = field(default=True, metadata=SERVED)


class XPressNet(InjectedNet):
    """DFlash's module and the refiner: E, D_h, D_g, W_in, L, the MLP and W_2."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: XPressOptions, rows: int) -> None:
        super().__init__(spec, num_taps, options)
        width, rank, inner = spec.hidden_size, options.rank, options.rank * options.mlp_ratio
        self.before = nn.Embedding(spec.vocab_size, rank)
        self.of_slot = nn.Linear(width, rank, bias=False)
        self.of_block = nn.Linear(width, rank, bias=False)
        self.joint = nn.Linear(3 * rank, rank, bias=False)
        num_slots = options.num_heads + XPress.first_slot
        self.mix = nn.Parameter(torch.zeros(rank, num_slots, num_slots))
        self.gate = nn.Linear(rank, inner, bias=False)
        self.up = nn.Linear(rank, inner, bias=False)
        self.down = nn.Linear(inner, rank, bias=False)
        self.bias = nn.Linear(rank, rows, bias=False)
        nn.init.zeros_(self.bias.weight)

    def mixed(self) -> Tensor:
        """[P + 1, P + 1, O]: L[k, j], zero where j stands behind k."""
        return self.mix.tril().permute(1, 2, 0)

    def refined(self, mixed_XMO: Tensor) -> Tensor:
        """[X, M, O]: y of c."""
        added: Tensor = self.down(F.silu(self.gate(mixed_XMO)) * self.up(mixed_XMO))
        return mixed_XMO + added


def _every(block: FilledBlock) -> Tensor:
    """[X, P + 1, D]: the states of all slots, the root's first."""
    assert block.root_XD is not None
    return torch.cat([block.root_XD[:, None], block.states_XPD], dim=1)


class Refiner(LowRankBias):
    """The carry is a of every slot [P + 1, O], zero where nothing has been read yet."""

    first_order = False

    def __init__(self, net: XPressNet) -> None:
        super().__init__(net.bias.weight, net.mix.shape[1] * net.mix.shape[0])
        self.net = net

    def start(self, block: FilledBlock) -> tuple[FilledBlock, Tensor]:
        assert block.before_X is not None
        root_X1O = self.net.of_slot(_every(block)[:, :1])
        first_X1O = self._joint(root_X1O, self._pooled(block), block.before_X[:, None])
        carry_X1Y = F.pad(first_X1O, (0, self.num_carried - first_X1O.shape[-1]))
        return block, carry_X1Y

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        state_XMD = at_depth(shared.states_XPD, depth_XM)
        new_XMO = self._joint(self.net.of_slot(state_XMD), self._pooled(shared), ids_XM)
        carry_XMPO = torch.unflatten(carry_XMY, -1, (self.net.mix.shape[1], -1))
        at_XM1O = (depth_XM + 1)[..., None, None].expand(*depth_XM.shape, 1, new_XMO.shape[-1])
        carry_XMPO = carry_XMPO.scatter(2, at_XM1O, new_XMO[:, :, None].to(carry_XMPO))
        return carry_XMPO.flatten(2)

    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        carry_XMPO = torch.unflatten(carry_XMY, -1, (self.net.mix.shape[1], -1))
        slot_XM = depth_XM + 1
        own_XMO = carry_XMPO.gather(
            2, slot_XM[..., None, None].expand(*slot_XM.shape, 1, carry_XMPO.shape[-1])
        )[:, :, 0]
        mixed_XMO = own_XMO + (self.net.mixed()[slot_XM] * carry_XMPO).sum(2)
        return self.net.refined(mixed_XMO)

    def forced_factors(self, block: FilledBlock, ids_XP: Tensor) -> Tensor:
        """All slots at once, as every token is given."""
        assert block.before_X is not None
        read_XP = torch.cat([block.before_X[:, None], ids_XP], dim=1)
        own_XPO = self._joint(self.net.of_slot(_every(block)), self._pooled(block), read_XP)
        mixed_XPO = own_XPO + torch.einsum("kjo,xjo->xko", self.net.mixed(), own_XPO)
        return self.net.refined(mixed_XPO[:, 1:])

    def _pooled(self, block: FilledBlock) -> Tensor:
        """[X, 1, O]: D_g of the mean of all slots."""
        pooled_X1O: Tensor = self.net.of_block(_every(block).mean(1, keepdim=True))
        return pooled_X1O

    def _joint(self, slot_XMO: Tensor, block_X1O: Tensor, ids_XM: Tensor) -> Tensor:
        before_XMO = self.net.before(ids_XM).to(slot_XMO)
        parts = [slot_XMO, block_X1O.expand_as(slot_XMO), before_XMO]
        joint_XMO: Tensor = self.net.joint(torch.cat(parts, dim=-1))
        return joint_XMO


class XPress(LowRankBlocks):
    """Slot 0, the root's, predicts nothing; the refiner reads it."""

    family = "xpress"
    module: XPressNet
    first_slot = 1
    shows_root = True

    def make_net(self, rows: int) -> XPressNet:
        return XPressNet(self.spec, len(self.own_taps), self.options, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.bias]

    @property
    def correction(self) -> Refiner:
        return Refiner(self.module)

    def open(self, space: Space) -> DraftState:
        return XPressState(self, self.features(space))

    def blocks(self, batch: TrainBatch, anchor_BA: Tensor) -> FilledBlock:
        slots = self.outputs(batch, anchor_BA)[1]
        every_XPD = self.norm(torch.stack(list(slots), dim=2).flatten(0, 1))
        ids_BS = batch.ids_BS if self.options.before_root else shifted(batch.ids_BS, 1)
        before_X = ids_BS.gather(1, anchor_BA).flatten()
        return FilledBlock(every_XPD[:, 1:], before_X=before_X, root_XD=every_XPD[:, 0])

    def passes(self, block: FilledBlock, ids_XP: Tensor, weight_KO: Tensor) -> Iterator[Tensor]:
        """[X, P, O]: f behind the true tokens, then in each free-running round."""
        factors_XPO = self.correction.forced_factors(block, ids_XP)
        yield factors_XPO
        rounds = self.options.free_rounds if self.options.free_weight else 0
        guess_XP = self._likeliest(block.states_XPD, self.base_head()) if rounds else ids_XP
        for left in reversed(range(rounds)):
            read_XP = torch.cat([ids_XP[:, :1], guess_XP[:, :-1]], dim=1)
            factors_XPO = self.correction.forced_factors(block, read_XP)
            yield factors_XPO
            if left:
                guess_XP = self._likeliest(self._beside(block, factors_XPO), weight_KO)

    @torch.no_grad()
    def _likeliest(self, ready_XPO: Tensor, weight_KO: Tensor) -> Tensor:
        """[X, P]: target ids of the best token of every slot."""
        size = self.options.chunk or fitting_chunk(len(weight_KO), ready_XPO.device)
        head, rows = LinearHead(weight_KO), ready_XPO.flatten(0, 1)
        best_R = torch.cat([head(part).argmax(-1) for part in torch.split(rows, size)])
        ids_R = best_R if self.vocab is None else self.vocab.ids_K[best_R]
        return ids_R.view(ready_XPO.shape[:2])

    def _beside(self, block: FilledBlock, factors_XPO: Tensor) -> Tensor:
        return torch.cat([block.states_XPD, factors_XPO.to(block.states_XPD)], dim=-1)

    def _heads(
        self, batch: TrainBatch, weights: Sequence[Tensor], teacher: TeacherLogits | None
    ) -> Iterator[HeadLearned]:
        anchor_BA = self.anchors(batch)
        block, ids_XP = self.blocks(batch, anchor_BA), self.drafted_from(batch, anchor_BA)
        passes = [self._beside(block, f) for f in self.passes(block, ids_XP, weights[0])]
        for i in range(int(self.options.num_heads)):
            ready_RO, *others = (
                self.placed(
                    torch.unflatten(one[:, i], 0, anchor_BA.shape), batch, anchor_BA
                ).flatten(0, 1)
                for one in passes
            )
            rows = self.aimed(i, batch, anchor_BA)
            yield HeadLearned(i, ready_RO, rows, LinearHead(weights[0]), teacher, tuple(others))

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        how, share = self.options.compared(), self.options.free_weight
        for number, ready_RO in enumerate(learned.others, start=1):
            given = learned.head, learned.rows, self.vocab, how, learned.teacher
            term = head_loss(ready_RO, *given)
            named = {f"free{number}_{name}": pair for name, pair in term.metrics.items()}
            out = joined(out, replace(term, metrics=named), share / len(learned.others))
        return self.with_base(out, learned, self.options.base_weight, 1.0)


class XPressState(CorrectedState):
    """Shows the refiner the root's slot and the token before the root."""

    def filled(self, view: RoundView) -> FilledBlock:
        assert isinstance(self.drafter, XPress)
        every_BPD = self.drafter.slot_states(self.features.at(view))
        first = -2 if self.drafter.options.before_root else -1
        before = [text[first:][0] for text in view.tokens]
        return FilledBlock(
            every_BPD[:, 1:],
            read_head(every_BPD[:, 1:], self._packed[0]),
            before_X=torch.tensor(before, device=every_BPD.device),
            root_XD=every_BPD[:, 0],
        )


FAMILY = Family(
    name="xpress",
    summary=(
        "DFlash's block of masked places with a refiner that mixes, channel by channel, what all "
        "earlier places know of the tokens before them, and is trained on its own drafts as well "
        "as on the text. Costs one pass of the layers, and a small product of low rank per token."
    ),
    paper="https://arxiv.org/abs/2608.02438",
    options=XPressOptions,
    build=XPress,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
