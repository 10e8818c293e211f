"""DSpark (arXiv 2607.05147): DFlash's block, corrected token by token, and cut where it is unsure.

The slots of a block do not see each other's tokens. So the logits of a slot get a bias of low rank
that depends on the token before it, W2 W1[x], trained on the text's tokens and applied from left to
right while drafting: the block is still one pass, the correction a small product per token. Slot 0
predicts the token behind the root (sample from anchor). A confidence head on the same states is
trained on the analytic acceptance sum_v min(p, q), detached; the stop rule confidence-head ends a
draft where the product of its estimates falls below a threshold.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, O output width (D + rank), Q picked
rows, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Family, Space
from specctl.core.spec import ModelSpec
from specctl.drafters.dflash import DFlashOptions, InjectedBlocks, InjectedNet
from specctl.drafters.losses.align import shifted
from specctl.drafters.losses.divergences import acceptance, distributions
from specctl.drafters.losses.head_losses import joined
from specctl.drafters.losses.teacher import wide
from specctl.drafters.nets.head_drafter import HeadLearned
from specctl.drafters.option_checks import CountOrZero
from specctl.drafters.states.head_state import GroundedState


@dataclass(frozen=True, slots=True)
class DSparkOptions(DFlashOptions):
    """DFlash's options, the rank of the correction (0 = none) and the weight of the confidence
    head's loss."""

    rank: CountOrZero = 32
    confidence_weight: float = 0.1


class SparkNet(InjectedNet):
    """DFlash's module with the correction and the confidence head."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DSparkOptions, rows: int) -> None:
        super().__init__(spec, num_taps, options)
        self.before = nn.Embedding(spec.vocab_size, options.rank)
        self.bias = nn.Linear(options.rank, rows, bias=False)
        self.confidence = nn.Linear(spec.hidden_size + options.rank, 1)
        nn.init.zeros_(self.bias.weight)


class DSpark(InjectedBlocks):
    """The carry is every slot's state and W1 of the token before the one to predict."""

    family = "dspark"
    splits_rows = True
    module: SparkNet
    first_slot = 0

    def make_net(self, rows: int) -> SparkNet:
        return SparkNet(self.spec, len(self.own_taps), self.options, rows)

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.bias]

    def head_weights(self) -> list[Tensor]:
        """[K, O]: the target's rows beside the correction's."""
        return [torch.cat([super().head_weights()[0], self.module.bias.weight], dim=1)]

    def open(self, space: Space) -> DraftState:
        return SparkState(self, self.features(space))

    def begin(self, state_XD: Tensor) -> Tensor:
        return F.pad(state_XD, (0, self.options.rank))

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        states_XY = carry_XY[..., : carry_XY.shape[-1] - self.options.rank]
        return torch.cat([states_XY, self.module.before(ids_X)], dim=-1)

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        before_Xr = carry_XY[..., carry_XY.shape[-1] - self.options.rank :]
        slot = min(depth, self.options.num_heads - 1)
        return torch.cat([super().ready(slot, carry_XY), before_Xr], dim=-1)

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        for index, state_BSD in enumerate(super().unroll(batch, anchor_BA)):
            before_BSr = self.module.before(batch.own(shifted(batch.ids_BS, 1 + index)))
            yield torch.cat([state_BSD, before_BSr.to(state_BSD)], dim=-1)

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
        guess_Q = wide(self.module.confidence(ready_QO)[:, 0])
        loss = F.binary_cross_entropy_with_logits(guess_Q, alpha_Q.to(guess_Q), reduction="sum")
        number = torch.full((), float(len(alpha_Q)), device=loss.device)
        bias = (guess_Q.detach().sigmoid() - alpha_Q).sum()
        term = LossOut(loss, number, {"confidence_bias": (bias, number)})
        return joined(out, term, self.options.confidence_weight)


class SparkState(GroundedState):
    """Estimates the acceptance of the newest node."""

    def confidence(self) -> Tensor:
        assert isinstance(self.drafter, DSpark)
        guess_B1: Tensor = self.drafter.module.confidence(self.hidden())
        return guess_B1[:, 0].float().sigmoid()


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
