"""Trees of prompt tokens are as large as pays on the device."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
import torch

from specctl.drafters.states.prompt_tree import plan_trees
from specctl.drafters.tokens.ppd import Ppd, PpdOptions
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost import TREE_SIZES, equip, measure_costs
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.prompt_tree import PromptTree
from specctl.runtime.sampling.sampling import Sampling

CHANCES = ((0.5, 0.2), (0.4, 0.2), (0.3,))


@pytest.mark.parametrize(("per_row", "least", "most"), [(0.0, 20, 24), (0.02, 4, 16), (0.5, 2, 3)])
def test_the_size_is_the_one_of_most_tokens_per_second(
    per_row: float, least: int, most: int
) -> None:
    """A device on which rows are free reads many, one on which each costs half a forward, few: two
    at least, a candidate and a prompt token."""
    costs = TreeCosts(0.0, {0: 1.0, 24: 1.0 + 24 * per_row})
    found = PromptTree(nodes=24, profile=CHANCES).fitted(costs).nodes
    rates = {n: plan_trees(CHANCES, n).tokens / costs.verify_seconds(n) for n in range(2, 25)}
    assert found == max(rates, key=rates.__getitem__)
    assert least <= found <= most


def test_what_is_measured_are_rows_of_the_target_and_a_fitted_tree_has_no_more(
    make_target: Any,
) -> None:
    target = make_target("qwen3")
    torch.manual_seed(0)
    drafter = Ppd(PpdOptions(chances=CHANCES), target.spec, None)
    drafter.bind(target.borrowed())
    policy = make_policy({"policy": "prompt-tree", "nodes": 12, "profile": CHANCES})
    costs = measure_costs(target, drafter, policy, [[1, 2, 3]], rounds=4)
    assert sorted(costs.verify) == [0, *(n for n in TREE_SIZES if 0 < n < 12), 12]
    assert all(isfinite(seconds) for seconds in costs.verify.values())
    fitted = equip(policy, costs).policy
    assert isinstance(fitted, PromptTree)
    request = Request((1, 2, 3), Sampling(max_new_tokens=12, ignore_eos=True))
    (drafted,) = Engine(target, drafter, fitted).run([request])
    (plain,) = Engine(target, None, None).run([request])
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.stats.drafted <= fitted.nodes * drafted.stats.rounds
