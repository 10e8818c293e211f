"""LiLiCorr (arXiv 2608.20530): DFlash's block, and a choice among the likeliest tokens of every
slot that has looked at all of them together.

The C likeliest tokens of each slot form a lattice (`nets/lattice.py`), which is computed once a
round; U enters it as features only. Candidate j of slot k behind candidate i of slot k - 1 scores

    z(i -> j) = scale cos(leave_i, enter_j),    the first slot's: scale cos(leave_root, enter_j)

and drafts are drawn from softmax(z / T) over these C tokens, left to right. The loss of a slot is
DFlash's plus weighed means, over slots whose true token and those before it are candidates, of

    -log q(true),   relu(2 - (z_true - max of the others)),   sum_j q(j) relu(l_true - l_j)

behind the true candidate, with q = softmax(z) and l the target's logits.
Letters: A anchors, B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, O output
width (of a vector), P path, Q picked rows, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.recompute import run
from specctl.drafters.blocks.corrected_blocks import CorrectedBlocks
from specctl.drafters.blocks.dflash import DFlashOptions, InjectedNet
from specctl.drafters.corrections.correction import Correction, FilledBlock, at_depth
from specctl.drafters.corrections.lattice import LatticeNet, LatticeShape, Vectors
from specctl.drafters.corrections.selector import BestTokens, choice_metrics, spread
from specctl.drafters.corrections.slot_conv import convolve
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.align import ahead_mask, shifted
from specctl.drafters.losses.head_losses import (
    LinearHead,
    TeacherLogits,
    fitting_chunk,
    joined,
)
from specctl.drafters.losses.teacher import wide
from specctl.drafters.option_checks import Count, CountOrZero, Within

MARGIN = 2.0
MOST_REGRET, LEAST_LOG_P = 100.0, -1e4  # finite where a target forbids tokens by -inf
Weight = Annotated[float, Within(0, 100)]


@dataclass(frozen=True, slots=True)
class LiLiCorrOptions(DFlashOptions):
    """DFlash's options; how many `candidates` of a slot are in the lattice, its `width`, number of
    layers (`lattice_layers`), of heads and the width of its MLP, the length of its vectors
    (`factor`), below which norm a vector is not made one (`eps`), and `scale`. The weights are
    those of the block's own loss and of the three terms. `whole_blocks`: only blocks of which every
    token is to be predicted teach the lattice. `conv_taps`: with DFlash2's convolution in the
    layers (0: without)."""

    candidates: Annotated[int, Within(1, 64)] = 8
    width: Count = 128
    lattice_layers: CountOrZero = 2
    lattice_heads: Count = 4
    mlp_ratio: Annotated[float, Within(0.25, 16)] = 2.0
    factor: Count = 128
    eps: Annotated[float, Within(1e-12, 0.5)] = 1e-4
    scale: Annotated[float, Within(0.01, 1000)] = 8.0
    base_weight: Weight = 1.0
    choice_weight: Weight = 0.25
    margin_weight: Weight = 0.0
    penalty_weight: Weight = 0.25
    whole_blocks: bool = True
    conv_taps: CountOrZero = 0
    conv_group: Count = 16

    def __post_init__(self) -> None:
        DFlashOptions.__post_init__(self)
        if self.width % self.lattice_heads:
            raise RecipeError(
                "the lattice's heads do not fill its width",
                where="drafter.options.lattice_heads",
                found=f"{self.lattice_heads} heads of {self.width}",
                expected=f"a divisor of {self.width}",
                do="write lattice_heads: 1, or another divisor",
            )

    def lattice(self, spec: ModelSpec) -> LatticeShape:
        """The lattice beside that target."""
        return LatticeShape(
            spec.hidden_size,
            self.width,
            self.lattice_layers,
            self.lattice_heads,
            self.mlp_ratio,
            self.factor,
            self.num_heads,
            self.candidates,
            self.eps,
            spec.norm_eps,
        )


class LiLiCorrNet(InjectedNet):
    """DFlash's module and the lattice."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: LiLiCorrOptions) -> None:
        super().__init__(spec, num_taps, options)
        num_slots = options.num_heads + LiLiCorr.first_slot
        convolve(self.net, options.conv_taps, options.conv_group, num_slots)
        self.lattice = LatticeNet(options.lattice(spec))


@dataclass(frozen=True, slots=True)
class Lattice:
    """Of a round: draft rows and target ids [X, P, C] of the candidates, and their vectors."""

    rows_XPC: Tensor
    ids_XPC: Tensor
    vectors: Vectors
    num_rows: int


class Linking(Correction):
    """The carry is the vector that leaves the newest token's candidate; zero, so that all scores
    are alike, where it was none."""

    first_order = True

    def __init__(
        self,
        net: LatticeNet,
        embed: Callable[[Tensor], Tensor],
        ids_K: Tensor | None,
        scale: float,
    ) -> None:
        self.net, self.embed, self.ids_K, self.scale = net, embed, ids_K, scale

    def start(self, block: FilledBlock) -> tuple[Lattice, Tensor]:
        logp_XPK = wide(block.base).log_softmax(-1)
        best = BestTokens.of(logp_XPK, self.net.shape.candidates)
        lattice = self.lattice(block, best, logp_XPK.shape[-1])
        return lattice, lattice.vectors.root_XO[:, None]

    def lattice(self, block: FilledBlock, best: BestTokens, num_rows: int) -> Lattice:
        """All candidates together."""
        assert block.before_XD is not None
        ids_XPC = best.rows if self.ids_K is None else self.ids_K[best.rows]
        embedding_XPCD = self.embed(ids_XPC).detach()
        vectors = self.net(embedding_XPCD, best.values, block.states_XPD, block.before_XD)
        return Lattice(best.rows, ids_XPC, vectors, num_rows)

    def read(self, shared: Lattice, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor) -> Tensor:
        """A look-up; the root is no candidate."""
        before_XM = (depth_XM - 1).clamp(min=0)
        is_it_XMC = at_depth(shared.ids_XPC, before_XM) == ids_XM[..., None]
        leave_XMCO = at_depth(shared.vectors.leave_XPCO, before_XM)
        leave_XMO = (leave_XMCO * is_it_XMC[..., None]).sum(2)
        root_XMO = shared.vectors.root_XO[:, None].expand_as(leave_XMO)
        return torch.where((depth_XM == 0)[..., None], root_XMO, leave_XMO)

    def scores(self, shared: Lattice, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        chosen_XMC = self.links(shared, depth_XM, carry_XMY)
        return spread(chosen_XMC, at_depth(shared.rows_XPC, depth_XM), shared.num_rows)

    def links(self, shared: Lattice, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        """[X, M, C]: z of each node's candidates."""
        enter_XMCO = at_depth(shared.vectors.enter_XPCO, depth_XM)
        return self.scale * wide((enter_XMCO @ carry_XMY[..., None])[..., 0])


class LiLiCorr(CorrectedBlocks):
    """Slot 0 is the root, as DFlash's."""

    family = "lilicorr"
    module: LiLiCorrNet
    first_slot = 1

    def make_net(self, rows: int) -> LiLiCorrNet:
        return LiLiCorrNet(self.spec, len(self.own_taps), self.options)

    def needs(self) -> Needs:
        needs = super().needs()
        return replace(needs, teacher=needs.teacher or self.options.penalty_weight > 0)

    @property
    def correction(self) -> Linking:
        ids_K = None if self.vocab is None else self.vocab.ids_K
        return Linking(self.module.lattice, self.embed, ids_K, self.options.scale)

    def blocks(self, batch: TrainBatch, anchor_BA: Tensor) -> FilledBlock:
        rows_BSD, slots = self.outputs(batch, anchor_BA)
        states_XPD = self.norm(torch.stack(list(slots[self.first_slot :]), 2).flatten(0, 1))
        at_BAD = (anchor_BA - batch.start)[:, :, None].expand(-1, -1, rows_BSD.shape[-1])
        return FilledBlock(states_XPD, before_XD=rows_BSD.gather(1, at_BAD).flatten(0, 1))

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        anchor_BA = self.anchors(batch) if anchor_BA is None else anchor_BA
        for state_XD in self.blocks(batch, anchor_BA).states_XPD.unbind(1):
            yield self.placed(torch.unflatten(state_XD, 0, anchor_BA.shape), batch, anchor_BA)

    def _heads(
        self, batch: TrainBatch, weights: Sequence[Tensor], teacher: TeacherLogits | None
    ) -> Iterator[HeadLearned]:
        anchor_BA = self.anchors(batch)
        block = self.blocks(batch, anchor_BA)
        links_XPC, rows_XPC, taught_XP, is_met_XP = self._linked(
            batch, anchor_BA, block, weights[0]
        )

        def flat(values_XO: Tensor) -> Tensor:
            values_BAO = torch.unflatten(values_XO, 0, anchor_BA.shape)
            return self.placed(values_BAO, batch, anchor_BA).flatten(0, 1)

        for i, state_XD in enumerate(block.states_XPD.unbind(1)):
            marks = taught_XP[:, i, None], is_met_XP[:, i, None]
            others = links_XPC[:, i], rows_XPC[:, i], *marks
            yield HeadLearned(
                i,
                flat(state_XD),
                self.aimed(i, batch, anchor_BA),
                LinearHead(weights[0]),
                teacher,
                tuple(map(flat, others)),
            )

    def _linked(
        self, batch: TrainBatch, anchor_BA: Tensor, block: FilledBlock, weight_KD: Tensor
    ) -> tuple[Tensor, ...]:
        """[X, P, C]: z behind the true tokens, the candidates' draft rows, and [X, P]: whether the
        true token and those before it are candidates and are to teach, whether those before it
        are."""
        steps = range(2, 2 + int(self.options.num_heads))
        true = [shifted(batch.ids_BS, step).gather(1, anchor_BA) for step in steps]
        true_XP = torch.stack(true, dim=2).flatten(0, 1)
        best = self._candidates(block.states_XPD, weight_KD)
        lattice = self.correction.lattice(block, best, len(weight_KD))
        taught_XP = (lattice.ids_XPC == true_XP[..., None]).any(-1).long().cumprod(1) > 0
        is_met_XP = F.pad(taught_XP[:, :-1], (1, 0), value=True)
        if self.options.whole_blocks:
            wanted = [ahead_mask(batch, step).gather(1, anchor_BA) for step in steps]
            taught_XP &= torch.stack(wanted, dim=2).flatten(0, 1).all(1, keepdim=True)
        read_XP = self.drafted_from(batch, anchor_BA)
        depth_XP = torch.arange(read_XP.shape[1], device=read_XP.device).expand_as(read_XP)
        root_X1O = lattice.vectors.root_XO[:, None]
        carry_XPO = self.correction.walked(lattice, root_X1O, read_XP)
        links_XPC = self.correction.links(lattice, depth_XP, carry_XPO)
        return links_XPC, best.rows, taught_XP, is_met_XP

    def _candidates(self, states_XPD: Tensor, weight_KD: Tensor) -> BestTokens:
        """Their log p has a gradient, so that the block learns from the lattice, too."""
        count = min(self.options.candidates, len(weight_KD))
        flat_RD, head = states_XPD.flatten(0, 1), LinearHead(weight_KD)

        def one(state_RD: Tensor) -> tuple[Tensor, Tensor]:
            best = wide(head(state_RD)).log_softmax(-1).topk(count, dim=-1)
            return best.values, best.indices

        size = self.options.chunk or fitting_chunk(len(weight_KD), flat_RD.device)
        parts = torch.split(flat_RD, size)
        made = [run(len(parts) > 1, one, part) for part in parts]
        values_RC, rows_RC = (torch.cat(each) for each in zip(*made, strict=True))
        shape = states_XPD.shape[:2]
        return BestTokens(*(torch.unflatten(x, 0, shape) for x in (rows_RC, values_RC)))

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """With the lattice's terms."""
        picked = [one[learned.rows.row_Q] for one in learned.others]
        links_QC, rows_QC, taught_Q1, is_met_Q1 = picked
        rows = learned.rows
        label_Q = rows.label_Q if self.vocab is None else self.vocab.to_draft()[rows.label_Q]
        is_true_QC = rows_QC == label_Q[:, None]
        loss_Q = self._terms(links_QC, is_true_QC, self._regret(learned, rows_QC, is_true_QC))
        weight_Q = taught_Q1[:, 0].to(loss_Q)
        weight_Q = weight_Q if rows.weight_Q is None else weight_Q * rows.weight_Q
        number, loss = weight_Q.sum(), (loss_Q * weight_Q).sum()
        given = learned, self.vocab, self.options.temperature
        figures = choice_metrics(links_QC, rows_QC, *given, is_met_Q1[:, 0] > 0)
        term = LossOut(loss, number, {"lattice": (loss.detach(), number), **figures})
        return joined(replace(out, sum=self.options.base_weight * out.sum), term)

    def _regret(self, learned: HeadLearned, rows_QC: Tensor, is_true_QC: Tensor) -> Tensor | None:
        """[Q, C]: relu(l_true - l_j)."""
        if learned.teacher is None or not self.options.penalty_weight:
            return None
        ids_K = None if self.vocab is None else self.vocab.ids_K
        log_p_QK = learned.teacher.distribution(learned.rows.teacher_row_Q, ids_K).log_p_QK
        log_p_QC = log_p_QK.gather(1, rows_QC).clamp(min=LEAST_LOG_P)
        true_Q1 = log_p_QC.masked_fill(~is_true_QC, 0.0).sum(-1, keepdim=True)
        return (true_Q1 - log_p_QC).clamp(0, MOST_REGRET)

    def _terms(self, links_QC: Tensor, is_true_QC: Tensor, regret_QC: Tensor | None) -> Tensor:
        """[Q]: the weighed terms."""
        options = self.options
        log_q_QC = links_QC.log_softmax(-1)
        total_Q: Tensor = -options.choice_weight * log_q_QC.masked_fill(~is_true_QC, 0.0).sum(-1)
        if options.margin_weight and links_QC.shape[-1] > 1:
            true_Q = links_QC.masked_fill(~is_true_QC, 0.0).sum(-1)
            other_Q = links_QC.masked_fill(is_true_QC, -torch.inf).amax(-1)
            total_Q = total_Q + options.margin_weight * F.relu(MARGIN - (true_Q - other_Q))
        if regret_QC is not None:
            total_Q = total_Q + options.penalty_weight * (log_q_QC.exp() * regret_QC).sum(-1)
        return total_Q


FAMILY = Family(
    name="lilicorr",
    summary=(
        "DFlash's block of masked places, and a choice among the likeliest tokens of each place by "
        "a small network that has looked at all of them together. The network runs once a draft, "
        "after which a token costs a look-up and a product of a few short vectors."
    ),
    paper="https://arxiv.org/abs/2608.20530",
    options=LiLiCorrOptions,
    build=LiLiCorr,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
