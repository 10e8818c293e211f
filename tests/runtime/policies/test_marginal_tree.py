"""The tree from marginals: no prefix that it leaves out is likelier, one pass a draft, and lossless
because it never says that its tokens were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp

import numpy as np
import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.policies.dyspec import DySpec
from specctl.runtime.policies.marginal_tree import MarginalTree, PlaceChoices, best_prefixes
from specctl.runtime.proof.cases import make_case
from specctl.runtime.proof.enumerate import Case, Exact, enumerate_case
from specctl.runtime.proof.reference_checks import chi_square
from specctl_testing.runtime.markov import MarkovDrafter, Pair, Places, Rounds, mixed

Paths = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return replace(mixed(1), drafts=Places)


def drafted(tree: DraftTree, row: int) -> Paths:
    """Every valid node by its tokens from the root, with the policy's estimate."""
    assert tree.estimate_BN is not None
    nodes = [node for node in range(tree.num_nodes) if bool(tree.valid_BN[row, node])]
    return {
        tuple(tree.path_to(row, node + 1)): float(tree.estimate_BN[row, node]) for node in nodes
    }


def marginals(pair: Pair, state: int, depth: int, temperature: float) -> list[np.ndarray]:
    q_VV, found = pair.q_VV.double().numpy(), []
    for d in range(1, depth + 1):
        warped_V = np.linalg.matrix_power(q_VV, d)[state] ** (1.0 / temperature)
        found.append(warped_V / warped_V.sum())
    return found


def likeliest(chances: Sequence[np.ndarray], nodes: int, width: Sequence[int]) -> Paths:
    """The best prefixes by trying all of them; at each place only the `width` best tokens."""
    ranked = [set(np.argsort(-c)[:w].tolist()) for c, w in zip(chances, width, strict=True)]
    every = {
        path: float(np.prod([chances[d][token] for d, token in enumerate(path)]))
        for depth in range(1, len(chances) + 1)
        for path in product(*ranked[:depth])
    }
    return dict(sorted(every.items(), key=lambda item: -item[1])[:nodes])


def check_best(done: Rounds, policy: MarginalTree, pair: Pair, temperature: float) -> None:
    for outcome in done.outcomes:
        for b, state in enumerate(outcome.view.root_B.tolist()):
            chances = marginals(pair, state, policy.length, temperature or 1.0)
            width = [caps(c, policy) for c in chances]
            wanted = likeliest(chances, policy.nodes, width)
            found = drafted(outcome.tree, b)
            assert found == pytest.approx(wanted, rel=1e-4)


def caps(chances_V: np.ndarray, policy: MarginalTree) -> int:
    """JetSpec's, of as many candidates as nodes."""
    size = min(policy.nodes, len(chances_V))
    if not policy.capped:
        return size
    first, second = np.sort(np.log(chances_V))[::-1][:2]
    return max(1, round(size / (1.0 + exp(first - second - 1.0))))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("nodes", [1, 5, 23])
def test_no_prefix_that_is_left_out_is_likelier(pair: Pair, nodes: int, temperature: float) -> None:
    policy = MarginalTree(3, nodes)
    done = pair.run(policy, tokens=12, rows=8, temperature=temperature)
    check_best(done, policy, pair, temperature)
    assert done.expanded == 0  # one pass a draft


def test_siblings_are_capped_where_the_first_is_clear(pair: Pair) -> None:
    policy = MarginalTree(3, 23, capped=True)
    done = pair.run(policy, tokens=12, rows=8)
    check_best(done, policy, pair, 1.0)
    every = [marginals(pair, state, 3, 1.0) for state in range(len(pair.q_VV))]
    capped = [likeliest(one, 23, [caps(c, policy) for c in one]) for one in every]
    assert capped != [likeliest(one, 23, [8, 8, 8]) for one in every]


def test_fewer_candidates_are_the_best_of_those(pair: Pair) -> None:
    done = pair.run(MarginalTree(2, 8, beam=2), tokens=8, rows=8)
    for outcome in done.outcomes:
        for b, state in enumerate(outcome.view.root_B.tolist()):
            wanted = likeliest(marginals(pair, state, 2, 1.0), 8, [2, 2])
            assert drafted(outcome.tree, b) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("nodes", [4, 30])
def test_what_depends_on_the_token_before_is_scored_behind_it(pair: Pair, nodes: int) -> None:
    """A first-order drafter: every path has its own product, and none is missed."""
    first_order, size = replace(pair, drafts=MarkovDrafter), len(pair.q_VV)
    done = first_order.run(MarginalTree(3, nodes), tokens=12, rows=8)
    q_VV = pair.q_VV.double().numpy()
    for outcome in done.outcomes:
        for b, state in enumerate(outcome.view.root_B.tolist()):
            every = {
                path: float(np.prod([q_VV[at] for at in zip((state, *path), path, strict=False)]))
                for depth in (1, 2, 3)
                for path in product(range(size), repeat=depth)
            }
            best = sorted(every.items(), key=lambda item: -item[1])[:nodes]
            assert drafted(outcome.tree, b) == pytest.approx(dict(best), rel=1e-4)


def test_a_place_with_nothing_to_draft_ends_the_prefix() -> None:
    """Chances of zero, and logits that are not numbers: nothing that hangs on them is kept."""
    some = PlaceChoices([[3, 1]], [[-0.1, -np.inf]], [[0, 0]])
    none = PlaceChoices([[0, 1]], [[-np.inf, -np.inf]], [[0, 0]])
    found = best_prefixes([some, none], 9)
    assert (found.row, found.parent, found.depth) == ([3], [-1], [0])
    broken = PlaceChoices([[0, 1]], [[np.nan, np.nan]], [[0, 0]])
    assert len(best_prefixes([broken], 9)) == 0


def test_every_step_of_long_texts_follows_the_distribution(pair: Pair) -> None:
    """Greedy, sampled by target-only, and sampled trees of the same places: dyspec's draws."""
    for policy in (MarginalTree(3, 9), DySpec(3, 9)):
        counts = pair.run(policy, tokens=48).steps(len(pair.p_VV))
        for seen_V, wanted_V in zip(counts, pair.p_VV.double().numpy(), strict=True):
            order = np.argsort(wanted_V)
            wanted = (wanted_V * seen_V.sum())[order]
            found = chi_square(seen_V[order].astype(int).tolist(), wanted.tolist())
            assert found.p_value > 1e-5


def enumerated(rule: str, kind: NodeKind) -> Exact:
    """Two tokens of V = 5 and the bonus, behind a tree of the seven likeliest prefixes: every coin
    of the rule, if it is given the marginals as q."""
    case = make_case(rule, kind, "two-two-left", "random", 5)
    chances = [torch.tensor(case.q[()]), torch.tensor(case.q[(1,)])]
    places = []
    for chance_V in chances:
        best = chance_V.sort(descending=True)
        rows, logs = best.indices.tolist(), best.values.log().tolist()
        places.append(PlaceChoices([rows], [logs], [[0] * 5]))
    found = best_prefixes(places, 7)
    assert max(found.depth) == 1
    q = {path: np.asarray(chances[min(len(path), 1)]) for path in case.q}
    own = Case(case.name, rule, kind, tuple(found.parent), case.p, q, 5)
    return enumerate_case(own, drafts=lambda _: iter([(1.0, found.row)]))


def test_the_output_distribution_is_the_targets_by_enumeration() -> None:
    for rule in ("target-only", "one-hot"):
        exact = enumerated(rule, NodeKind.POINT)
        assert exact.error <= 1e-12
        assert exact.accepted > 0.5


def test_rejection_against_the_marginals_would_not_be_lossless(pair: Pair) -> None:
    """What the kind POINT rules out: no token was drawn, so p / q shifts the distribution."""
    assert enumerated("traversal", NodeKind.WITHOUT_REPLACEMENT).total_variation > 0.01
    with pytest.raises(RecipeError, match="not lossless"):
        pair.run(MarginalTree(2, 4), "traversal", tokens=4, rows=1)
