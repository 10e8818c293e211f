"""Enumeration: every rule reproduces the target's joint distribution exactly, and accepts what it
should."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import brentq

from specctl.core.tree import NodeKind
from specctl.runtime.proof.cases import (
    BIG_TREES,
    CHAINS,
    FAMILIES,
    TREES,
    is_chain,
    make_case,
    planned_cases,
)
from specctl.runtime.proof.enumerate import Case, enumerate_case, fixed_siblings
from specctl.runtime.verify import RULES, legal

PLANNED = list(planned_cases("slice"))
SHAPES = {**CHAINS, **TREES, **BIG_TREES}


def test_the_slice_of_the_proof_is_large():
    assert len(PLANNED) >= 1000
    assert {rule for rule, *_ in PLANNED} == set(RULES)


@pytest.mark.fast
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_equals_the_target_to_rounding(rule):
    cases = (make_case(*one) for one in PLANNED if one[0] == rule)
    found = {case.name: enumerate_case(case).error for case in cases}
    assert found
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= 1e-12, worst


def context_free(rule, shape, kind, family, size, seed):
    case = make_case(rule, kind, shape, family, size, seed)
    p = dict.fromkeys(case.p, case.p[()])
    q = dict.fromkeys(case.q, case.q[()])
    return Case(case.name, rule, kind, case.shape, p, q, size)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("family", ["random", "zeros-in-p", "trimmed", "disjoint"])
def test_token_level_accepts_the_closed_form(length, family):
    case = context_free("chain", f"chain-{length}", NodeKind.IID, family, 3, seed=5)
    alpha = np.minimum(case.p[()], case.q[()]).sum()
    expected = sum(alpha**i for i in range(1, length + 1))
    assert enumerate_case(case).accepted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rule", ["one-hot", "target-only"])
def test_candidates_are_accepted_with_their_total_probability(rule):
    case = make_case(rule, NodeKind.POINT, "two", "random", 4)
    best_two = np.argsort(-case.q[()])[:2]
    expected = case.p[()][best_two].sum()
    assert enumerate_case(case).accepted == pytest.approx(expected, abs=1e-12)


def test_iid_siblings_are_accepted_by_the_recursion():
    case = make_case("multi-round", NodeKind.IID, "three", "random", 4)
    missed, r, q = 1.0, case.p[()], case.q[()]
    for _ in range(3):
        missed *= 1 - np.minimum(r, q).sum()
        r = np.maximum(r - q, 0)
        r = r / r.sum()
    assert enumerate_case(case).accepted == pytest.approx(1 - missed, abs=1e-12)


def test_siblings_that_cover_the_support_are_always_accepted():
    case = make_case("recursive", NodeKind.WITHOUT_REPLACEMENT, "three", "random", 3)
    assert enumerate_case(case).accepted == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_accepts_at_least_as_much_as_token_level(family):
    for seed in range(6):
        cases = [make_case(r, NodeKind.IID, "chain-3", family, 3, seed) for r in ("chain", "block")]
        token, blockwise = (enumerate_case(case).accepted for case in cases)
        assert blockwise >= token - 1e-12


def test_block_accepts_strictly_more_on_random_distributions():
    cases = [make_case(r, NodeKind.IID, "chain-3", "random", 3) for r in ("chain", "block")]
    token, blockwise = (enumerate_case(case).accepted for case in cases)
    assert blockwise > token + 1e-3


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(NodeKind.IID, "multi-round"), (NodeKind.WITHOUT_REPLACEMENT, "recursive")],
)
@pytest.mark.parametrize("shape", TREES)
def test_traversal_accepts_at_least_as_much_as_the_walk_down(kind, rule, shape):
    for family in FAMILIES:
        cases = [make_case(each, kind, shape, family, 3) for each in (rule, "traversal")]
        top_down, bottom_up = (enumerate_case(case).accepted for case in cases)
        assert bottom_up >= top_down - 1e-12, family


@pytest.mark.parametrize("family", FAMILIES)
def test_traversal_of_a_chain_is_block_verification(family):
    cases = [make_case(r, NodeKind.IID, "chain-3", family, 3) for r in ("block", "traversal")]
    blockwise, traversed = (enumerate_case(case).accepted for case in cases)
    assert blockwise == pytest.approx(traversed, abs=1e-12)


def test_a_drafter_equal_to_the_target_is_always_accepted():
    for rule in ("chain", "block", "multi-round", "spectr", "traversal"):
        case = make_case(rule, NodeKind.IID, "chain-3", "equal", 3)
        assert enumerate_case(case).accepted == pytest.approx(3.0, abs=1e-12)


# -- several drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["random", "peaked", "zeros-in-q", "trimmed"])
@pytest.mark.parametrize(("shape", "num"), [("two", 2), ("three", 3)])
def test_k_sequential_selection_accepts_its_closed_form(shape, num, family):
    case = make_case("spectr", NodeKind.IID, shape, family, 3, seed=2)
    p, q = case.p[()], case.q[()]

    def beta(rho):
        return float(np.minimum(p / rho, q).sum())

    rho = brentq(lambda x: 1 - (1 - beta(x)) ** num - x * beta(x), 1.0, num, xtol=1e-14)
    expected = 1 - (1 - beta(rho)) ** num
    assert enumerate_case(case).accepted == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("family", ["random", "zeros-in-p", "zeros-in-q", "greedy-p"])
@pytest.mark.parametrize(("shape", "num"), [("two", 2), ("three", 3)])
def test_top_plus_one_accepts_its_closed_form(shape, num, family):
    case = make_case("top-plus-one", NodeKind.TOP_PLUS_ONE, shape, family, 4, seed=3)
    p, rest, fixed = case.p[()], case.q[()].copy(), fixed_siblings(case.q[()], num - 1)
    rest[fixed] = 0.0
    expected = p[fixed].sum() + np.minimum(p, rest / rest.sum()).sum()
    assert enumerate_case(case).accepted == pytest.approx(expected, abs=1e-12)


def best_coupling(p, chance_all_in):
    """1 + min over sets H of p(H) - P(every draft lies in H): no verifier accepts more."""
    subsets = product([False, True], repeat=len(p))
    return 1 + min(p[list(h)].sum() - chance_all_in(np.array(h)) for h in subsets)


@pytest.mark.parametrize("seed", range(4))
def test_no_rule_accepts_more_than_the_optimal_coupling_and_top_plus_one_attains_it(seed):
    case = make_case("top-plus-one", NodeKind.TOP_PLUS_ONE, "three", "random", 4, seed)
    p, q, fixed = case.p[()], case.q[()], fixed_siblings(case.q[()], 2)
    rest = np.where(np.isin(np.arange(4), fixed), 0, q)
    rest /= rest.sum()
    bound = best_coupling(p, lambda h: float(h[fixed].all()) * rest[h].sum())
    assert enumerate_case(case).accepted == pytest.approx(bound, abs=1e-12)
    iid_bound = best_coupling(p, lambda h: float(q[h].sum() ** 3))
    for rule in ("multi-round", "spectr", "traversal"):
        found = enumerate_case(make_case(rule, NodeKind.IID, "three", "random", 4, seed)).accepted
        assert found <= iid_bound + 1e-12, rule
        assert found >= (1 - np.exp(-1)) * iid_bound, rule


def test_refilling_never_accepts_less_and_wins_where_q_is_narrow():
    for family in FAMILIES:
        pairs = (("recursive", NodeKind.WITHOUT_REPLACEMENT), ("sequoia", NodeKind.REFILLED))
        plain, refilled = (
            enumerate_case(make_case(r, k, "three", family, 4)).accepted for r, k in pairs
        )
        assert refilled >= plain - 1e-12
        assert family not in ("trimmed", "disjoint") or refilled > plain + 1e-3


def test_refilled_siblings_that_cover_the_vocabulary_are_always_accepted():
    for family in FAMILIES:
        case = make_case("sequoia", NodeKind.REFILLED, "three", family, 3)
        assert enumerate_case(case).accepted == pytest.approx(1.0, abs=1e-12), family


@pytest.mark.parametrize("family", FAMILIES)
def test_one_path_is_block_verification(family):
    kinds = (("block", NodeKind.IID), ("multi-path", NodeKind.PATHS))
    cases = [make_case(rule, kind, "chain-3", family, 3) for rule, kind in kinds]
    blockwise, pathwise = (enumerate_case(case).accepted for case in cases)
    assert pathwise == pytest.approx(blockwise, abs=1e-12)


def test_two_paths_accept_more_than_one():
    one = two = 0.0
    for seed in range(5):
        case = make_case("multi-path", NodeKind.PATHS, "two-paths", "random", 3, seed)
        two += enumerate_case(case).accepted
        one += enumerate_case(replace(case, shape=(-1, 0))).accepted
    assert two > 1.1 * one


def test_every_legal_pair_of_rule_and_kind_is_enumerated():
    plan = planned_cases("full")
    seen = {(rule, kind, is_chain(SHAPES[shape])) for rule, kind, shape, *_ in plan}
    expected = {(r, k, c) for r in RULES for k in NodeKind for c in (True, False) if legal(r, k, c)}
    missing = {x for x in expected - seen if x[0] != "greedy"}
    assert not missing
