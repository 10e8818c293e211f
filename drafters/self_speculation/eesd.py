"""EESD (arXiv 2406.03853): an early exit of one trained layer, stopped by Thompson sampling.

A whole decoder layer and a norm behind the target's first layers learn what the target says of its
own text (self-distillation); the LM head is the target's. How far to draft is a coin of unknown
bias: behind each token acceptance is drawn from its Beta posterior, which the drafter's own
confidence corrects (stop rule thompson, the paper's calibrated Thompson sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.exit_drafter import ExitOptions, LayerExit
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape


@dataclass(frozen=True, slots=True)
class EesdOptions(ExitOptions):
    """`layers`: None takes an eighth of the target's layers. `intermediate` is the width of the
    MLP, None the target's."""

    intermediate: int | None = None


class Eesd(LayerExit):
    """A decoder layer behind the exit."""

    family = "eesd"
    options: EesdOptions

    def make_layer(self, shape: LayerShape) -> DecoderLayer:
        return DecoderLayer(LayerShape.of(self.spec, self.options.intermediate))

    def usual_layers(self, spec: ModelSpec) -> int:
        return max(1, spec.num_layers // 8)


FAMILY = Family(
    name="eesd",
    summary=(
        "The target's first layers, one trained decoder layer and the target's own LM head draft. "
        "More weights than Kangaroo's adapter and more of the target in them; the draft length is "
        "found by Thompson sampling while it serves."
    ),
    paper="https://arxiv.org/abs/2406.03853",
    options=EesdOptions,
    build=Eesd,
    trainable=True,
    policies=("chain",),
    borrows_layers=True,
)
