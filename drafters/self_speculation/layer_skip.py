"""LayerSkip (arXiv 2404.16710): the target drafts by leaving early, through its own norm and head.

The first `layers` layers read a token, the final norm and the LM head say what comes next, and the
whole target verifies. Nothing is added to the target and nothing is trained here: targets that were
trained to be read early (LayerSkip's layer dropout and early-exit loss) draft well, others little.
The keys and values of the layers that drafted are exactly those of the target, whose inputs they
share: they are written to the target's own cache, and where it is faster the verification runs the
upper layers alone at tokens that were read while drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.drafter import Family, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter, UnverifiedOptions, check_layer
from specctl.drafters.states.borrowed_state import FixedState


@dataclass(frozen=True, slots=True)
class LayerSkipOptions(UnverifiedOptions):
    """`layers`: how many of the target's layers draft; None takes a quarter of them. `unverified`
    is how FREE (arXiv 2310.05424) answers: what the exit is sure of stays, and the whole target
    reads it at once before it says the next token."""

    layers: int | None = None


class LayerSkip(SelfDrafter):
    """The lower layers."""

    family = "layer-skip"
    shares_kv = True
    options: LayerSkipOptions

    def __init__(
        self, options: LayerSkipOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        layers = max(1, spec.num_layers // 4) if options.layers is None else options.layers
        self.parts = SubLayers.span(0, check_layer("layers", layers, spec.num_layers))
        self.lossless = options.unverified is None

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    def open(self, space: Space) -> FixedState:
        return FixedState(self.lm, self.parts, space, self.options.unverified)


FAMILY = Family(
    name="layer-skip",
    summary=(
        "No second model: the target's lower layers draft through its own final norm and LM head, "
        "and the whole target verifies. Made for targets that were trained to be read early, such "
        "as the published LayerSkip checkpoints; of other targets little is accepted."
    ),
    paper="https://arxiv.org/abs/2404.16710",
    options=LayerSkipOptions,
    build=LayerSkip,
    trainable=False,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
