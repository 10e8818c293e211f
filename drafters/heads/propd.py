"""ProPD (arXiv 2402.13485): Medusa's heads, and an early head that prunes their tree.

The early head reads the target's residual behind `early_layer` of its layers and predicts the next
token, t + 1 at position t, as the target's own head does behind all of them: a norm, a residual
block and an LM head of its own over the draft vocabulary, trained beside the drafting heads on the
target's distribution. While a tree is verified, its best tokens at a parent decide which children
the upper layers read (runtime/engine/early_pruning.py, serve.early_layer).
Letters: B rows, D hidden width, K draft vocabulary, S sequence, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs
from specctl.core.errors import RecipeError
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.heads.medusa import Medusa, MedusaOptions
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, head_loss, joined, with_stretch
from specctl.drafters.nets.blocks import RmsNorm
from specctl.drafters.nets.heads import ResBlock, head_rows
from specctl.drafters.option_checks import Within


@dataclass(frozen=True, slots=True)
class ProPDOptions(MedusaOptions):
    """Those of Medusa. `early_layer`: layers below the early head; None: half of the target's.
    `early_weight`: of its loss beside that of the drafting heads."""

    early_layer: int | None = None
    early_weight: Annotated[float, Within(0, 100)] = 1.0


class EarlyHead(nn.Module):
    """Norm, residual block (the identity at first) and LM head."""

    def __init__(self, width: int, rows: int, eps: float) -> None:
        super().__init__()
        self.norm = RmsNorm(width, eps)
        self.block = ResBlock(width)
        self.head = nn.Linear(width, rows, bias=False)

    def ready(self, residual_XD: Tensor) -> Tensor:
        """[X, D]: what the LM head reads."""
        ready_XD: Tensor = self.block(self.norm(residual_XD))
        return ready_XD


class ProPD(Medusa):
    """Medusa's heads come first in `module`, the early head last."""

    family = "propd"
    options: ProPDOptions

    def __init__(
        self, options: ProPDOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        most = spec.num_layers - 1
        layer = max(1, spec.num_layers // 2) if options.early_layer is None else options.early_layer
        if not 0 < layer <= most:
            raise RecipeError(
                "an early head needs layers below and above it",
                where="drafter.options.early_layer",
                found=str(layer),
                expected=f"1 to {most}" if most else "a target of two layers at least",
                do="--set drafter.options.early_layer=null" if most else "take family medusa",
            )
        self.early_layer = layer
        super().__init__(replace(options, early_layer=layer), spec, vocab)

    def make_net(self, rows: int) -> nn.ModuleList:
        heads = super().make_net(rows)
        heads.append(EarlyHead(self.spec.hidden_size, rows, self.spec.norm_eps))
        return heads

    @property
    def early(self) -> EarlyHead:
        """The early head."""
        return cast(EarlyHead, self.module[-1])

    def own_heads(self) -> list[nn.Linear]:
        if self.options.head == "shared":
            return []
        heads = list(self.module)[: self.options.num_heads]
        return [cast(nn.Linear, cast(nn.Sequential, head)[-1]) for head in heads]

    def vocab_layers(self) -> list[nn.Linear]:
        return [*self.own_heads(), self.early.head]

    def bind(self, borrowed: Borrowed) -> None:
        is_fresh = self._is_fresh
        super().bind(borrowed)
        if is_fresh:
            with torch.no_grad():
                self.early.head.weight.copy_(head_rows(borrowed, self.vocab))

    def needs(self) -> Needs:
        needs = super().needs()
        return replace(needs, taps=(self.early_layer, *needs.taps))

    def early_logits(self, residual_XD: Tensor) -> Tensor:
        """[X, K]: logits of the next token from the residual behind `early_layer` layers."""
        logits_XK: Tensor = self.early.head(self.early.ready(residual_XD.to(self.dtype)))
        return logits_XK

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """The early head learns beside the first head, from the same distributions."""
        weight = self.options.early_weight
        if not weight or learned.index != min(self.heads_now()):
            return out
        ready_BSD = self.early.ready(batch.own_taps()[self.early_layer].to(self.dtype))
        term = head_loss(
            ready_BSD.flatten(0, 1),
            LinearHead(self.early.head.weight),
            aim(batch, 1),
            self.vocab,
            self.options.compared(),
            learned.teacher,
        )
        return joined(out, with_stretch(replace(term, metrics={}), [ready_BSD]), weight)


FAMILY = Family(
    name="propd",
    summary=(
        "Medusa's heads with a trained early head: behind some layers of the target it says which "
        "children of a drafted tree cannot follow, and the upper layers never read them. Take it "
        "for deep targets and large batches, where verifying a node is dear; elsewhere medusa does "
        "the same with less."
    ),
    paper="https://arxiv.org/abs/2402.13485",
    options=ProPDOptions,
    build=ProPD,
    trainable=True,
    policies=("direct", "static-tree", "dynamic-tree", "chain"),
)
