"""Mixture of Attentions (arXiv 2410.03804): attention over layers, over the text, and across.

What the target made of a token is summed up once per verification: its states at all depths attend
to each other along the depth, in both directions, and their mean is what cross-attention reads
(layer self-attention; the paper takes keys and values of every layer, of which the states are what
engines hand out). Drafted tokens go through a causal layer over the text, then through a layer that
attends to those summaries, of which a draft sees the ones up to its beginning (`strict`, the T-step
bound). The last state is pulled towards the target's own and read by the target's LM head.
Letters: D hidden width, I input width (taps x D), L positions (one per tap), R flat rows, X any
axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, Needs
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, attending
from specctl.drafters.nets.cross_drafter import CrossDrafter, CrossNet, CrossOptions
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.recompute import is_large, run


@dataclass(frozen=True, slots=True)
class MoaOptions(CrossOptions):
    """`layer_attention`: False takes the mean of the states as they are (an ablation).
    `feature_weight`: of the distance to the target's last state, beside 1 of the distributions (the
    paper's 1 and 0.1). `staircase`: in the first half of training some batches, all at the
    beginning and fewer and fewer, hide the text before a draft from its tokens' own attention, as
    the paper's do."""

    layer_attention: bool = True
    feature_weight: float = 10.0
    staircase: bool = field(default=False, metadata=ADDED)


class MoaNet(CrossNet):
    """The three attentions."""

    def __init__(self, spec: ModelSpec, has_layer_attention: bool) -> None:
        shape = LayerShape.of(spec)
        super().__init__(DecoderLayer(shape), shape)
        self.along = DecoderLayer(shape) if has_layer_attention else None


class Moa(CrossDrafter):
    """Reads every depth of the target behind its embedding."""

    family: ClassVar[str] = "moa"
    module: MoaNet

    def __init__(self, options: MoaOptions, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.feature_weight = options.feature_weight
        self.module = MoaNet(spec, options.layer_attention)
        self.own_taps = tuple(range(1, spec.num_layers + 1))

    def is_staircase(self, batch: TrainBatch) -> bool:
        """The share of batches that see the whole text rises linearly to 1 at mid-training."""
        if not (self.options.staircase and torch.is_grad_enabled()):
            return False
        return bool(torch.rand(()) >= 2 * batch.progress)

    def needs(self) -> Needs:
        return Needs(self.own_taps, teacher=self.options.loss != "ce", borrow=True)

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return torch.cat([taps[tap].to(self.dtype) for tap in self.own_taps], dim=-1)

    def summary(self, features_XI: Tensor) -> Tensor:
        depth_RLD = features_XI.reshape(-1, len(self.own_taps), self.spec.hidden_size)
        if self.module.along is not None:
            at_L = torch.arange(len(self.own_taps), device=depth_RLD.device)
            rope = self.rope(at_L[None]).expand(len(depth_RLD), -1, -1, -1)
            again = is_large(depth_RLD[..., 0].numel(), 1, self.spec.hidden_size, 0)
            depth_RLD = run(again, self.module.along, depth_RLD, rope, attending(None))
        return depth_RLD.mean(1).view(*features_XI.shape[:-1], -1)

    @property
    def num_features(self) -> int:
        return len(self.own_taps) * self.spec.hidden_size

    def own_heads(self) -> list[nn.Linear]:
        return []

    @property
    def net(self) -> MoaNet:
        return self.module


FAMILY = Family(
    name="moa",
    summary=(
        "A small causal layer over the text, and beside it a layer that attends to what the target "
        "made of every token at all of its depths, summed up by attention along the depth once per "
        "round. Sees more of the target than drafters that read a few depths, and costs no more "
        "per drafted token."
    ),
    paper="https://arxiv.org/abs/2410.03804",
    options=MoaOptions,
    build=Moa,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
