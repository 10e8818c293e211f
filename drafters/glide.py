"""GliDe (arXiv 2402.02082): a one-layer language model that glimpses at the target.

Its layer attends to the tokens of the text, then to what the target made of those that it has read,
then runs its MLP. The paper reads the keys and values of the target's last layer from its cache;
engines hand out states, so the drafter makes keys and values of the state that this layer reads,
by projections of its own. The newest tokens of a draft have no such state; training hides as much
(`strict`). The paper grows it into a caterpillar (policy cape): more candidates where it is unsure.
The embedding is the target's, the LM head its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from specctl.core.drafter import Family, Needs
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.cross_drafter import AttentionLayer, CrossDrafter, CrossNet, CrossOptions
from specctl.drafters.nets.heads import draft_size


@dataclass(frozen=True, slots=True)
class GlideOptions(CrossOptions):
    """`strict`: False is the ablation without the paper's block mask."""


class GlideNet(CrossNet):
    """The layer and an LM head of its own."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        shape = LayerShape.of(spec)
        super().__init__(AttentionLayer(shape), shape)
        self.lm_head = nn.Linear(spec.hidden_size, rows, bias=False)


class Glide(CrossDrafter):
    """Reads the state that the target's last layer reads."""

    family: ClassVar[str] = "glide"
    module: GlideNet

    def __init__(
        self, options: GlideOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.module = GlideNet(spec, draft_size(vocab, spec.vocab_size))

    def needs(self) -> Needs:
        tap = self.spec.num_layers - 1
        return Needs((tap,), teacher=self.options.loss != "ce", borrow=True)

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.spec.num_layers - 1].to(self.dtype)

    def own_heads(self) -> list[nn.Linear]:
        return [self.module.lm_head]

    @property
    def net(self) -> GlideNet:
        return self.module


FAMILY = Family(
    name="glide",
    summary=(
        "A language model of one layer that attends to the tokens of the text and, beside them, to "
        "the states of the target. As cheap per token as EAGLE's layer, and it needs no state of "
        "its own fed back, so that a rejected draft leaves nothing to repair. Meant for "
        "caterpillar trees: more candidates where it is unsure."
    ),
    paper="https://arxiv.org/abs/2402.02082",
    options=GlideOptions,
    build=Glide,
    trainable=True,
    policies=("cape", "chain", "dynamic-tree", "static-tree"),
)
