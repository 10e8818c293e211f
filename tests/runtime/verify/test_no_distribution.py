"""Behind a draft distribution of NaN or infinities there is no draft: every rule, chains and
trees."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from specctl.core.tree import NodeKind, QRows
from specctl.runtime.proof.cases import make_case, planned_cases
from specctl.runtime.proof.compare import differences, random_round
from specctl.runtime.proof.enumerate import enumerate_case
from specctl.runtime.verify import RULES, legal, run_rule
from specctl.runtime.verify.walk import drawn_from_numbers

CASES = [make_case(*one) for one in planned_cases("quick") if one[3] == "random"]
SAMPLED = [
    (rule, kind, is_chain)
    for rule, kind, is_chain in product(RULES, NodeKind, (True, False))
    if legal(rule, kind, is_chain) and kind is not NodeKind.POINT
]
# Which rows of q are broken: by the tokens in front of them.
BROKEN = {
    "at the root": lambda path: path == (),
    "behind every first token": lambda path: len(path) == 1,
    "behind one first token": lambda path: path[:1] == (0,),
    "behind two of three": lambda path: len(path) > 0 and path[-1] != 1,
}


def broken(case, where, value):
    q = {
        path: np.full_like(row, value) if BROKEN[where](path) else row
        for path, row in case.q.items()
    }
    return replace(case, q=q)


@pytest.mark.parametrize("where", BROKEN)
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_target_s_with_broken_draft_rows(rule, where):
    cases = [case for case in CASES if case.rule == rule and case.kind is not NodeKind.POINT]
    cases = cases or [case for case in CASES if case.rule == rule]
    assert cases
    for case in cases:
        found = enumerate_case(broken(case, where, np.nan))
        assert found.error <= 1e-12, case.name


@pytest.mark.parametrize(("rule", "kind", "is_chain"), SAMPLED)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_fast_rule_cuts_broken_rows_as_the_scalar_rule_does(rule, kind, is_chain, value):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        one = random_round(rng, kind, is_chain, num_nodes=4 + seed)
        prob_BTK = one.tree.q.prob_BTK.clone()
        hit_BT = torch.from_numpy(rng.random(prob_BTK.shape[:2]) < 0.3)
        if kind is NodeKind.PATHS:  # rows of equal prefixes are equal
            hit_BT[:] = hit_BT[:, :1]
        prob_BTK[hit_BT] = value
        bad = replace(one, tree=replace(one.tree, q=QRows(prob_BTK)))
        assert differences(rule, bad) == 0


@pytest.mark.parametrize(("rule", "kind", "is_chain"), SAMPLED)
def test_one_number_that_is_none_breaks_its_row(rule, kind, is_chain):
    """A drafter with one NaN logit: softmax makes a row of NaN; one that hands out a single NaN is
    treated alike."""
    one = random_round(np.random.default_rng(1), kind, is_chain)
    prob_BTK = one.tree.q.prob_BTK.clone()
    prob_BTK[:, 0, 2] = np.nan
    verdict = run_rule(rule, replace(one.tree, q=QRows(prob_BTK)), one.scores_BTV, one.noise)
    assert verdict.num_accepted_B.tolist() == [0] * len(prob_BTK)


def test_what_stands_in_front_of_a_broken_row_stays():
    one = random_round(np.random.default_rng(2), NodeKind.IID, True, num_nodes=4)
    prob_BTK = one.tree.q.prob_BTK.clone()
    prob_BTK[:, 2] = np.nan
    tree = replace(one.tree, q=QRows(prob_BTK), valid_BN=torch.ones_like(one.tree.valid_BN))
    cut = drawn_from_numbers(tree)
    assert cut.valid_BN[0].tolist() == [True, True, False, False]
    assert bool(cut.q.prob_BTK.isfinite().all())
    assert drawn_from_numbers(one.tree) is one.tree
