"""Tries and the fusion of trees: which nodes are kept, and what is known of their origin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specctl.core.drafter import Budget
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.drafters.retrieval.trie import Trie, counted, pack
from specctl.runtime.policies.fused import fuse

CPU = torch.device("cpu")
BIG = Budget(64, 16)

paths = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.floats(0.1, 0.9)),
    min_size=1,
    max_size=6,
)


def trie_of(given_paths: Sequence[tuple[Sequence[int], float]], tag: int = 0) -> Trie:
    trie = Trie()
    for tokens, rate in given_paths:
        trie.add_path(tokens, [rate ** (i + 1) for i in range(len(tokens))], tag)
    return trie


def tree_of(*rows: Sequence[tuple[Sequence[int], float]]) -> DraftTree:
    return pack([trie_of(row) for row in rows], BIG, CPU)


def path_set(tree: DraftTree, row: int = 0) -> dict[tuple[int, ...], int]:
    """Path -> node, for every valid node."""
    found: dict[tuple[int, ...], int] = {}
    at: dict[int, tuple[int, ...]] = {-1: ()}
    for node in range(tree.num_nodes):
        if bool(tree.valid_BN[row, node]):
            at[node] = (*at[int(tree.parent_BN[row, node])], int(tree.token_BN[row, node]))
            found[at[node]] = node
    return found


@given(paths, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_best_nodes_are_the_best_tree_of_that_size(
    given_paths: list[tuple[list[int], float]], size: int
) -> None:
    trie = trie_of(given_paths)
    kept = trie.best(size, 16)
    assert all(trie.parents[node] < 0 or trie.parents[node] in kept for node in kept)
    size = min(size, len(trie))
    trees = [
        nodes
        for nodes in itertools.combinations(range(len(trie)), size)
        if all(trie.parents[n] < 0 or trie.parents[n] in nodes for n in nodes)
    ][:3000]
    longest = max(sum(trie.estimates[n] for n in nodes) for nodes in trees)
    assert sum(trie.estimates[n] for n in kept) >= longest - 1e-12


@given(paths, paths)
@settings(max_examples=60, deadline=None)
def test_fusion_is_the_union_of_paths_with_the_larger_estimates(
    left: list[tuple[list[int], float]], right: list[tuple[list[int], float]]
) -> None:
    one, two = tree_of(left), tree_of(right)
    fused = fuse([one, two], BIG)
    ours, theirs, both = path_set(one), path_set(two), path_set(fused.tree)
    assert set(both) == set(ours) | set(theirs)
    for path, node in both.items():
        wanted = [
            float(tree.estimate_BN[0, known[path]])
            for tree, known in ((one, ours), (two, theirs))
            if path in known and isinstance(tree.estimate_BN, Tensor)
        ]
        assert isinstance(fused.tree.estimate_BN, Tensor)
        assert float(fused.tree.estimate_BN[0, node]) == pytest.approx(max(wanted))
        bits = (path in ours) + 2 * (path in theirs)
        assert int(fused.source_BN[0, node]) == bits


def test_fusion_at_a_budget_expects_at_least_what_each_source_does() -> None:
    one, two = tree_of([([1, 2, 3, 4], 0.9)]), tree_of([([5], 0.6), ([6], 0.5), ([1, 7], 0.4)])
    budget = Budget(3, 8)

    def expected(trees: list[DraftTree]) -> float:
        tree = fuse(trees, budget).tree
        assert tree.num_nodes == 3
        assert tree.estimate_BN is not None
        return float(tree.estimate_BN.sum())

    assert expected([one, two]) >= max(expected([one]), expected([two]))
    assert path_set(fuse([one, two], budget, trust=[0.1, 1.0]).tree).keys() == {(5,), (6,), (1,)}


def test_rows_are_fused_each_for_itself_and_padded() -> None:
    one = tree_of([([1, 2], 0.9)], [([3], 0.9)])
    two = tree_of([([1, 4], 0.5)], [([3, 5, 6], 0.8)])
    tree = fuse([one, two], BIG).tree
    assert path_set(tree, 0).keys() == {(1,), (1, 2), (1, 4)}
    assert path_set(tree, 1).keys() == {(3,), (3, 5), (3, 5, 6)}
    assert not tree.is_chain


def test_expansions_of_the_first_tree_are_remembered() -> None:
    grown = replace(tree_of([([1, 2], 0.9), ([3], 0.5)]), expanded_BN=torch.tensor([[0, 4, -1]]))
    tree = fuse([grown, tree_of([([1, 2, 8], 0.99), ([9], 0.2)])], BIG).tree
    known = path_set(tree)
    assert tree.expanded_BN is not None
    got = {path: int(tree.expanded_BN[0, node]) for path, node in known.items()}
    assert got == {(1,): 0, (1, 2): 4, (3,): -1, (1, 2, 8): -1, (9,): -1}


def test_chains_stay_chains_and_nothing_stays_nothing() -> None:
    chain = tree_of([([1, 2, 3], 0.9)], [([4], 0.9)])
    assert chain.is_chain
    assert fuse([chain, empty_tree(2, CPU)], BIG).tree.is_chain
    assert fuse([empty_tree(2, CPU)] * 2, BIG).tree.num_nodes == 0


def test_sampled_trees_are_refused() -> None:
    sampled = replace(tree_of([([1, 2], 0.9)]), kind=NodeKind.WITHOUT_REPLACEMENT)
    with pytest.raises(RecipeError, match="changes the distribution"):
        fuse([sampled], BIG)


def test_counts_become_shares() -> None:
    trie = counted([[1, 2], [1, 3], [1, 2, 4], [5]])
    shares = {(trie.parents[n], trie.tokens[n]): trie.estimates[n] for n in range(len(trie))}
    assert shares[-1, 1] == 0.75
    assert shares[0, 2] == 0.5
    assert shares[-1, 5] == 0.25
