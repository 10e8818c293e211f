"""Fewer layers the further ahead: SkipDecode (arXiv 2307.02628) and D3 (2503.08524) as drafts.

Both give a token as many layers as its place in the text asks for and leave out middle ones. Alone
they change the text; here the place is that in the draft, and the target verifies, so that nothing
changes. Draft token i (the first is 0) runs n(i) layers:

    skip-decode   n falls linearly from `most` to `least` of the layers over `over` tokens; the
                  first `warm_up` layers always run, then the uppermost
    d3            floor(most L alpha^i), half of them the lowest, half the uppermost (head and tail
                  are the paper's core; that the innermost layers go first is our choice)

A layer that runs for a token has run for every token of the draft before it, so no key is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from specctl.core.drafter import Family, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter, UnverifiedOptions
from specctl.drafters.option_checks import Count, OneOf, Options, check_options
from specctl.drafters.states.borrowed_state import BorrowedState

SCHEDULES = ("skip-decode", "d3")


@dataclass(frozen=True, slots=True)
class DepthDecayOptions(UnverifiedOptions):
    """Shares of the target's layers: `most` for the first drafted token, never fewer than `least`.
    `over`: tokens after which skip-decode is at its least; `warm_up`: its lowest layers; `alpha`:
    the decay of d3."""

    schedule: Annotated[str, OneOf(SCHEDULES)] = "skip-decode"
    most: float = 0.75
    least: float = 0.375
    over: Count = 4
    warm_up: Count = 1
    alpha: float = 0.9

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        is_right = 0.0 < self.least <= self.most <= 1.0 and 0.0 < self.alpha <= 1.0
        check_options(
            self, is_right, ("most", "least", "alpha"), "shares above 0, up to 1, least <= most"
        )

    def count(self, index: int, num_layers: int) -> int:
        """Layers that draft token `index` runs."""
        if self.schedule == "d3":
            share = self.most * self.alpha**index
        else:
            share = self.most - (self.most - self.least) * min(index / self.over, 1.0)
        return max(1, int(max(share, self.least) * num_layers))

    def parts(self, index: int, num_layers: int) -> SubLayers:
        """The lowest and the uppermost layers, so many in all."""
        count = self.count(index, num_layers)
        low = (count + 1) // 2 if self.schedule == "d3" else min(self.warm_up, count)
        layers = (*range(low), *range(num_layers - (count - low), num_layers))
        return SubLayers(layers, layers)


class DepthDecay(SelfDrafter):
    """What runs for the first drafted token may run for any."""

    family = "depth-decay"
    shares_kv = True
    options: DepthDecayOptions

    def __init__(
        self, options: DepthDecayOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.lossless = options.unverified is None

    @property
    def attention(self) -> tuple[int, ...]:
        return self.options.parts(0, self.spec.num_layers).attention

    def open(self, space: Space) -> DepthDecayState:
        return DepthDecayState(self, self.lm, space)


class DepthDecayState(BorrowedState):
    """Node i of a chain is read for draft token i + 1, the root for the first."""

    def __init__(self, drafter: DepthDecay, lm: LanguageModel, space: Space) -> None:
        super().__init__(lm, drafter.attention, space)
        self.options, self.least = drafter.options, drafter.options.unverified

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self.options.parts(first, self.lm.spec.num_layers)


FAMILY = Family(
    name="depth-decay",
    summary=(
        "The target without its middle layers drafts, with fewer layers for every further token of "
        "a draft, as the chance that it is reached falls (SkipDecode, D3). Nothing to train; the "
        "whole target verifies, so that the text is its own."
    ),
    paper="https://arxiv.org/abs/2307.02628",
    options=DepthDecayOptions,
    build=DepthDecay,
    trainable=False,
    policies=("chain",),
    borrows_layers=True,
)
