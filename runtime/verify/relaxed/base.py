"""What relaxed rules are made of: which missed drafts stand, their numbers, and the verdict.

Letters: B rows, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.greedy import follow, hits, kept
from specctl.runtime.verify.walk import Verdict

# (tree, scores_BTV, noise, numbers) -> the verdict on sampled drafts
Judges = Callable[[DraftTree, Tensor, Noise, Sequence[float]], Verdict]
# (tree, hit_BN, scores_BNV of what each node was drafted for, numbers) -> which nodes stand
Stands = Callable[[DraftTree, Tensor, Tensor, Sequence[float]], Tensor]


@dataclass(frozen=True, slots=True)
class Knob:
    """A number of a relaxed rule: at least 0 and at most `most`, or a count from 1."""

    name: str
    default: float
    is_count: bool = False
    most: float = math.inf

    @property
    def meaning(self) -> str:
        reals = "0 or more" if self.most == math.inf else f"0 to {self.most:g}"
        return f"{self.name} ({'a count from 1' if self.is_count else reals})"

    def read(self, text: str) -> float:
        """Raises ValueError for anything else."""
        value = int(text) if self.is_count else float(text)
        if not (1 if self.is_count else 0) <= value <= self.most or math.isinf(value):
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class RelaxedRule:
    """A relaxed rule. `stands` may let any node stand; what the target cannot write (probability
    zero, by a grammar, a ban or a truncation) never does. `reads_again`: the target reads drafts
    twice, and the first number weighs the second reading. `native`: the lossless rule that it
    relaxes where text is sampled; `judges`: its verdict then, for a rule that reads what drafts
    were drawn from."""

    name: str
    summary: str
    paper: str
    stands: Stands
    knobs: tuple[Knob, ...]
    chains_only: bool = False
    reads_again: bool = False
    native: str = "target-only"
    judges: Judges | None = None


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A relaxed rule with its numbers."""

    rule: RelaxedRule
    values: tuple[float, ...]

    def __str__(self) -> str:
        return ":".join([self.rule.name, *(f"{value:g}" for value in self.values)])

    def verdict(self, tree: DraftTree, choice_BT: Tensor, scores_BTV: Tensor) -> Verdict:
        """`choice_BT`: the target's own choice behind every fed token. `scores_BTV`: log-scores of
        its distribution; those of greedy rows as they are at temperature 1."""
        if tree.num_nodes == 0 or (self.rule.chains_only and not tree.is_chain):
            return follow(tree, choice_BT)
        if tree.is_chain:
            scores_BNV = scores_BTV[:, :-1]
        else:
            row_B1 = torch.arange(len(scores_BTV), device=scores_BTV.device)[:, None]
            scores_BNV = scores_BTV[row_B1, tree.parent_BN + 1]
        token_BN1 = tree.token_BN.clamp(min=0)[:, :, None]
        may_BN = tree.valid_BN & (scores_BNV.gather(2, token_BN1)[:, :, 0] > -torch.inf)
        hit_BN = hits(tree, choice_BT)
        stands_BN = self.rule.stands(tree, hit_BN, scores_BNV, self.values)
        return kept(tree, hit_BN | (stands_BN & may_BN), choice_BT)
