"""Sequoia: a fixed tree, optimal for measured acceptances and for the device (arXiv 2402.12374).

Let p_i be the chance that of the siblings drawn without replacement the i-th is the accepted one,
the same at every node. The best tree of m fed tokens (the root counts), depth <= l, whose root has
b children, yields

    T[m, l, b] = max_y  T[y, l, b - 1] + p_b max_b' T[m - y, l - 1, b']        T[1, l, 0] = 1

tokens a round. Size and depth are chosen by the largest T[m, l] / (l t_draft + t_verify(m)) over
measured times. Children are drawn without replacement, and uniformly over the untried tokens where
the draft distribution has run out (kind REFILLED), so that no node is wasted at low temperature.
Letters: B rows, M new nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind
from specctl.drafters.states.template import Path
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.shaped import grow_shape, shape_of

TYPICAL = (0.62, 0.15, 0.07, 0.04, 0.025, 0.015)  # of a small drafter on plain text

Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class TreeTable:
    """best[l][M]: tokens of the best tree with exactly M fed tokens and depth <= l (-inf where
    there is none); split[l][b][M]: fed tokens left of the b-th child in the best such tree."""

    best: tuple[Array, ...]
    by_branch: tuple[Array, ...]
    split: tuple[Array, ...]

    def tokens(self, nodes: int, depth: int) -> float:
        """Expected tokens of the best tree with at most `nodes` drafted nodes."""
        return float(self.best[depth][: nodes + 2].max())

    def paths(self, nodes: int, depth: int) -> tuple[Path, ...]:
        """That tree's rank paths, parents first; the smallest one among equals."""
        return tuple(self._below(depth, int(self.best[depth][: nodes + 2].argmax()), ()))

    def _below(self, depth: int, fed: int, path: Path) -> list[Path]:
        if fed <= 1:
            return []
        branch = int(self.by_branch[depth][:, fed].argmax())
        found: list[list[Path]] = []
        while branch > 0:
            left = int(self.split[depth][branch][fed])
            child = (*path, branch - 1)
            found.append([child, *self._below(depth - 1, fed - left, child)])
            branch, fed = branch - 1, left
        return [one for part in reversed(found) for one in part]


@lru_cache(maxsize=32)
def tree_table(acceptance: tuple[float, ...], nodes: int, depth: int) -> TreeTable:
    """The dynamic programme up to those sizes."""
    size, width = nodes + 2, len(acceptance) + 1
    none = np.full(size, -np.inf)
    leaf = none.copy()
    leaf[1] = 1.0
    best, by_branch, split = [leaf], [np.stack([leaf, *[none] * (width - 1)])], []
    split.append(np.zeros((width, size), dtype=int))
    for _ in range(depth):
        rows, lefts = [leaf], [np.zeros(size, dtype=int)]
        for chance in acceptance:
            value, left = _joined(rows[-1], chance * best[-1])
            rows.append(value)
            lefts.append(left)
        by_branch.append(np.stack(rows))
        split.append(np.stack(lefts))
        best.append(by_branch[-1].max(0))
    return TreeTable(tuple(best), tuple(by_branch), tuple(split))


def _joined(before: Array, child: Array) -> tuple[Array, Array]:
    """max over y of before[y] + child[m - y], and that y, for every m."""
    size = len(before)
    value, left = np.full(size, -np.inf), np.zeros(size, dtype=int)
    for m in range(2, size):
        sums = before[1:m] + child[m - 1 : 0 : -1]
        at = int(sums.argmax())
        value[m], left[m] = sums[at], at + 1
    return value, left


@dataclass(frozen=True, slots=True)
class Sequoia(PointTree):
    """The best tree of at most `nodes` nodes and `length` levels for those `acceptance`s of the
    first, second, ... drawn sibling (measured by `benchmarks/trees.py --calibrate`)."""

    length: int = 6
    nodes: int = 16
    acceptance: tuple[float, ...] = TYPICAL

    def __post_init__(self) -> None:
        found = tuple(float(p) for p in self.acceptance)
        object.__setattr__(self, "acceptance", found)
        if not found or min(found) < 0.0 or sum(found) > 1.0 + 1e-6:
            raise RecipeError(
                "acceptances of siblings are chances of which one at most comes true",
                where="serve.acceptance",
                found=str(list(found)),
                expected="positive numbers that sum to at most 1, for example [0.6, 0.2, 0.1]",
                do="measure it in a clone: python benchmarks/trees.py --calibrate --draft PACKAGE",
            )

    @property
    def table(self) -> TreeTable:
        return tree_table(self.acceptance, self.nodes, self.length)

    @property
    def expected_tokens(self) -> float:
        """What a round of the full tree is predicted to emit, the bonus included."""
        return self.table.tokens(self.nodes, self.length)

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.REFILLED if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        nodes = min(self.nodes, growth.budget.nodes)
        depth = min(self.length, growth.budget.depth)
        paths = self.table.paths(nodes, depth)
        shape = shape_of(paths, nodes, depth, growth.view.slot_B.device)
        return grow_shape(growth, shape, self.kind(growth.sampled))

    def fitted(self, costs: TreeCosts) -> Sequoia:
        """The size and depth with most expected tokens per second, within this one's."""
        sizes = [(n, d) for d in range(1, self.length + 1) for n in range(d, self.nodes + 1)]
        table = self.table
        nodes, depth = max(sizes, key=lambda nd: costs.rate(table.tokens(*nd), *nd))
        return replace(self, nodes=nodes, length=depth)


POLICY = PolicyEntry(
    "sequoia", "best for measured acceptances", "https://arxiv.org/abs/2402.12374", Sequoia
)
