"""Enumeration: every rule reproduces the target's joint law exactly, and accepts what it should."""

import numpy as np
import pytest

from specctl.drafters.parts.tree import NodeKind
from specctl.runtime.verify import RULES, legal
from specctl.runtime.verify.cases import FAMILIES, TREES, is_chain, make_case, proof_cases
from specctl.runtime.verify.enumerate import Case, enumerate_case

CASES = list(proof_cases("slice"))


def test_the_slice_of_the_proof_is_large():
    assert len(CASES) >= 1000
    assert {case.rule for case in CASES} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_equals_the_target_to_rounding(rule):
    found = {case.name: enumerate_case(case).error for case in CASES if case.rule == rule}
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
    case = make_case("recursive", NodeKind.IID, "three", "random", 4)
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


def test_block_accepts_strictly_more_on_random_laws():
    cases = [make_case(r, NodeKind.IID, "chain-3", "random", 3) for r in ("chain", "block")]
    token, blockwise = (enumerate_case(case).accepted for case in cases)
    assert blockwise > token + 1e-3


@pytest.mark.parametrize("kind", [NodeKind.IID, NodeKind.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("shape", TREES)
def test_traversal_accepts_at_least_as_much_as_recursive(kind, shape):
    for family in FAMILIES:
        cases = [make_case(rule, kind, shape, family, 3) for rule in ("recursive", "traversal")]
        top_down, bottom_up = (enumerate_case(case).accepted for case in cases)
        assert bottom_up >= top_down - 1e-12, family


@pytest.mark.parametrize("family", FAMILIES)
def test_traversal_of_a_chain_is_block_verification(family):
    cases = [make_case(r, NodeKind.IID, "chain-3", family, 3) for r in ("block", "traversal")]
    blockwise, traversed = (enumerate_case(case).accepted for case in cases)
    assert blockwise == pytest.approx(traversed, abs=1e-12)


def test_a_drafter_equal_to_the_target_is_always_accepted():
    for rule in ("chain", "block", "recursive", "traversal"):
        case = make_case(rule, NodeKind.IID, "chain-3", "equal", 3)
        assert enumerate_case(case).accepted == pytest.approx(3.0, abs=1e-12)


def test_every_legal_pair_of_rule_and_kind_is_enumerated():
    seen = {(case.rule, case.kind, is_chain(case.shape)) for case in proof_cases("full")}
    expected = {(r, k, c) for r in RULES for k in NodeKind for c in (True, False) if legal(r, k, c)}
    missing = {x for x in expected - seen if x[0] != "greedy"}
    assert not missing
