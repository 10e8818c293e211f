"""How a drafter does on a text known beforehand, as if it were the target's greedy output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specctl.core.drafter import Budget, Drafter, RoundView, Space
from specctl.core.tree import DraftTree

ViewOf = Callable[[Mapping[int, Sequence[int]]], RoundView]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Followed:
    """tau (with the bonus token) and nodes drafted per round."""

    tau: float
    nodes: float


def accepted(tree: DraftTree, row: int, text: Sequence[int]) -> int:
    """How far the tree goes down `text`."""
    at, depth = -1, 0
    while depth < len(text):
        here = (tree.parent_BN[row] == at) & tree.valid_BN[row]
        node = (here & (tree.token_BN[row] == text[depth])).nonzero()
        if not len(node):
            break
        at, depth = int(node[0, 0]), depth + 1
    return depth


def follow(
    drafter: Drafter, view_of: ViewOf, text: Sequence[int], start: int, budget: Budget
) -> Followed:
    """Draft and verify along `text` from its first `start` tokens on."""
    state = drafter.open(Space(1, len(text), budget.nodes, CPU, torch.float32))
    state.start(0, text[:start], {})
    at, rounds, nodes = start, 0, 0
    while at < len(text):
        tree = state.propose(view_of({0: text[:at]}), budget)
        nodes += int(tree.valid_BN.sum())
        at += accepted(tree, 0, text[at:]) + 1
        rounds += 1
    return Followed((len(text) - start) / rounds, nodes / rounds)


def check_rows_are_private(drafter: Drafter, view_of: ViewOf) -> None:
    """Neither row of a batch drafts the other's text; each drafts what it does alone."""
    texts = {0: [1, 2, 3, 4, 5, 6, 1, 2, 3], 1: [9, 1, 2, 3]}
    budget = Budget(8, 4)

    def drafts(rows: Sequence[int]) -> dict[int, set[int]]:
        state = drafter.open(Space(2, 64, 8, CPU, torch.float32))
        for row in rows:
            state.start(row, texts[row], {})
        tree = state.propose(view_of({row: texts[row] for row in rows}), budget)
        valid_BN = tree.valid_BN
        return {row: set(tree.token_BN[at][valid_BN[at]].tolist()) for at, row in enumerate(rows)}

    together = drafts([0, 1])
    assert together[0] >= {4}
    assert not together[1] & {4, 5, 6}
    assert together == drafts([0]) | drafts([1])
