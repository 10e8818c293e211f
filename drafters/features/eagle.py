"""EAGLE (arXiv 2401.15077), grown as a context-dependent tree as in EAGLE-2 (arXiv 2406.16858).

One decoder layer without an input norm on fc(cat(embedding of token t + 1, f_t)) regresses f_{t+1};
the target's frozen LM head reads it. Shifting the token one ahead of the feature tells the layer
which token was drawn, which f_t alone leaves open. Uniform noise on the features while training
stands for the errors that the drafter will feed back to itself. EAGLE-2 adds nothing that is
trained: confident drafts decide where the tree grows (`dynamic-tree`).
Letters: D hidden width, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.drafter import Family
from specctl.drafters.frames.feature_drafter import AxesOptions, FeatureDrafter
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.trunk import TrunkNet


@dataclass(frozen=True, slots=True)
class EagleOptions(AxesOptions):
    """`read_tokens` False hides the token that follows the feature (an ablation)."""

    noise: float = 0.1
    read_tokens: bool = True


class BlindNet(TrunkNet):
    """Reads features only."""

    def mix(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        return super().mix(torch.zeros_like(embedding_XD), state_XD)


class Eagle(FeatureDrafter):
    """EAGLE-1's module and loss."""

    family = "eagle"
    splits_rows = True
    options: EagleOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return TrunkNet(shape) if self.options.read_tokens else BlindNet(shape)


FAMILY = Family(
    name="eagle",
    summary=(
        "One decoder layer that predicts the target's own last state from the state before it and "
        "the newest token, read by the target's own LM head. Small, quick to train, and the ground "
        "that HASS, FSPAD, CORAL, Jakiro and Gumiho build on. It is trained on true features only, "
        "so its drafts fade with depth; EAGLE-3 or HASS fade less."
    ),
    paper="https://arxiv.org/abs/2406.16858",
    options=EagleOptions,
    build=Eagle,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
