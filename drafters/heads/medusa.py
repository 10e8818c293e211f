"""Medusa-1 (arXiv 2401.10774): heads on the target's last state, each one token further ahead.

Head i reads f_t (the state that feeds the target's LM head) and predicts token t + 2 + i; the
target's own head predicts t + 1. The proposal is a static sparse tree over the heads' best ranks,
so one pass drafts everything.
Letters: X any axes, Y carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.parallel_heads import MAX_RANK, ParallelHeads, default_tree
from specctl.drafters.nets.heads import ResBlock
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.option_checks import OneOf
from specctl.drafters.states.template import as_paths

HEADS = ("own", "shared")


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadOptions):
    """`num_heads` heads of `num_blocks` residual blocks. `head`: "own" gives each head its own LM
    head, started from the target's rows and trained; "shared" reads through the target's frozen
    LM head and trains the blocks only. `tree`: rank paths, most useful first, for example
    [[0], [0, 0], [1]]; None = a tree from a typical acceptance profile."""

    decay: float = 0.8
    num_blocks: int = 1
    head: Annotated[str, OneOf(HEADS)] = "own"
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)
        if self.tree is not None:
            paths = as_paths(self.tree, self.num_heads, MAX_RANK, "drafter.options.tree")
            object.__setattr__(self, "tree", paths)


class Medusa(ParallelHeads):
    """Medusa-1: only the heads train."""

    family = "medusa"
    splits_rows = True
    one_call = True
    module: nn.ModuleList

    def __init__(
        self, options: MedusaOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.tree = options.tree if options.tree is not None else default_tree(options.num_heads)

    def make_net(self, rows: int) -> nn.ModuleList:
        options, width, heads = self.options, self.spec.hidden_size, []
        for _ in range(options.num_heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(options.num_blocks)]
            if options.head == "own":
                parts.append(nn.Linear(width, rows, bias=False))
            heads.append(nn.Sequential(*parts))
        return nn.ModuleList(heads)

    def own_heads(self) -> list[nn.Linear]:
        if self.options.head == "shared":
            return []
        return [cast(nn.Linear, cast(nn.Sequential, head)[-1]) for head in self.module]

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        """The state after the residual blocks of one head."""
        head = cast(nn.Sequential, self.module[depth])
        for block in list(head)[: self.options.num_blocks]:
            carry_XY = block(carry_XY)
        return carry_XY


FAMILY = Family(
    name="medusa",
    summary=(
        "Small residual heads on the target's last hidden state, each predicting one token further "
        "ahead; a fixed sparse tree of their best guesses is verified at once. Drafting costs one "
        "pass of small layers, whatever the depth, but heads do not see each other's choices, so "
        "acceptance fades quickly with depth. Trains fast and needs no attention cache."
    ),
    paper="https://arxiv.org/abs/2401.10774",
    options=MedusaOptions,
    build=Medusa,
    trainable=True,
    policies=("direct", "static-tree", "dynamic-tree", "marginal-tree", "chain"),
)
