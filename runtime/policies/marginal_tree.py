"""MarginalTree: the best tree from one pass of a parallel drafter (DDTree, arXiv 2604.12989).

A block or a set of heads gives the logits of all places behind the root at once. The chance of a
prefix x_1 .. x_d is guessed as the product of the chances of its tokens at their places, so the
`nodes` likeliest prefixes make the tree of that size with the largest expected acceptance
(OPT-Tree, arXiv 2406.17276). A heap holds the prefixes that may come next; when one is taken, its
next sibling and its first child enter, neither of which is likelier than the prefix itself.

Where the logits of a place depend on the tokens before it (a correction that reads the token
before, a grammar), the candidates of a place are the tokens with the likeliest prefix, and each is
expanded once, behind that prefix. A head that looks one token back is so scored exactly, one that
looks further back approximately.

`capped` is JetSpec's cap (arXiv 2606.18394): of C candidates the likeliest max(1, round(C
sigmoid(1 - gap))) may be children, where gap is the difference between the log-chances of the
first two.

Nodes are ranks, never samples: POINT, so the target draws and q is no part of the verification.
Rejection against the marginals would not be lossless, since no token was drawn from them; sampled
trees from the same logits are `dyspec`'s.
Letters: B rows, C candidates, K draft vocabulary, M new nodes (of the place before), N nodes, P
path.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.draw import log_guess

FAR = 60.0  # a gap as good as infinite: sigmoid(-60) is 1e-26


@dataclass(frozen=True, slots=True)
class MarginalTree(PointTree):
    """The likeliest `nodes` prefixes, no longer than `length`. `beam` candidates at each place
    (None: as many as nodes, so that nothing is missed); `capped` as JetSpec caps them."""

    length: int = 8
    nodes: int = 32
    beam: int | None = None
    capped: bool = False

    def grow(self, growth: GrowRequest) -> DraftTree:
        nodes, depth = min(self.nodes, growth.budget.nodes), min(self.length, growth.budget.depth)
        if min(nodes, depth) <= 0:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        width = nodes if self.beam is None else min(self.beam, nodes)
        logits_BPK = growth.marginals(depth)
        if logits_BPK is None:
            places = _behind_each_other(growth, width, depth)
        else:
            places = _independent(_log_chance(growth, logits_BPK), width)
        rows = [best_prefixes(row, nodes, self.capped) for row in places]
        return _tree(growth, rows)


@dataclass(frozen=True, slots=True)
class PlaceChoices:
    """The candidates of one place, likeliest first, behind each candidate of the place before it
    (a single list where that makes no difference): draft rows, log-chances, and which of the
    candidates each of them is for the place after."""

    row: list[list[int]]
    log_chance: list[list[float]]
    at: list[list[int]]


@dataclass(slots=True)
class Prefixes:
    """Kept prefixes by their last tokens, best first: draft row, parent (-1 the root), rank among
    its siblings, depth from 0, and the log-chance of the whole prefix."""

    row: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.row)


def best_prefixes(places: Sequence[PlaceChoices], nodes: int, capped: bool = False) -> Prefixes:
    """The `nodes` likeliest prefixes, parents before children."""
    found, age = Prefixes(), count(1)
    # (-worth, age, parent, depth, candidate before, rank); of equal ones the older comes first.
    heap = [(-places[0].log_chance[0][0], 0, -1, 0, 0, 0)]
    while heap and len(found) < nodes:
        negative, _, parent, depth, before, rank = heapq.heappop(heap)
        if not negative < math.inf:  # nothing that has a chance is left (or logits are NaN)
            break
        place = places[depth]
        chances, new = place.log_chance[before], len(found)
        found.row.append(place.row[before][rank])
        found.parent.append(parent)
        found.rank.append(rank)
        found.depth.append(depth)
        found.worth.append(-negative)
        if rank + 1 < (_cap(chances) if capped else len(chances)):
            above = found.worth[parent] if parent >= 0 else 0.0
            worth = above + chances[rank + 1]
            heapq.heappush(heap, (-worth, next(age), parent, depth, before, rank + 1))
        if depth + 1 < len(places):
            at, after = place.at[before][rank], places[depth + 1].log_chance
            heapq.heappush(heap, (negative - after[at][0], next(age), new, depth + 1, at, 0))
    return found


def _cap(log_chances: Sequence[float]) -> int:
    """How many of these may be siblings."""
    if len(log_chances) < 2:
        return 1
    gap = min(log_chances[0] - log_chances[1], FAR)
    return max(1, round(len(log_chances) / (1.0 + math.exp(gap - 1.0))))


def _log_chance(growth: GrowRequest, logits_BMK: Tensor) -> Tensor:
    """[B, M, K]: log-chances at the temperature of the rows, at which the target will draw."""
    return log_guess(growth.sampling.tempered(logits_BMK))


def _independent(log_chance_BPK: Tensor, width: int) -> list[list[PlaceChoices]]:
    """By row: the best tokens of every place."""
    best = log_chance_BPK.topk(min(width, log_chance_BPK.shape[-1]), dim=-1)
    same = [[0] * best.indices.shape[-1]]
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [PlaceChoices([row], [chance], same) for row, chance in zip(rows, chances, strict=True)]
        for rows, chances in pairs
    ]


def _behind_each_other(growth: GrowRequest, width: int, depth: int) -> list[list[PlaceChoices]]:
    """By row: candidates of every place, each read behind the likeliest prefix that ends in it."""
    logits_BMK, places = growth.root()[:, None], list[list[PlaceChoices]]()
    width, first = min(width, logits_BMK.shape[-1]), 0
    before_BM1: Tensor | float = 0.0  # log-chance of the prefixes behind which these are read
    for level in range(depth):
        chance_BMK = _log_chance(growth, logits_BMK)
        reached_BK, from_BK = (before_BM1 + chance_BMK).max(dim=1)
        best = reached_BK.topk(width, dim=-1)
        row_BMC = best.indices[:, None].expand(-1, chance_BMK.shape[1], -1)
        step = chance_BMK.gather(2, row_BMC).sort(dim=-1, descending=True, stable=True)
        ordered_BMC = row_BMC.gather(2, step.indices)
        tables = (ordered_BMC.tolist(), step.values.tolist(), step.indices.tolist())
        places.append([PlaceChoices(*parts) for parts in zip(*tables, strict=True)])
        if level + 1 == depth:
            break
        parent_BC = torch.full_like(best.indices, -1)
        if level > 0:
            parent_BC = first + from_BK.gather(1, best.indices)
            first += width
        logits_BMK = growth.expand(growth.target_ids(best.indices), parent_BC)
        before_BM1 = best.values[:, :, None]
    return [list(row) for row in zip(*places, strict=True)]


def _tree(growth: GrowRequest, rows: Sequence[Prefixes]) -> DraftTree:
    """The trees of all rows, padded to the largest. Places were expanded, not nodes."""
    width, device = max(map(len, rows)), growth.view.slot_B.device
    if width == 0:
        return empty_tree(len(rows), device)

    def padded(values: list[int]) -> list[int]:
        return [*values, *[-1] * (width - len(values))]

    table = [[padded(row.row), padded(row.parent), padded(row.rank)] for row in rows]
    row_BN, parent_BN, rank_BN = torch.tensor(table, device=device).unbind(1)
    worth = [[*row.worth, *[-math.inf] * (width - len(row))] for row in rows]
    size_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    return DraftTree(
        growth.target_ids(row_BN.clamp(min=0)),
        parent_BN,
        rank_BN,
        torch.arange(width, device=device) < size_B1,
        NodeKind.POINT,
        1 + max(max(row.depth, default=0) for row in rows),
        estimate_BN=torch.tensor(worth, device=device).exp(),
        expanded_BN=torch.full_like(parent_BN, -1),
    )


POLICY = PolicyEntry(
    "marginal-tree",
    "the best prefixes of one parallel pass (DDTree)",
    "https://arxiv.org/abs/2604.12989",
    MarginalTree,
    is_tree=False,
)
