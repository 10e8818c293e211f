"""Kangaroo (arXiv 2404.18911): two of the target's layers and a trained attention draft.

The adapter is a norm, an attention with keys and values of its own, and a norm; it has no MLP. The
embedding, the lower layers and the LM head are the target's. It learns the cross-entropy of q
against the target's own distribution, and nothing else. Drafting stops behind a token of which the
drafter was less sure than 0.6, the paper's second early exit (`serve.confidence`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.cross_drafter import AttentionLayer
from specctl.drafters.frames.exit_drafter import ExitOptions, LayerExit
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape


@dataclass(frozen=True, slots=True)
class KangarooOptions(ExitOptions):
    """`layers`: None takes 2 of the target's layers, 3 of one of 40 or more. `mlp` gives the
    adapter an MLP (an ablation: twice to four times the weights)."""

    mlp: bool = False


class Kangaroo(LayerExit):
    """An attention behind the exit."""

    family = "kangaroo"
    options: KangarooOptions

    def make_layer(self, shape: LayerShape) -> DecoderLayer:
        return DecoderLayer(shape) if self.options.mlp else AttentionLayer(shape)

    def usual_layers(self, spec: ModelSpec) -> int:
        return min(2 if spec.num_layers < 40 else 3, spec.num_layers - 1)


FAMILY = Family(
    name="kangaroo",
    summary=(
        "The target's first layers, a trained attention and the target's own LM head draft. A "
        "tenth of the weights of Medusa's heads, and nothing of the target is changed. Stops "
        "where it is unsure, which is part of the method."
    ),
    paper="https://arxiv.org/abs/2404.18911",
    options=KangarooOptions,
    build=Kangaroo,
    trainable=True,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
