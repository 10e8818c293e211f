"""Which sibling is accepted: the chances that Sequoia and the hardware-aware tree are built from.

A bushy tree is drafted round after round; at every node that the text came by, the rank of the
accepted child is counted. Siblings of a greedy run are best tokens, of a sampled run draws without
replacement tested from the root (rule recursive), so both give the chances for their own setting.
Letters: B rows, N nodes, P path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.core.drafter import Drafter, Outcome, RoundSeconds
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies.hardware_tree import Profile
from specctl.runtime.policies.length import FixedLength
from specctl.runtime.policies.static_tree import StaticTree
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target


@dataclass(slots=True)
class Tally(FixedLength):
    """Counts at each depth how often the text came by, and which rank it took. One writer: the
    engine."""

    width: int = 1
    visits: list[int] = field(init=False)
    taken: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.visits = [0] * self.fixed
        self.taken = [[0] * self.width for _ in range(self.fixed)]

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        rank_BN = outcome.tree.rank_BN.tolist()
        for ranks, path, ended in zip(
            rank_BN, outcome.path_BP.tolist(), outcome.finished, strict=True
        ):
            nodes = [fed - 1 for fed in path if fed > 0]
            for depth, node in enumerate(nodes):
                self.visits[depth] += 1
                self.taken[depth][ranks[node]] += 1
            if ended is None and len(nodes) < outcome.tree.depth:
                self.visits[len(nodes)] += 1

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By rank, all depths together."""
        visits = max(1, sum(self.visits))
        return tuple(sum(level[r] for level in self.taken) / visits for r in range(self.width))

    @property
    def profile(self) -> Profile:
        """By depth and rank."""
        pairs = zip(self.taken, self.visits, strict=True)
        return tuple(tuple(one / max(1, visits) for one in level) for level, visits in pairs)


def tally(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    width: int = 6,
    depth: int = 2,
) -> Tally:
    """Chances measured while continuing those prompts."""
    found = Tally(CostTable({}, {}, "", "", 1), fixed=depth, width=width)
    policy = StaticTree((width,) * depth)
    rule = "auto" if sampling.greedy else "recursive"
    engine = Engine(target, drafter, policy, rule, num_slots=len(prompts), chooser=found)
    engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    return found
