"""CORAL (arXiv 2502.16880): HASS whose steps agree, with an LM head that is read in parts.

Cross-step representation alignment: over the unrolled steps, states that stand for the same feature
of the target are drawn together and others apart (InfoNCE over cosines), so that a feature looks
alike however many drafted tokens stand before it. Routed head: a small router picks the groups of
the LM head's rows that are multiplied at all (see nets/routed); without them the head is more than
half of drafting at a vocabulary of 128k. The alignment is added to HASS's losses with a tenth of
the weight of its features (on this scale 1, beside 10, 1 and 10); that tenth and the temperature
are our choice, the paper's are not known to us.
Letters: B rows, D hidden width, Q picked rows, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.features.hass import Hass, HassOptions
from specctl.drafters.frames.feature_drafter import Unrolled
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import joined, with_stretch
from specctl.drafters.losses.step_losses import agreement_loss
from specctl.drafters.nets.heads import draft_size
from specctl.drafters.nets.routed import add_router, check_routing


@dataclass(frozen=True, slots=True)
class CoralOptions(HassOptions):
    """`align_weight` times the alignment at `align_temperature` is added, all tokens weighing 1.
    `head_groups` splits the LM head's rows, of which the `head_top` best groups are read; None
    reads all."""

    align_weight: float = 1.0
    align_temperature: float = 0.07
    head_groups: int | None = None
    head_top: int = 4

    def __post_init__(self) -> None:
        HassOptions.__post_init__(self)
        check_routing(self.head_groups, self.head_top)


class Coral(Hass):
    """HASS's module and loss, the alignment, and the router."""

    family = "coral"
    options: CoralOptions

    def __init__(
        self, options: CoralOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        rows = draft_size(vocab, spec.vocab_size)
        self.router = add_router(
            self.module, spec.hidden_size, rows, options.head_groups, options.head_top
        )

    def whole_loss(self, out: LossOut, steps: list[Unrolled], batch: TrainBatch) -> LossOut:
        """The alignment looks at whole rows: processes that share them gather the states, and each
        compares its share of the slices."""
        states, part, length = [step.state_BSD for step in steps], batch.part, batch.ids_BS.shape[1]
        if part is not None:
            states = [part.gathered(state_BSD, length, dim=1) for state_BSD in states]
        deepest = aim(replace(batch, part=None), 1 + len(steps)).row_Q
        rows = [deepest + len(steps) - 1 - step for step in range(len(steps))]
        flat = [state_BSD.flatten(0, 1) for state_BSD in states]
        share = (0, 1) if part is None else (part.index, part.count)
        alike = agreement_loss(flat, rows, self.options.align_temperature, share)
        return with_stretch(joined(out, alike, self.options.align_weight), states)


FAMILY = Family(
    name="coral",
    summary=(
        "HASS with one more aim, that the drafter's states of one feature agree however deep in a "
        "draft they were made, and with a routed LM head that multiplies only the likely groups of "
        "its rows. Take it for targets with a large vocabulary, where the LM head is most of what "
        "drafting costs: a little acceptance is given for a lot of time."
    ),
    paper="https://arxiv.org/abs/2502.16880",
    options=CoralOptions,
    build=Coral,
    trainable=True,
    policies=("dynamic-tree", "chain"),
)
