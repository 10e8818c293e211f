"""What a stop rule is: it ends a chain behind a token that is kept, before the next one is drawn.

Non-anticipation: whether a sampled token is kept may depend on everything that precedes its draw
and on nothing else. The shape of this interface gives it: a rule is called between two draws and
can only say whether the next one happens; it has no way to take back the token it looks at.
Letters: B rows, K draft vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds, RoundView, StepState


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Drafted token number `index` (0 = the first) at the moment after it was kept. `logits_BK` are
    raw; `row_B` is the token's row in the draft vocabulary; `state` still stands before it."""

    index: int
    logits_BK: Tensor
    row_B: Tensor
    state: StepState

    def distribution_BK(self) -> Tensor:
        """The drafter's full distribution, untempered, in float32."""
        return self.logits_BK.float().softmax(-1)

    def chance_B(self, distribution_BK: Tensor) -> Tensor:
        """Probability of the kept token itself."""
        return distribution_BK.gather(1, self.row_B[:, None])[:, 0]


class StopRule:
    """Never stops; the base of every rule. One writer: the chain policy of one engine."""

    @property
    def looks(self) -> bool:
        """Whether it looks at drafted tokens; else `length` and `planned` say all."""
        return type(self).stops is not StopRule.stops

    def length(self, most: int) -> int:
        """Tokens to draft this round, decided before the first one (1 to `most`)."""
        return most

    def planned(self, view: RoundView, state: StepState) -> Tensor | None:
        """Int [B]: how many tokens each row is to draft (0: none), decided before the drafter's
        first pass; None = not decided then."""
        return None

    def stops(self, step: DraftStep) -> Tensor | None:
        """Bool [B]: rows that draft nothing more; None = no row is stopped."""
        return None

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """Learn from a finished round; rules without memory do nothing."""


@dataclass(frozen=True, slots=True)
class Tested:
    """What a round said about one row: tokens drafted and tokens accepted of them."""

    row: int
    drafted: int
    accepted: int

    @property
    def num_tested(self) -> int:
        """Tokens that were compared with the target: up to the first rejected one."""
        return min(self.drafted, self.accepted + 1)


def tested_rows(outcome: Outcome) -> Iterator[Tested]:
    """Rows that drafted something and go on: a round cut by the end of a text rejects nothing, and
    a row whose draft was taken unverified tests nothing."""
    if outcome.tree.num_nodes == 0:
        return
    drafted = outcome.tree.valid_BN.sum(1).tolist()
    forced_BN = outcome.tree.forced_BN
    is_taken = [False] * len(drafted) if forced_BN is None else forced_BN.any(1).tolist()
    for row, (count, accepted, finished) in enumerate(
        zip(drafted, outcome.num_accepted, outcome.finished, strict=True)
    ):
        if finished is None and count > 0 and not is_taken[row]:
            yield Tested(row, count, accepted)


def entropy_B(distribution_BK: Tensor) -> Tensor:
    """Entropy in nat of each row."""
    share_BK: Tensor = torch.special.xlogy(distribution_BK, distribution_BK)
    return -share_BK.sum(-1)
