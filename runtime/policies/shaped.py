"""Trees of a shape known beforehand: level by level, each node gets the children of its shape.

A shape is a set of rank paths (`drafters/states/template.py`); the child of rank r is the r-th best
or the r-th drawn.
Letters: B rows, C candidates, K draft vocabulary, M new nodes (expanded), N nodes, Q picked rows
(nodes of a level).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.drafters.states.template import Path, Template, compile_template
from specctl.runtime.policies.base import GrowRequest
from specctl.runtime.policies.draw import Children, children, q_rows

GoesOn = Callable[[Tensor], Tensor]  # logits after a level [B, M, K] -> rows that draft on, [B]


@dataclass(frozen=True, slots=True)
class ShapeLevel:
    """One level: how many children its parents draw at most, which of them are its nodes, which of
    its nodes are expanded for the next level (offsets into the level)."""

    first: int
    last: int
    width: int
    parent_Q: Tensor
    rank_Q: Tensor
    inner_M: Tensor


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A template and how to grow it; `expanded_N` None: node i is expansion i."""

    template: Template
    levels: tuple[ShapeLevel, ...]
    expanded_N: Tensor | None


@lru_cache(maxsize=256)
def shape_of(paths: tuple[Path, ...], nodes: int, depth: int, device: torch.device) -> TreeShape:
    """The first `nodes` paths no deeper than `depth`, ready to be grown."""
    template = compile_template(paths, nodes, depth, device)
    parents, ranks = template.parent_N.tolist(), template.rank_N.tolist()
    expanded, count, levels = [-1] * len(parents), 0, []
    before = [-1]
    for first, last in template.levels:
        is_parent = set(parents[last:])
        inner = [node for node in range(first, last) if node in is_parent]
        for node in inner:
            expanded[node], count = count, count + 1
        ordinals = {node: m for m, node in enumerate(before)}
        table = [[ordinals[parents[n]] for n in range(first, last)], ranks[first:last]]
        parent_Q, rank_Q = torch.tensor(table, device=device).unbind()
        inner_M = torch.tensor([node - first for node in inner], device=device, dtype=torch.long)
        levels.append(
            ShapeLevel(first, last, max(ranks[first:last]) + 1, parent_Q, rank_Q, inner_M)
        )
        before = inner
    is_plain = expanded == list(range(count)) + [-1] * (len(parents) - count)
    expanded_N = None if is_plain else torch.tensor(expanded, device=device)
    return TreeShape(template, tuple(levels), expanded_N)


def grow_shape(
    growth: GrowRequest,
    shape: TreeShape,
    kind: NodeKind,
    goes_on: GoesOn | None = None,
) -> DraftTree:
    """A tree of that shape for every row. `goes_on` may end a row's tree after a whole level: it
    sees the distributions of kept nodes, never what was drawn from them."""
    B, device = len(growth.view.slots), growth.view.slot_B.device
    if not shape.levels:
        return empty_tree(B, device)
    logits_BMK = growth.root()[:, None]
    alive_BM = torch.ones(B, 1, dtype=torch.bool, device=device)
    at_M = torch.full((1,), -1, dtype=torch.long, device=device)
    tokens, valids, distributions, reached, count = [], [], [], 0, 0
    for index, level in enumerate(shape.levels):
        drawn = children(growth, logits_BMK, level.width, index, kind)
        row_BQ, valid_BQ = _of_level(drawn, level)
        tokens.append(growth.target_ids(row_BQ))
        valids.append(valid_BQ & alive_BM[:, level.parent_Q])
        distributions.append(drawn.distribution_BMK)
        reached = index + 1
        if reached == len(shape.levels):
            break
        inner_M = level.inner_M
        parent_M = at_M[level.parent_Q[inner_M]]
        logits_BMK = growth.expand(tokens[-1][:, inner_M], parent_M.expand(B, -1))
        at_M = torch.arange(count, count + len(inner_M), device=device)
        count += len(inner_M)
        alive_BM = valids[-1][:, inner_M]
        if goes_on is not None:
            alive_BM = alive_BM & goes_on(logits_BMK)[:, None]
            if not bool(alive_BM.any()):
                break
    return _tree(growth, shape, kind, tokens, valids, distributions, reached)


def _of_level(drawn: Children, level: ShapeLevel) -> tuple[Tensor, Tensor]:
    at = (slice(None), level.parent_Q, level.rank_Q)
    return drawn.row_BMC[at], drawn.is_drawn_BMC[at]


def _tree(
    growth: GrowRequest,
    shape: TreeShape,
    kind: NodeKind,
    tokens: list[Tensor],
    valids: list[Tensor],
    distributions: list[Tensor | None],
    depth: int,
) -> DraftTree:
    template, last = shape.template, shape.levels[depth - 1].last
    token_BN = torch.cat(tokens, 1)
    expanded_BN = None
    if shape.expanded_N is not None:
        expanded_BN = shape.expanded_N[:last].expand_as(token_BN)
    return DraftTree(
        token_BN,
        template.parent_N[:last].expand_as(token_BN),
        template.rank_N[:last].expand_as(token_BN),
        torch.cat(valids, 1),
        kind,
        depth,
        is_chain=template.is_chain,
        q=q_rows(growth, distributions, expanded_BN, last),
        expanded_BN=expanded_BN,
    )
