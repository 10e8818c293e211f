"""Options of drafters that write several tokens a forward (`falcon`, `flash`)."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.errors import RecipeError
from specctl.drafters.frames.feature_drafter import FeatureOptions


@dataclass(frozen=True, slots=True)
class StridedOptions(FeatureOptions):
    """`stride` tokens a forward, which is not fed back to itself in training."""

    noise: float = 0.1
    stride: int = 2

    def __post_init__(self) -> None:
        FeatureOptions.__post_init__(self)
        if self.ttt_steps != 1:
            raise RecipeError(
                "drafters of several tokens a forward are not unrolled in training",
                where="drafter.options.ttt_steps",
                found=str(self.ttt_steps),
                expected="1",
                do="set how many tokens a pass drafts with drafter.options.stride",
            )

    @property
    def num_heads(self) -> int:
        """Distributions that a row is trained on."""
        return self.stride
