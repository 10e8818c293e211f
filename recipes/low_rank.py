"""Low-rank additions to weights as a recipe describes them: to a drafter's, and to the target's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specctl.recipes.section import Fraction, Section

# Ways in which the target learns alone, and the family that then drafts with it.
ALONE = {"noise": "tr-jacobi", "trajectory": "jacobi", "early_exit": "layer-skip"}


class LoraPart(Section):
    """Train small additions to frozen weights instead of the weights (LoRA)."""

    rank: Annotated[int, Field(ge=1, le=10_000)] = 8
    alpha: Annotated[float, Field(gt=0.0)] = Field(
        default=16.0, description="the addition is scaled by alpha / rank"
    )
    targets: tuple[str, ...] | None = Field(
        default=None, description="endings of the weights that are adapted; null: hidden matrices"
    )
    keep: bool = Field(
        default=False, description="also write the additions as an adapter of peft, OUT/adapter"
    )


class NoisePart(Section):
    """The target learns to predict behind wrong tokens (Make Some Noise): of every so many tokens a
    span is replaced by random tokens of what stands before it, in the input alone."""

    span: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=5, description="tokens that are replaced together"
    )
    every: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=64, description="one span in so many tokens"
    )

    @model_validator(mode="after")
    def _check(self) -> NoisePart:
        if self.span > self.every:
            raise ValueError(f"span {self.span} is longer than every {self.every}")
        return self


class TrajectoryPart(Section):
    """The target learns to say behind any state of a Jacobi trajectory what it says behind its end
    (consistency LLM): one window of every document is iterated from random tokens."""

    window: Annotated[int, Field(ge=2, le=10_000)] = Field(
        default=16, description="tokens that Jacobi decoding guesses at once"
    )
    most: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=4, description="most iterations; how many is drawn for every row and step"
    )
    weight: Annotated[float, Field(gt=0.0, le=100.0)] = Field(
        default=1.0, description="of the consistency loss beside the target's own"
    )


class EarlyExitPart(Section):
    """The target learns to be read early (LayerSkip): the final norm and the LM head behind its
    lower layers are to say what the whole says, and layers are dropped, upper ones more often."""

    scale: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=1.0, description="weight of the exits against the last layer (e_scale)"
    )
    every: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=4,
        description="one layer in so many has a loss, which of them is drawn for every batch "
        "(rotational curriculum); null: exits join from the last layer down over the first half of "
        "the steps (gradual)",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.1, description="how often the last layer is left out of a row in training (p_max)"
    )


class JointPart(Section):
    """Train additions to the TARGET together with the drafter (Medusa-2). OUT/target is another
    model than the one given, and the drafter is for that one."""

    rank: Annotated[int, Field(ge=1, le=10_000)] = 32
    alpha: Annotated[float, Field(gt=0.0)] = Field(
        default=16.0, description="the addition is scaled by alpha / rank"
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="endings of the target's weights that change; null: every hidden matrix",
    )
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.25, description="share of the learning rate that the additions learn at"
    )
    warmup: Fraction = Field(
        default=0.25, description="share of the steps in which the drafter alone learns"
    )
    ramp: Fraction = Field(
        default=0.0, description="share of the steps after that in which weight grows from 0"
    )
    weight: Annotated[float, Field(ge=0.0, le=100.0)] = Field(
        default=0.2, description="of the drafter's loss in what the target learns (lambda 0)"
    )
    keep: Literal["kl", "ce", "none"] = Field(
        default="kl",
        description="the target's own loss: stay near what it said before (kl), predict the text "
        "(ce), or nothing, which lets it drift",
    )
    noise: NoisePart | None = Field(
        default=None,
        description="for a family without weights: the target alone learns, to predict behind "
        "wrong tokens; its own loss (keep) is over noised text",
    )
    trajectory: TrajectoryPart | None = Field(
        default=None,
        description="for a family without weights: the target alone learns, to end Jacobi "
        "decoding early; its own loss (keep) is over the text",
    )

    early_exit: EarlyExitPart | None = Field(
        default=None,
        description="for a family without weights: the target alone learns, to say behind its "
        "lower layers what it says behind all; its own loss (keep) is that of every exit",
    )

    @property
    def alone(self) -> str | None:
        """The way in which the target learns for a family without weights, if it does."""
        return next((way for way in ALONE if getattr(self, way) is not None), None)

    @model_validator(mode="after")
    def _check(self) -> JointPart:
        ways = [way for way in ALONE if getattr(self, way) is not None]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are two ways to train the target: set one")
        return self
