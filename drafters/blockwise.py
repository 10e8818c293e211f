"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115) and its rescoring.

One feed-forward layer turns f_t, the target's last state, into k states, each added to f_t and read
by the target's own frozen LM head (section 6): state i predicts token t + 2 + i. A draft is every
head's best token, one block. Since heads do not see each other's choices, blocks repeat tokens;
`rescore` lets a small model of text choose among each head's best tokens (arXiv 2404.09221; see
`parts/rescore.py`). The paper's merged step, verifying and predicting in one pass, is how every
drafter runs here: the target's states come out of the verification.
Letters: X any leading axes, D width, C carry (k D), H hidden width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.head_losses import joined
from specctl.drafters.nets.heads import check_choice, check_count, draft_size
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.parallel_heads import MAX_RANK, ParallelHeads, first_ranks
from specctl.drafters.nets.rescore import Rescoring
from specctl.drafters.nets.small_ngrams import NgramCounts, NgramNet
from specctl.drafters.states.template import as_paths

RESCORERS = ("none", "ngram", "neural")


@dataclass(frozen=True, slots=True)
class BlockwiseOptions(HeadOptions):
    """`num_heads` heads from one layer of `hidden` units per head (None: the target's width).
    `one_head`: each batch trains one head, drawn at random (section 6: less memory, the same mean).
    `tree`: rank paths to propose, None = the block. `rescore`: "none", "ngram" (counts) or "neural"
    (a small network), both of order `order`, learned from the training text; they choose among the
    `rescore_top` best tokens of a head with weight `rescore_weight`."""

    loss: str = "ce"
    hidden: int | None = None
    one_head: bool = False
    tree: tuple[tuple[int, ...], ...] | None = None
    rescore: str = "none"
    rescore_top: int = 8
    rescore_weight: float = 0.6
    order: int = 4
    rescore_width: int = 64

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)
        check_choice("rescore", self.rescore, RESCORERS)
        for name in ("rescore_top", "rescore_width"):
            check_count(name, getattr(self, name))
        check_count("order", self.order, least=2)
        if self.tree is not None:
            paths = as_paths(self.tree, self.num_heads, MAX_RANK, "drafter.options.tree")
            object.__setattr__(self, "tree", paths)


class BlockwiseNet(nn.Module):
    """d -> ReLU(k h) -> k d; the second layer starts at zero, so that fresh heads are the base."""

    def __init__(self, options: BlockwiseOptions, spec: ModelSpec, rows: int) -> None:
        super().__init__()
        width, k = spec.hidden_size, options.num_heads
        inner = k * (options.hidden or width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, k * width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.rescorer: NgramCounts | NgramNet | None = None
        if options.rescore == "ngram":
            self.rescorer = NgramCounts(options.order, spec.vocab_size)
        elif options.rescore == "neural":
            width = options.rescore_width
            self.rescorer = NgramNet(options.order, spec.vocab_size, rows, width)

    def forward(self, state_XD: Tensor) -> Tensor:
        """[X, C]: all k states, side by side."""
        added_XKD = self.down(F.relu(self.up(state_XD))).unflatten(-1, (-1, state_XD.shape[-1]))
        return torch.flatten(added_XKD + state_XD[..., None, :], -2)


class Blockwise(ParallelHeads):
    """The carry holds all k states."""

    family: ClassVar[str] = "blockwise"
    one_call = True
    module: BlockwiseNet

    def __init__(
        self, options: BlockwiseOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.module = BlockwiseNet(options, spec, draft_size(vocab, spec.vocab_size))
        self.tree = options.tree if options.tree is not None else first_ranks(options.num_heads)

    def own_heads(self) -> list[nn.Linear]:
        return []

    def vocab_layers(self) -> list[nn.Linear]:
        return [self.module.rescorer.out] if isinstance(self.module.rescorer, NgramNet) else []

    def begin(self, state_XD: Tensor) -> Tensor:
        carry_XC: Tensor = self.module(state_XD)
        return carry_XC

    def ready(self, depth: int, carry_XC: Tensor) -> Tensor:
        return torch.chunk(carry_XC, self.options.num_heads, dim=-1)[depth]

    @property
    def rescoring(self) -> Rescoring | None:
        rescorer, options = self.module.rescorer, self.options
        if rescorer is None:
            return None
        return Rescoring(rescorer, options.rescore_top, options.rescore_weight, self.vocab)

    def heads_now(self) -> Collection[int]:
        if not self.options.one_head:
            return super().heads_now()
        return (int(torch.randint(self.options.num_heads, ())),)

    def loss(self, batch: TrainBatch) -> LossOut:
        """The heads' loss, and the rescorer's own, whose weights no head shares."""
        out, rescorer = super().loss(batch), self.module.rescorer
        learned = None if rescorer is None else rescorer.loss(batch, self.vocab)
        return out if learned is None else joined(out, learned)


def build(options: BlockwiseOptions, spec: ModelSpec, vocab: VocabMap | None) -> Blockwise:
    return Blockwise(options, spec, vocab)


FAMILY = Family(
    name="blockwise",
    summary=(
        "One small layer makes several states of the target's last one, and the target's own LM "
        "head reads them all: a block of guesses in one pass. The smallest parallel heads there "
        "are, since no head has a vocabulary of its own. With rescoring a tiny model of text mends "
        "what heads that cannot see each other disagree about."
    ),
    paper="https://arxiv.org/abs/1811.03115",
    options=BlockwiseOptions,
    build=build,
    trainable=True,
    policies=("direct", "chain", "dynamic-tree", "static-tree", "merged-beams"),
)
