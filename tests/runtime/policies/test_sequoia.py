"""Sequoia: the dynamic programme is optimal, and what it predicts is what the engine does."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.tree import NodeKind
from specctl.runtime.measure.cost_table import CostTable, TreeCosts
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.sequoia import Sequoia, tree_table
from specctl_testing.runtime.markov import Pair, alike, sibling_acceptance


@cache
def all_trees(fed: int) -> list[Any]:
    """Every ordered tree of that many fed tokens, as nested tuples of subtrees."""
    if fed == 1:
        return [()]
    return [
        (below, *rest)
        for first in range(1, fed)
        for below in all_trees(first)
        for rest in all_trees(fed - first)
    ]


def value(tree: Any, acceptance: tuple[float, ...], depth: int) -> float:
    """Expected tokens of one tree; -inf if it cannot be drafted."""
    if not tree:
        return 1.0
    if depth == 0 or len(tree) > len(acceptance):
        return -math.inf
    pairs = zip(acceptance, tree, strict=False)
    return 1.0 + sum(chance * value(below, acceptance, depth - 1) for chance, below in pairs)


@pytest.mark.parametrize(
    ("acceptance", "fed", "depth", "expected"),
    [
        ((0.6, 0.2, 0.1), 8, 4, 2.7456),
        ((0.8, 0.1, 0.05, 0.02), 16, 6, 4.557024),
        ((0.5, 0.25, 0.12, 0.06, 0.03), 32, 8, 3.4775),
    ],
)
def test_the_programme_reaches_known_optima(
    acceptance: tuple[float, ...], fed: int, depth: int, expected: float
) -> None:
    policy = Sequoia(depth, fed - 1, acceptance)
    assert policy.expected_tokens == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.2, 0.6, 0.1), (0.1, 0.1, 0.7)])
@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_no_tree_of_that_size_is_better(acceptance: tuple[float, ...], depth: int) -> None:
    for fed in range(2, 9):
        best = max(value(t, acceptance, depth) for n in range(2, fed + 1) for t in all_trees(n))
        table = tree_table(acceptance, fed - 1, depth)
        assert table.tokens(fed - 1, depth) == pytest.approx(best)
        paths = table.paths(fed - 1, depth)
        assert len(paths) <= fed - 1
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)
        worth = 1.0
        for path in paths:
            chance = 1.0
            for rank in path:
                chance *= acceptance[rank]
            worth += chance
        assert worth == pytest.approx(best), "the paths are not the tree that was valued"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return alike(2, size=5, spread=1.0, noise=1.0)


@pytest.fixture(scope="module")
def acceptance(pair: Pair) -> tuple[float, ...]:
    return tuple(sibling_acceptance(pair.p_VV[0].numpy(), pair.q_VV[0].numpy(), 3))


def test_the_predicted_length_is_the_measured_one(
    pair: Pair, acceptance: tuple[float, ...]
) -> None:
    for nodes, depth in ((3, 2), (8, 4), (14, 6)):
        policy = Sequoia(depth, nodes, acceptance)
        done = pair.run(policy, "recursive")
        assert done.outcomes[0].tree.kind is NodeKind.REFILLED
        assert abs(done.mean + 1 - policy.expected_tokens) < 4.5 * done.error


@pytest.mark.proof
def test_its_tree_accepts_more_than_others_of_its_size(
    pair: Pair, acceptance: tuple[float, ...]
) -> None:
    best = pair.run(Sequoia(6, 14, acceptance), "recursive", tokens=160)
    for other in ({"branch": (2, 2, 2)}, {"branch": (14,)}, {"branch": (1,) * 14}):
        rule = "chain" if max(other["branch"]) == 1 else "recursive"
        done = pair.run(make_policy({"policy": "static-tree", **other}), rule, tokens=160)
        assert done.mean_nodes <= 14
        assert best.mean > done.mean + 3 * (best.error + done.error), other


def test_a_used_up_draft_distribution_still_fills_the_tree() -> None:
    """Where q knows one token only, its siblings are drawn uniformly. Here what q leaves of p is
    uniform, too, so one of them is always right."""
    q_V = torch.tensor([1.0, 0.0, 0.0, 0.0])
    p_V = torch.tensor([0.4, 0.2, 0.2, 0.2])
    pair = Pair(p_V.repeat(4, 1), q_V.repeat(4, 1))
    refilled = pair.run(Sequoia(1, 3, (0.4, 0.3, 0.2)), "sequoia")
    plain = pair.run(make_policy({"policy": "static-tree", "branch": (3,)}), "recursive")
    assert refilled.mean_nodes == 3
    assert plain.mean_nodes == 1
    assert refilled.mean == 1.0
    assert abs(plain.mean - 0.4) < 4.5 * plain.error


def test_the_device_decides_the_size() -> None:
    policy = Sequoia(8, 48, (0.7, 0.12, 0.05, 0.03))
    flat = TreeCosts(0.1, {0: 1.0, 64: 1.1})
    steep = TreeCosts(0.1, {0: 1.0, 1: 1.3, 64: 20.0})
    slow_draft = TreeCosts(0.8, {0: 1.0, 64: 1.1})
    large, small, shallow = (policy.fitted(costs) for costs in (flat, steep, slow_draft))
    assert small.nodes < large.nodes
    assert shallow.length < large.length
    for costs, chosen in ((flat, large), (steep, small), (slow_draft, shallow)):
        rates = [
            costs.rate(policy.table.tokens(n, d), n, d) for d in range(1, 9) for n in range(d, 49)
        ]
        assert costs.rate(chosen.expected_tokens, chosen.nodes, chosen.length) == max(rates)


def test_costs_of_a_chain_price_a_tree() -> None:
    table = CostTable({0: 0.0, 1: 0.1, 4: 0.4}, {0: 1.0, 1: 1.1, 4: 1.4}, "cpu", "float32", 1)
    costs = TreeCosts.of(table)
    assert costs.step == pytest.approx(0.1)
    assert [costs.verify_seconds(n) for n in (0, 1, 2, 4, 6)] == pytest.approx(
        [1.0, 1.1, 1.2, 1.4, 1.6]
    )
    assert costs.rate(3.0, 4, 2) == pytest.approx(3.0 / 1.6)


@pytest.mark.parametrize("acceptance", [(), (0.7, 0.5), (-0.1, 0.2)])
def test_impossible_acceptances_are_refused(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match="sum to at most 1"):
        Sequoia(acceptance=acceptance)
