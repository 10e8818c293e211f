"""DySpec: a sampled tree grown where the drafter expects acceptance (arXiv 2410.11744).

The drafted token's probability guesses its acceptance. A heap holds draws that could be made: the
next child of a node, worth the node's path probability times the mass that its earlier children
left. The best draw is made, the token kept whatever it is, and two new draws enter the heap: its
first child and its next sibling. What is drawn where follows from kept tokens only, so recursive
rejection and traversal are exact (kind WITHOUT_REPLACEMENT). Growth ends at `nodes` nodes, or when
no draw is worth `threshold`.

A child needs the drafter's distribution behind its parent. With `threshold` 0 the best draw always
comes first, and growth waits for one expansion after another (the paper's greedy construction: few
nodes, many draft calls). Otherwise every draw worth `threshold` is made as soon as its distribution
is there, and all new nodes are expanded together, so that there are as many calls as levels (the
layered one). Where nothing is sampled, "draws" are the best tokens in turn, and the greedy
construction gives the tree of largest expected acceptance.
Letters: B rows, C candidates, K draft vocabulary, M new nodes, N nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, empty_tree
from specctl.runtime.policies.base import DrawnTree, GrowRequest, PolicyEntry
from specctl.runtime.policies.draw import Children, children, log_guess, q_rows

Candidates = list[tuple[int, float]]  # draft row and q of a node's children, in draw order


@dataclass(frozen=True, slots=True)
class DySpec(DrawnTree):
    """At most `nodes` nodes, `length` levels, draws worth at least `threshold`, and `beam` nodes
    expanded by one call."""

    length: int = 8
    nodes: int = 16
    beam: int = 16
    threshold: float = 0.1

    def grow(self, growth: GrowRequest) -> DraftTree:
        nodes, depth = min(self.nodes, growth.budget.nodes), min(self.length, growth.budget.depth)
        B = len(growth.view.slots)
        if min(nodes, depth) <= 0:
            return empty_tree(B, growth.view.slot_B.device)
        rows = [_Tree(nodes, depth, self.threshold, growth.sampled) for _ in range(B)]
        logits_BMK, wanted, distributions, num_expanded = (
            growth.root()[:, None],
            None,
            [],
            0,
        )
        for wave in count():
            drawn = children(growth, logits_BMK, nodes, wave, self.kind(growth.sampled))
            distributions.append(drawn.distribution_BMK)
            for row, found in zip(rows, _candidates(drawn, logits_BMK), strict=True):
                row.learn(found)
                row.draw()
            wanted = [row.wanted(self.beam) for row in rows]
            M = max(map(len, wanted))
            if M == 0:
                break
            token_BM, parent_BM = _call(growth, rows, wanted, M, num_expanded)
            logits_BMK = growth.expand(token_BM, parent_BM)
            num_expanded += M
        return self._tree(growth, rows, distributions)

    def _tree(
        self, growth: GrowRequest, rows: list[_Tree], distributions: list[Tensor | None]
    ) -> DraftTree:
        width = max(len(row.token) for row in rows)
        device = growth.view.slot_B.device
        if width == 0:
            return empty_tree(len(rows), device)
        table = [[row.padded(values, width) for values in row.columns] for row in rows]
        token_BN, parent_BN, rank_BN, expanded_BN = torch.tensor(table, device=device).unbind(1)
        value = [[*row.value, *[0.0] * (width - len(row.value))] for row in rows]
        at_N = torch.arange(width, device=device)
        sizes_B1 = torch.tensor([[len(row.token)] for row in rows], device=device)
        return DraftTree(
            growth.target_ids(token_BN.clamp(min=0)),
            parent_BN,
            rank_BN,
            at_N < sizes_B1,
            self.kind(growth.sampled),
            max(max(row.depth, default=0) for row in rows),
            q=q_rows(growth, distributions, expanded_BN, width),
            estimate_BN=torch.tensor(value, device=device),
            expanded_BN=expanded_BN,
        )


@dataclass(slots=True)
class _Tree:
    """One row's tree on the host. Node -1 is the root. Heap entries are (-worth, age, node): the
    next child of that node; `rest[node]` is the mass its children left."""

    nodes: int
    max_depth: int
    threshold: float
    is_sampled: bool
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    found: dict[int, Candidates] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=lambda: [-1])
    heap: list[tuple[float, int, int]] = field(default_factory=lambda: [(-1.0, 0, -1)])

    @property
    def columns(self) -> tuple[list[int], ...]:
        return self.token, self.parent, self.rank, self.expanded

    def padded(self, values: list[int], width: int) -> list[int]:
        return [*values, *[-1] * (width - len(values))]

    def learn(self, found: list[Candidates]) -> None:
        """The candidates of the nodes asked for last."""
        for node, candidates in zip(self.asked, found, strict=False):
            self.found[node], self.rest[node], self.drawn[node] = candidates, 1.0, 0
        self.asked = []

    def draw(self) -> None:
        """Make the best draws of those whose distribution is there; none behind one that waits for
        its distribution, if draws must come in order."""
        waiting: list[tuple[float, int, int]] = []
        while self.heap and len(self.token) < self.nodes and -self.heap[0][0] >= self.threshold:
            worth, age, node = heapq.heappop(self.heap)
            if node not in self.found:
                waiting.append((worth, age, node))
                if self.threshold == 0.0:
                    break
            elif self.drawn[node] < len(self.found[node]):
                exact = self._worth(node)
                if exact < -worth:
                    heapq.heappush(self.heap, (-exact, age, node))
                else:
                    self._keep(node)
        for entry in waiting:
            heapq.heappush(self.heap, entry)

    def _worth(self, node: int) -> float:
        """Of the next child. A sample's own chance may not be looked at, a best token's may: then
        what stands in the heap is a bound, which becomes exact when it reaches the top."""
        path = 1.0 if node < 0 else self.value[node]
        if self.is_sampled:
            return path * self.rest[node]
        return path * self.found[node][self.drawn[node]][1]

    def _keep(self, node: int) -> None:
        rank = self.drawn[node]
        row, chance = self.found[node][rank]
        path = 1.0 if node < 0 else self.value[node]
        new, depth = len(self.token), 1 if node < 0 else self.depth[node] + 1
        self.token.append(row)
        self.parent.append(node)
        self.rank.append(rank)
        self.value.append(path * chance)
        self.depth.append(depth)
        self.expanded.append(-1)
        self.drawn[node], self.rest[node] = rank + 1, max(0.0, self.rest[node] - chance)
        heapq.heappush(self.heap, (-path * self.rest[node], 2 * new + 1, node))
        if depth < self.max_depth:
            heapq.heappush(self.heap, (-path * chance, 2 * new + 2, new))

    def wanted(self, most: int) -> list[int]:
        """Nodes to expand: the best `most` that could still be drawn from within the budget."""
        left = self.nodes - len(self.token)
        best = [(worth, node) for worth, _, node in heapq.nsmallest(left, self.heap)]
        asked = [n for worth, n in best if n not in self.found and -worth >= self.threshold]
        self.asked = asked[:most]
        return self.asked


def _candidates(drawn: Children, logits_BMK: Tensor) -> list[list[Candidates]]:
    """By row and node: draft rows and their q, read on the host."""
    distribution_BMK = (
        log_guess(logits_BMK).exp() if drawn.distribution_BMK is None else drawn.distribution_BMK
    )
    chance_BMC = distribution_BMK.gather(2, drawn.row_BMC).masked_fill(~drawn.is_drawn_BMC, -1.0)
    return [
        [
            [(row, q) for row, q in zip(rows, chances, strict=True) if q >= 0.0]
            for rows, chances in zip(rows_MC, chances_MC, strict=True)
        ]
        for rows_MC, chances_MC in zip(drawn.row_BMC.tolist(), chance_BMC.tolist(), strict=True)
    ]


def _call(
    growth: GrowRequest, rows: list[_Tree], wanted: list[list[int]], width: int, first: int
) -> tuple[Tensor, Tensor]:
    """Tokens and parents of the next expansion; rows that want fewer nodes repeat the root."""
    device = growth.view.slot_B.device
    tokens, parents = [], []
    for row, nodes in zip(rows, wanted, strict=True):
        for column, node in enumerate(nodes):
            row.expanded[node] = first + column
        above = [row.parent[node] for node in nodes]
        tokens.append(row.padded([row.token[node] for node in nodes], width))
        parents.append(row.padded([-1 if up < 0 else row.expanded[up] for up in above], width))
    row_BM, parent_BM = torch.tensor([tokens, parents], device=device).unbind()
    return growth.target_ids(row_BM.clamp(min=0)), parent_BM


POLICY = PolicyEntry(
    "dyspec", "grown where the drafter is sure", "https://arxiv.org/abs/2410.11744", DySpec
)
