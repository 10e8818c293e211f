"""Template trees: a fixed set of (rank, rank, ...) paths, cut to a budget.

A path (0, 2) is the node reached by the best token after the root, then the third best after it.
Paths are chosen greedily by the product of per-depth rank acceptances, so every prefix of a chosen
path is chosen too.
Letters: B rows, N nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """Nodes level by level: `depth_N` from 0, `rank_N` among siblings, `parent_N` (-1 = root);
    `levels` are (first, last + 1) node ranges."""

    depth_N: Tensor
    rank_N: Tensor
    parent_N: Tensor
    levels: tuple[tuple[int, int], ...]

    @property
    def is_chain(self) -> bool:
        return all(last - first == 1 for first, last in self.levels)

    def point_tree(self, token_BN: Tensor, valid_BN: Tensor) -> DraftTree:
        """The tree of these tokens, chosen without chance."""
        parent_BN, rank_BN = (x_N.expand_as(token_BN) for x_N in (self.parent_N, self.rank_N))
        depth, is_chain = len(self.levels), self.is_chain
        return DraftTree(
            token_BN, parent_BN, rank_BN, valid_BN, NodeKind.POINT, depth, is_chain=is_chain
        )


def greedy_paths(acceptance: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The `nodes` paths with the largest product; acceptance[d][r] is the chance that the token of
    rank r at depth d is right. Best first, parents before children."""
    if not acceptance:
        return ()
    heap: list[tuple[float, Path]] = [
        (-acceptance[0][rank], (rank,)) for rank in range(len(acceptance[0]))
    ]
    heapq.heapify(heap)
    chosen: list[Path] = []
    while heap and len(chosen) < nodes:
        score, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < len(acceptance):
            for rank, chance in enumerate(acceptance[len(path)]):
                heapq.heappush(heap, (score * chance, (*path, rank)))
    return tuple(chosen)


best_paths = lru_cache(maxsize=64)(greedy_paths)  # of tuples


def check_paths(paths: Sequence[Path], max_depth: int, max_rank: int, where: str) -> None:
    """Every prefix present, nothing twice, ranks and depths within reach."""
    known = set(paths)
    broken = [p for p in paths if (len(p) > 1 and p[:-1] not in known) or not p]
    outside = [
        p for p in paths if len(p) > max_depth or (p and not 0 <= min(p) <= max(p) < max_rank)
    ]
    if broken or outside or len(known) != len(paths):
        raise RecipeError(
            "the template tree is not a tree of ranks",
            where=where,
            found=str((broken or outside or list(paths))[:4]),
            expected=f"distinct paths with all their prefixes, depth <= {max_depth}, "
            f"ranks 0 to {max_rank - 1}",
            do="write for example [[0], [1], [0, 0]]",
        )


def as_paths(
    tree: Sequence[Sequence[int]], max_depth: int, max_rank: int, where: str
) -> tuple[Path, ...]:
    """The paths of a tree written in a recipe, checked."""
    paths = tuple(tuple(int(rank) for rank in path) for path in tree)
    check_paths(paths, max_depth, max_rank, where)
    return paths


def compile_template(
    paths: Sequence[Path], nodes: int, depth: int, device: torch.device
) -> Template:
    """The first `nodes` paths no deeper than `depth`, level by level."""
    fitting = [path for path in paths if len(path) <= depth][:nodes]
    ordered = sorted(fitting, key=lambda path: (len(path), path))
    at = {path: index for index, path in enumerate(ordered)}
    depths = [len(path) - 1 for path in ordered]
    levels = []
    for level in range(max(depths, default=-1) + 1):
        first = depths.index(level)
        levels.append((first, first + depths.count(level)))
    parents = [at.get(path[:-1], -1) for path in ordered]
    ranks = [path[-1] for path in ordered]
    table = torch.tensor([depths, ranks, parents], device=device, dtype=torch.long).view(3, -1)
    return Template(table[0], table[1], table[2], tuple(levels))
