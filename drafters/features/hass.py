"""HASS (arXiv 2408.15766): EAGLE's layer, trained on the states that it reads when it drafts.

Harmonised context alignment: training is unrolled over `ttt_steps` forwards. In forward j the layer
reads its own output of forward j - 1 (no gradient goes through it), and attends to true features
far back but to its own outputs of forwards 1 .. j nearest by, as after j drafted tokens. Harmonised
objective: besides the loss over the whole distribution, -sum p log q over the target's `top`
likeliest tokens, since nothing else will be drafted. The three losses weigh 10 (features), 1 (all
tokens) and 10 (the likeliest): the paper's 1, 0.1 and 1. The disallowed keys are masked before the
softmax.
Letters: D hidden width, R flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.core.batch import LossOut
from specctl.core.drafter import Family
from specctl.drafters.frames.feature_drafter import AxesOptions, FeatureDrafter
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import LinearHead, joined
from specctl.drafters.losses.step_losses import topk_loss
from specctl.drafters.losses.teacher import TeacherLogits
from specctl.drafters.option_checks import Count


@dataclass(frozen=True, slots=True)
class HassOptions(AxesOptions):
    """`top_weight` times the loss over the target's `top` likeliest tokens is added: as much as the
    features weigh, since the paper adds SmoothL1 1.0, all tokens 0.1 and top-K 1.0 (weights here
    are relative to that of all tokens)."""

    ttt_steps: int = 3
    top: Count = 10
    top_weight: float = 10.0


class Hass(FeatureDrafter):
    """EAGLE's module, HASS's training."""

    family = "hass"
    splits_rows = True
    options: HassOptions

    def term(
        self, out: LossOut, ready_RD: Tensor, rows: AlignedRows, teacher: TeacherLogits | None
    ) -> LossOut:
        if teacher is None or self.options.top_weight == 0.0:
            return out
        head = LinearHead(self.head_weight())
        likely = topk_loss(ready_RD, head, rows, self.vocab, teacher, self.options.top)
        return joined(out, likely, self.options.top_weight)


FAMILY = Family(
    name="hass",
    summary=(
        "EAGLE's decoder layer, but trained on its own outputs for several steps and with weight "
        "on the target's likeliest tokens, so that acceptance holds up deeper into a draft. Costs "
        "the same to serve as EAGLE and a few times more to train; take it where drafts of three "
        "and more tokens pay."
    ),
    paper="https://arxiv.org/abs/2408.15766",
    options=HassOptions,
    build=Hass,
    trainable=True,
    policies=("dynamic-tree", "chain"),
)
