"""DSpark (arXiv 2607.05147): DFlash's block, corrected token by token, and cut where it is unsure.

The slots of a block do not see each other's tokens. So the logits of a slot get a bias of low rank
that depends on the tokens before it, trained on the text's tokens and applied from left to right
while drafting: the block is still one pass, the correction a small product per token. Slot 0
predicts the token behind the root (sample from anchor). With e = W1[x] of the token before and h
of the slot, the bias is W2 f:

plain   f = e
gated   f = sigmoid(G [h; e]) * e
rnn     (g, c, o) = J [s; e; h],  f = tanh(o),  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)

A confidence head on [h; e] is trained on the analytic acceptance sum_v min(p, q), detached; the
stop rule confidence-head ends a draft where the product of its estimates falls below a threshold.
Letters: B rows, D hidden width, K draft vocabulary, M new nodes, O output width (the rank), P path,
Q picked rows, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Family, Space
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.drafters.blocks.corrected_blocks import LowRankBlocks
from specctl.drafters.blocks.corrected_state import CorrectedState
from specctl.drafters.blocks.dflash import DFlashOptions, InjectedNet
from specctl.drafters.corrections.cascade import CascadedCorrection
from specctl.drafters.corrections.correction import Correction, FilledBlock, LowRankBias, at_depth
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.align import shifted
from specctl.drafters.losses.divergences import acceptance, distributions
from specctl.drafters.losses.head_losses import joined
from specctl.drafters.losses.teacher import wide
from specctl.drafters.nets.options import ADDED, SERVED
from specctl.drafters.option_checks import CountOrZero, OneOf, Within

PLAIN, GATED, RNN = "plain", "gated", "rnn"


@dataclass(frozen=True, slots=True)
class DSparkOptions(DFlashOptions):
    """DFlash's options, the rank of the correction (0 = none), the weight of the confidence head's
    loss, and what the correction makes of a token (`correction`). `cascade`: of the so many
    likeliest tokens of each place the likeliest chain is drafted, not the likeliest token behind
    the one before (`plain` and `gated`)."""

    rank: CountOrZero = 32
    confidence_weight: float = 0.1
    correction: Annotated[str, OneOf((PLAIN, GATED, RNN))] = field(default=PLAIN, metadata=ADDED)
    cascade: Annotated[int, Within(1, 64)] | None = field(default=None, metadata=SERVED)

    def __post_init__(self) -> None:
        DFlashOptions.__post_init__(self)
        if self.rank == 0 and self.correction != PLAIN:
            raise RecipeError(
                f"a {self.correction} correction has a rank",
                where="drafter.options.rank",
                found="rank: 0",
                expected="1 or more",
                do="write rank: 32, or correction: plain for a block without a correction",
            )
        if self.cascade is not None and self.correction == RNN:
            raise RecipeError(
                "a cascade needs a correction that looks one token back",
                where="drafter.options.cascade",
                found=f"cascade: {self.cascade}, correction: {RNN}",
                expected=f"correction: {PLAIN} or {GATED}",
                do="leave cascade out",
            )


class SparkNet(InjectedNet):
    """DFlash's module with the correction and the confidence head."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DSparkOptions, rows: int) -> None:
        super().__init__(spec, num_taps, options)
        width, rank = spec.hidden_size, options.rank
        self.before = nn.Embedding(spec.vocab_size, rank)
        self.bias = nn.Linear(rank, rows, bias=False)
        self.confidence = nn.Linear(width + rank, 1)
        if options.correction == GATED:
            self.gate = nn.Linear(width + rank, rank)
        elif options.correction == RNN:
            self.joint = nn.Linear(2 * rank + width, 3 * rank)
        nn.init.zeros_(self.bias.weight)


class PlainCorrection(LowRankBias):
    """The carry is e."""

    first_order = True

    def __init__(self, net: SparkNet, num_carried: int = 1) -> None:
        super().__init__(net.bias.weight, num_carried * net.before.embedding_dim)
        self.net = net

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        before_XMO: Tensor = self.net.before(ids_XM)
        return before_XMO.to(shared.states_XPD)

    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        return self.token(carry_XMY)

    def token(self, carry_XMY: Tensor) -> Tensor:
        """[X, M, O]: e of the newest token."""
        return carry_XMY[..., carry_XMY.shape[-1] - self.net.before.embedding_dim :]


class GatedCorrection(PlainCorrection):
    """The slot says how much of e counts."""

    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        state_XMD = at_depth(block.states_XPD, depth_XM)
        gate_XMO: Tensor = self.net.gate(torch.cat([state_XMD, carry_XMY], dim=-1))
        return gate_XMO.sigmoid() * carry_XMY


class RnnCorrection(PlainCorrection):
    """The carry is [s', f, e]: the whole path is remembered."""

    first_order = False

    def __init__(self, net: SparkNet) -> None:
        super().__init__(net, num_carried=3)

    def read(
        self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        before_XMO = super().read(shared, depth_XM, carry_XMY, ids_XM)
        memory_XMO = carry_XMY.chunk(3, dim=-1)[0]
        state_XMD = at_depth(shared.states_XPD, depth_XM)
        joint: Tensor = self.net.joint(torch.cat([memory_XMO, before_XMO, state_XMD], dim=-1))
        gate_XMO, new_XMO, out_XMO = joint.chunk(3, dim=-1)
        gate_XMO = gate_XMO.sigmoid()
        memory_XMO = gate_XMO * memory_XMO + (1.0 - gate_XMO) * new_XMO.tanh()
        return torch.cat([memory_XMO, out_XMO.tanh(), before_XMO], dim=-1).to(state_XMD)

    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        return carry_XMY.chunk(3, dim=-1)[1]


CORRECTIONS: dict[str, type[PlainCorrection]] = {
    PLAIN: PlainCorrection,
    GATED: GatedCorrection,
    RNN: RnnCorrection,
}


class DSpark(LowRankBlocks):
    """A block that says how sure it is of each token."""

    family = "dspark"
    module: SparkNet

    def make_net(self, rows: int) -> SparkNet:
        return SparkNet(self.spec, len(self.own_taps), self.options, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.bias]

    @property
    def correction(self) -> PlainCorrection:
        kind = CORRECTIONS[self.options.correction]
        return kind(self.module)

    def open(self, space: Space) -> DraftState:
        return SparkState(self, self.features(space))

    def sure(self, state_XD: Tensor, before_XO: Tensor) -> Tensor:
        """[X]: the logit of how likely the slot's token is to be accepted."""
        out_X1: Tensor = self.module.confidence(torch.cat([state_XD, before_XO], dim=-1))
        return wide(out_X1[..., 0])

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """With the confidence head's loss, where the target's distribution is at hand."""
        if learned.teacher is None:
            return out
        rows, ids_K = learned.rows, None if self.vocab is None else self.vocab.ids_K
        ready_QO = learned.ready_RO[rows.row_Q].detach()
        with torch.no_grad():
            log_p_QK = learned.teacher.distribution(rows.teacher_row_Q, ids_K).log_p_QK
            draft_QK = learned.head(ready_QO)
            temperature = self.options.temperature
            alpha_Q = acceptance(distributions(draft_QK, log_p_QK, temperature, ids_K is None))
            read_BS = batch.own(shifted(batch.ids_BS, 1 + learned.index))
            before_QO = self.module.before(read_BS.flatten()[rows.row_Q]).to(ready_QO)
        guess_Q = self.sure(ready_QO[:, : self.spec.hidden_size], before_QO)
        loss = F.binary_cross_entropy_with_logits(guess_Q, alpha_Q.to(guess_Q), reduction="sum")
        number = torch.full((), float(len(alpha_Q)), device=loss.device)
        bias = (guess_Q.detach().sigmoid() - alpha_Q).sum()
        term = LossOut(loss, number, {"confidence_bias": (bias, number)})
        return joined(out, term, self.options.confidence_weight)


class SparkState(CorrectedState):
    """Estimates the acceptance of the newest node."""

    @property
    def correction(self) -> Correction:
        assert isinstance(self.drafter, DSpark)
        inner, count = self.drafter.correction, self.drafter.options.cascade
        if count is None:
            return inner
        ids_K = None if self.drafter.vocab is None else self.drafter.vocab.ids_K
        return CascadedCorrection(inner, count, ids_K)

    def confidence(self) -> Tensor:
        assert isinstance(self.drafter, DSpark)
        slot_B1, carry_B1Y = self.newest()
        state_B1D = at_depth(self.block.states_XPD, slot_B1)
        token_B1O = self.drafter.correction.token(carry_B1Y)
        return self.drafter.sure(state_B1D, token_B1O)[:, 0].float().sigmoid()


FAMILY = Family(
    name="dspark",
    summary=(
        "DFlash's block of masked places with a small correction for the token before each of "
        "them, so that late places do not contradict early ones, and a head that estimates how "
        "likely a place is to be accepted, by which a draft is cut. Costs one pass of the layers "
        "and one product with the LM head per token."
    ),
    paper="https://arxiv.org/abs/2607.05147",
    options=DSparkOptions,
    build=DSpark,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree", "marginal-tree"),
)
