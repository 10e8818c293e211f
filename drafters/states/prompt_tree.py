"""The dynamic sparse tree of parallel prompt decoding (arXiv 2405.18628, section 3.3).

A round drafts candidate nodes and, behind some of them and the root, prompt tokens; how many stand
behind the node that is accepted last, s, is the state that the next round begins in: its tree T_s
is at most s levels deep. All trees have the same number of candidates and of prompt rows. T_s takes
the candidates with the best chances, which yield f(T_s) tokens, the bonus included; prompt tokens
go where P(node is the last one accepted) times what one more of them is worth is largest. What
states are worth against each other solves the average-reward equation h = f - g + P h, by
iteration; g is the number of tokens of a round in the long run, and the split of the rows into
candidates and prompts is the one with the largest g.
Letters: M new nodes (prompt rows), N nodes (candidates), X any axes (states).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from specctl.drafters.states.template import Path, greedy_paths

SWEEPS = 8  # of the relative values; they settle after three or four
TYPICAL = (0.30, 0.10, 0.06, 0.04, 0.03)  # chances of a first guess, by rank
FADE = 0.7  # further ones are right as much less often
Chances = tuple[tuple[float, ...], ...]


def typical_chances(levels: int) -> Chances:
    """The chances of guesses by level and rank where none were measured."""
    return tuple(tuple(chance * FADE**level for chance in TYPICAL) for level in range(levels))


@dataclass(frozen=True, slots=True)
class StateTree:
    """T_s: its candidates, parents first, and the number of prompt tokens behind the root
    (`prompts[0]`) and behind each candidate."""

    paths: tuple[Path, ...]
    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The trees of all states, by state; `tokens` is g, tokens a round in the long run."""

    trees: tuple[StateTree, ...]
    tokens: float


@lru_cache(maxsize=64)
def plan_trees(chances: Chances, nodes: int, copies: int = 1) -> TreePlan:
    """The best trees of `nodes` rows, each prompt token taking `copies` of them. chances[d][r]: how
    often the guess of rank r, d + 1 tokens behind the root, is right."""
    best = [greedy_paths(chances[:state], nodes) for state in range(len(chances) + 1)]
    plans = [
        _plan(chances, [paths[:count] for paths in best], (nodes - count) // copies)
        for count in range(max(1, nodes - copies + 1))
    ]
    return max(plans, key=lambda plan: plan.tokens)


def even_trees(chances: Chances, nodes: int, behind: int, copies: int = 1) -> TreePlan:
    """Trees with as many prompt tokens `behind` the root as behind every candidate, and as many
    candidates as `nodes` rows then have room for: what a plan is compared with."""
    behind = min(behind, nodes // copies)
    room = (nodes - behind * copies) // (1 + behind * copies)
    found = [greedy_paths(chances[:state], room) for state in range(len(chances) + 1)]
    trees = tuple(StateTree(paths, (behind,) * (1 + len(paths))) for paths in found)
    return TreePlan(trees, 1.0 + sum(_worth(chances, path) for path in found[behind]))


def _plan(chances: Chances, candidates: Sequence[Sequence[Path]], rows: int) -> TreePlan:
    """The best places for `rows` prompt tokens in the trees of those candidates."""
    most = len(chances)
    last = [_ends(chances, paths) for paths in candidates]
    yields = [1.0 + sum(_worth(chances, path) for path in paths) for paths in candidates]
    value, prompts = list(yields), [[0]]
    for _ in range(SWEEPS):
        prompts = [_placed(ends, value, rows, most) for ends in last]
        value = [
            found + sum(end * value[count] for end, count in zip(ends, counts, strict=True))
            for found, ends, counts in zip(yields, last, prompts, strict=True)
        ]
        value = [one - value[0] for one in value]
    share = [1.0 / (most + 1)] * (most + 1)
    for _ in range(100):  # the stationary distribution; half of each step stays where it is
        new = [each / 2 for each in share]
        for state, (ends, counts) in enumerate(zip(last, prompts, strict=True)):
            for end, count in zip(ends, counts, strict=True):
                new[count] += share[state] * end / 2
        share = new
    tokens = sum(part * found for part, found in zip(share, yields, strict=True))
    trees = [
        StateTree(tuple(paths), tuple(counts))
        for paths, counts in zip(candidates, prompts, strict=True)
    ]
    return TreePlan(tuple(trees), tokens)


def _worth(chances: Chances, path: Path) -> float:
    return prod(chances[level][rank] for level, rank in enumerate(path))


def _ends(chances: Chances, paths: Sequence[Path]) -> list[float]:
    """How often the root, and each candidate, is the last one accepted; they sum to 1."""
    left: dict[Path, float] = {(): 1.0}
    for path in paths:
        left[path] = _worth(chances, path)
        left[path[:-1]] -= left[path]
    return [left[()], *(left[path] for path in paths)]


def _placed(ends: Sequence[float], value: Sequence[float], rows: int, most: int) -> list[int]:
    """How many of `rows` prompt tokens each place gets, `most` at most: the best next one first."""
    counts = [0] * len(ends)
    heap = [(-end * (value[1] - value[0]), at) for at, end in enumerate(ends)] if most else []
    heapq.heapify(heap)
    while heap and rows:
        _, at = heapq.heappop(heap)
        counts[at] += 1
        rows -= 1
        if counts[at] < most:
            gain = ends[at] * (value[counts[at] + 1] - value[counts[at]])
            heapq.heappush(heap, (-gain, at))
    return counts


@dataclass(frozen=True, slots=True)
class PromptTables:
    """A plan as tables by state. Candidates [X, N]: level from 0, rank, parent (-1 = root), whether
    there is one. Prompt rows [X, M]: parent as probes have it (candidates first, then prompt rows),
    the first row of their chain, how far behind its place each stands (from 0), which of the
    embeddings it is fed (distance + `copy` times their number), whether there is one."""

    level_XN: Tensor
    rank_XN: Tensor
    parent_XN: Tensor
    valid_XN: Tensor
    prompt_parent_XM: Tensor
    first_XM: Tensor
    distance_XM: Tensor
    embedding_XM: Tensor
    is_prompt_XM: Tensor

    @classmethod
    def of(cls, plan: TreePlan, copies: int, device: torch.device) -> PromptTables:
        most = len(plan.trees) - 1
        width = max(len(tree.paths) for tree in plan.trees)
        nodes, prompts = [], []
        for tree in plan.trees:
            nodes.append(_node_rows(tree, width))
            prompts.append(_prompt_rows(tree, width, copies, most))
        longest = max(len(rows) for rows in prompts)
        # Padding stands behind the root, and is told from what counts by its last field.
        for rows in prompts:
            rows.extend((-1, at, 0, 0, 0) for at in range(len(rows), longest))
        size = len(plan.trees)
        node_X = torch.tensor(nodes, dtype=torch.long, device=device).view(size, width, 4)
        prompt_X = torch.tensor(prompts, dtype=torch.long, device=device).view(size, longest, 5)
        level_XN, rank_XN, parent_XN, valid_XN = node_X.unbind(-1)
        behind_XM, first_XM, distance_XM, embedding_XM, is_prompt_XM = prompt_X.unbind(-1)
        return cls(
            level_XN,
            rank_XN,
            parent_XN,
            valid_XN.bool(),
            behind_XM,
            first_XM,
            distance_XM,
            embedding_XM,
            is_prompt_XM.bool(),
        )


def _node_rows(tree: StateTree, width: int) -> list[tuple[int, int, int, int]]:
    """(level, rank, parent, 1) of each candidate, padded to `width`."""
    at = {path: index for index, path in enumerate(tree.paths)}
    rows = [(len(path) - 1, path[-1], at.get(path[:-1], -1), 1) for path in tree.paths]
    return rows + [(0, 0, -1, 0)] * (width - len(rows))


def _prompt_rows(
    tree: StateTree, width: int, copies: int, most: int
) -> list[tuple[int, int, int, int, int]]:
    """(parent, first of the chain, distance, embedding, 1) of each prompt row."""
    rows: list[tuple[int, int, int, int, int]] = []
    for place, count in enumerate(tree.prompts):
        for copy in range(copies):
            first = len(rows)
            for i in range(count):
                parent = width + len(rows) - 1 if i else place - 1
                rows.append((parent, first, i, copy * most + i, 1))
    return rows
