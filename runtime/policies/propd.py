"""Progressive: a tree whose size follows what rounds cost and bring, pruned on its way through the
target (ProPD, arXiv 2402.13485).

Dynamic generation: every round shows which rank was accepted at each depth it reached, and how long
the verification of so many nodes took. From the first comes a profile of chances by depth and rank,
from the second, by a recency-weighted regression, the seconds of n nodes; the tree is the best one
of the size with most expected tokens per second. Batch size and context need no settings, since
they show in the seconds. Every `refresh` rounds the choice is made anew, and one round then drafts
the largest tree, so that ranks and sizes no longer chosen stay known.

Early pruning (`runtime/engine/early_pruning.py`): with `early_layer` the target's lower layers drop
children that are not among their `early_top` best, by the drafter's trained early head (family
propd); without one, or with `early_shared`, by the target's own LM head. Both decide from earlier
rounds and the text alone, and candidates are best tokens: POINT.
Letters: B rows, N nodes, P path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.tree import DraftTree
from specctl.drafters.states.template import best_paths
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.hardware_tree import TYPICAL, Profile, worth
from specctl.runtime.policies.shaped import grow_shape, shape_of

START = 4  # rounds of two sizes in turn, so that the price of a node is known


@dataclass(slots=True)
class Regression:
    """seconds = base + slope * nodes over recent rounds; each counts `fade` times its successor."""

    fade: float = 0.97
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def see(self, nodes: float, seconds: float) -> None:
        new = (1.0, nodes, nodes * nodes, seconds, nodes * seconds)
        self.sums = [self.fade * old + one for old, one in zip(self.sums, new, strict=True)]

    def seconds(self, nodes: float) -> float | None:
        """None until sizes have differed; never falling with the size."""
        weight, n, nn, s, ns = self.sums
        spread = weight * nn - n * n
        if spread <= 1e-9 * max(weight * nn, 1.0):
            return None
        slope = max(0.0, (weight * ns - n * s) / spread)
        return max(1e-9, (s - slope * n) / weight + slope * nodes)


@dataclass(slots=True)
class Experience:
    """What rounds taught: hits and tries by depth and rank (both faded, begun with a typical
    profile worth a few tries), what verifying and drafting cost, and what follows: profile and
    size."""

    depth: int
    size: int
    fade: float = 0.995
    rounds: int = 0
    profile: Profile = field(init=False)
    hits: list[list[float]] = field(init=False)
    tries: list[list[float]] = field(init=False)
    verify: Regression = field(default_factory=Regression)
    draft: Regression = field(default_factory=Regression)

    def __post_init__(self) -> None:
        self.profile = tuple(TYPICAL[min(d, len(TYPICAL) - 1)] for d in range(self.depth))
        self.hits = [[4.0 * chance for chance in level] for level in self.profile]
        self.tries = [[4.0] * len(level) for level in self.profile]

    def count(self, depth: int, offered: set[int], accepted: int | None) -> None:
        """At a node `depth` levels deep children of those ranks were tried, and one accepted."""
        for rank in offered & set(range(len(self.tries[depth]))):
            self.tries[depth][rank] = self.fade * self.tries[depth][rank] + 1.0
            self.hits[depth][rank] = self.fade * self.hits[depth][rank] + (rank == accepted)

    def decide(self, most: int) -> None:
        """The profile, in whole percent so that shapes are met again, and the size that pays."""
        self.profile = tuple(
            tuple(max(round(h / t, 2), 1e-4) for h, t in zip(hits, tries, strict=True))
            for hits, tries in zip(self.hits, self.tries, strict=True)
        )
        tokens, depth, best_rate, self.size = 1.0, 0, 0.0, most
        for nodes, path in enumerate(best_paths(self.profile, most), start=1):
            verify = self.verify.seconds(nodes)
            if verify is None:
                return
            tokens, depth = tokens + worth(self.profile, path), max(depth, len(path))
            rate = tokens / (verify + (self.draft.seconds(depth) or 0.0))
            if rate > best_rate:
                self.size, best_rate = nodes, rate


@dataclass(frozen=True, slots=True)
class Progressive(PointTree):
    """At most `nodes` nodes and `length` levels, as many as pay by recent rounds."""

    length: int = 5
    nodes: int = 24
    early_layer: int | None = None
    early_top: int = 64
    early_shared: bool = False
    refresh: int = 16
    learned: Experience = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "learned", Experience(self.length, self.nodes))

    def grow(self, growth: GrowRequest) -> DraftTree:
        rounds, budget = self.learned.rounds, growth.budget
        if rounds and rounds % self.refresh == 0:
            self.learned.decide(self.nodes)
        size = self.learned.size
        if rounds < START:
            size = max(1, self.nodes >> (rounds % 2))
        elif rounds % self.refresh == 1:
            size = self.nodes
        paths = best_paths(self.learned.profile, min(size, budget.nodes))
        depth, device = min(self.length, budget.depth), growth.view.slot_B.device
        shape = shape_of(paths, len(paths), depth, device)
        return grow_shape(growth, shape, self.kind(growth.sampled))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        learned, tree = self.learned, outcome.tree
        if tree.num_nodes == 0:
            return
        learned.rounds += 1
        learned.verify.see(tree.num_nodes, seconds.verify)
        learned.draft.see(tree.depth, seconds.draft)
        for b, ended in enumerate(outcome.finished):
            row = list(zip(tree.parent_BN[b].tolist(), tree.rank_BN[b].tolist(), strict=True))
            valid = tree.valid_BN[b].tolist()
            path = [fed - 1 for fed in outcome.path_BP[b].tolist() if fed >= 0]
            for depth, at in enumerate(path):
                is_last = depth + 1 == len(path)
                if (is_last and ended is not None) or depth >= self.length:
                    break  # a cut round tells nothing about what comes after
                offered = {rank for (p, rank), ok in zip(row, valid, strict=True) if ok and p == at}
                learned.count(depth, offered, None if is_last else row[path[depth + 1]][1])


POLICY = PolicyEntry(
    "propd", "best ranks, learned on the way", "https://arxiv.org/abs/2402.13485", Progressive
)
