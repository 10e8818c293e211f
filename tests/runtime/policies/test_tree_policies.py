"""What every tree policy owes, for each of the registry without exception."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

from specctl.core.drafter import Budget, Outcome, RoundSeconds, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind, chain_tree
from specctl.drafters import families
from specctl.recipes.serve import POLICY_FIELDS, ServePart
from specctl.runtime.measure.cost import equip, measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import POLICIES, TREES, make_policy, policies_of
from specctl.runtime.policies.base import Fitting, Policy
from specctl.runtime.proof import prove
from specctl.runtime.proof.reference_checks import Replay, chi_square
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import RULES, default_rule, legal
from specctl_testing.runtime.markov import MarkovDrafter, MarkovState, Pair, mixed
from specctl_testing.runtime.pairs import disturbed

SMALL: dict[str, dict[str, Any]] = {
    "static-tree": {"branch": (2, 2)},
    "top-plus-one": {"branch": (2, 2)},
    "mcsd": {"branch": (2, 2)},
}


def small(name: str, **more: Any) -> Policy:
    return make_policy({"policy": name, **SMALL.get(name, {}), **more})


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mixed(1)


@pytest.fixture(scope="module")
def battery(make_target: Any) -> Any:
    """battery(policy): the proof's checks on a small target and a disturbed copy of it."""
    shape = {"num_layers": 2, "vocab": 32}
    target = make_target(**shape)
    drafter = disturbed(make_target, target, **shape)
    level = prove.ProofLevel(3, 12, samples=200, length=4, all_rules=False, enumeration="slice")
    prompts = [(1, 2, 3), (9,), (4, 4, 8, 15, 16, 23, 31)]

    def make(policy: Policy) -> prove._Battery:
        sampling = Sampling(temperature=1.0)
        return prove._Battery(target, drafter, level, prompts, policy, "auto", sampling)

    return make


def failed(checks: list[prove.Check]) -> list[str]:
    return [f"{check.name}: {check.note}" for check in checks if not check.passed]


@pytest.mark.parametrize("name", TREES)
def test_greedy_and_seeded_text_is_the_targets(battery: Any, name: str) -> None:
    one, replay = battery(small(name)), Replay()
    greedy = Sampling(max_new_tokens=12, ignore_eos=True)
    done = one._run(one.policy, "auto", [greedy] * len(one.prompts), 3)
    for completion in done:
        replay.read(one.target, completion.request.tokens, completion.tokens, greedy)
    assert replay.unexplained == 0, replay.first
    assert sum(completion.stats.accepted for completion in done) > 0
    assert not failed(one.seeded() + one.caches())


def sampled() -> list[tuple[str, str]]:
    """Every policy with its default rule; those that draw siblings also with one from the root."""
    found = [(name, _default(small(name))) for name in TREES]
    return found + [(name, "recursive") for name in ("rsd", "dyspec", "sequoia")]


def _default(policy: Policy) -> str:
    return default_rule(policy.kind(sampled=True), policy.is_chain)


@pytest.mark.parametrize(("name", "rule"), sampled())
def test_sampled_text_follows_the_targets_distribution(battery: Any, name: str, rule: str) -> None:
    checks = battery(small(name)).distribution(small(name), rule)
    assert not failed(checks)


@pytest.mark.parametrize("name", TREES)
def test_every_step_of_long_texts_follows_the_distribution(pair: Pair, name: str) -> None:
    """Six thousand steps of the Markov oracle: a bias of 0.06 in any state shows."""
    counts = pair.run(small(name), tokens=48).steps(len(pair.p_VV))
    for seen_V, distribution_V in zip(counts, pair.p_VV.double().numpy(), strict=True):
        wanted_V = distribution_V * seen_V.sum()
        order = np.argsort(wanted_V)
        seen, wanted = seen_V[order].astype(int).tolist(), wanted_V[order].tolist()
        assert chi_square(seen, wanted).p_value > 1e-5


@pytest.mark.parametrize("name", TREES)
def test_a_rule_that_is_not_lossless_for_its_nodes_is_refused(pair: Pair, name: str) -> None:
    policy, refused = small(name), 0
    for rule in RULES:
        kind = policy.kind(sampled=rule != "target-only")
        if rule != "greedy" and not legal(rule, kind, policy.is_chain):
            with pytest.raises(RecipeError, match="not lossless"):
                pair.run(policy, rule, tokens=4, rows=1)
            refused += 1
    assert refused >= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", TREES)
def test_its_trees_are_trees_within_their_size(pair: Pair, name: str, temperature: float) -> None:
    policy = small(name)
    done = pair.run(policy, tokens=24, rows=8, temperature=temperature)
    for outcome in done.outcomes:
        tree = outcome.tree
        assert tree.num_nodes <= policy.nodes
        assert tree.depth <= policy.depth
        assert tree.kind is policy.kind(temperature > 0) or tree.num_nodes == 0
        assert (tree.q is None) == (tree.kind is NodeKind.POINT)
        for b in range(len(tree.token_BN)):
            check_row(tree, b)


def check_row(tree: Any, b: int) -> None:
    """Parents first, no valid child of padding; siblings distinct where they must be, with ranks in
    draw order and without gaps where a rank is a draw."""
    parents, valid = tree.parent_BN[b].tolist(), tree.valid_BN[b].tolist()
    marks = list(zip(tree.rank_BN[b].tolist(), tree.token_BN[b].tolist(), strict=True))
    below: dict[int, list[tuple[int, int]]] = {}
    for node, parent in enumerate(parents):
        assert parent < node
        if valid[node]:
            assert parent < 0 or valid[parent]
            below.setdefault(parent, []).append(marks[node])
    for siblings in below.values():
        ranks, tokens = zip(*sorted(siblings), strict=True)
        if tree.kind is not NodeKind.POINT:
            assert ranks == tuple(range(len(ranks))), "a draw is missing"
        if tree.kind not in (NodeKind.IID, NodeKind.PATHS):
            assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("name", TREES)
def test_rows_of_different_needs_share_a_round(battery: Any, name: str) -> None:
    """What a row writes does not depend on the rows it travels with (near its end it does: trees
    are no deeper than the row with the most room can use)."""
    one = battery(small(name, **({"length": 3} if "length" in POLICY_FIELDS[name] else {})))
    sampling = Sampling(temperature=1.0, max_new_tokens=14, ignore_eos=True)

    def texts(slots: int) -> list[tuple[int, ...]]:
        done = one._run(one.policy, "auto", [replace(sampling, seed=i) for i in range(3)], slots)
        return [completion.tokens[:8] for completion in done]

    assert texts(1) == texts(3)


def test_every_setting_of_a_policy_is_a_field_of_the_recipe_and_no_other_is_taken() -> None:
    schema = ServePart.model_json_schema()["properties"]
    assert list(POLICY_FIELDS) == list(POLICIES) == schema["policy"]["enum"]
    for name, kind in POLICIES.items():
        own = {field.name for field in fields(kind) if field.init}
        assert set(POLICY_FIELDS[name]) <= own & set(ServePart.model_fields), name
        assert name not in TREES or own == set(POLICY_FIELDS[name]), name
    with pytest.raises(ValueError, match="branch is ignored by policy rsd"):
        ServePart(policy="rsd", branch=(2, 2))


def test_a_family_that_one_tree_grows_is_grown_by_all() -> None:
    for family in families().values():
        policies = policies_of(family)
        assert policies[: len(family.policies)] == family.policies
        assert set(TREES) <= set(policies) or set(TREES).isdisjoint(policies)
    assert set(TREES) <= set(policies_of(families()["small-lm"]))
    assert policies_of(families()["prompt-lookup"]) == ("direct",)


def chain_costs(step: float, node: float) -> CostTable:
    lengths = (0, 1, 4, 16, 64)
    verify = {k: 1.0 + node * k for k in lengths}
    return CostTable({k: step * k for k in lengths}, verify, "cpu", "float32", 1)


def test_what_is_measured_for_a_fitted_tree_are_chains_of_its_drafter(battery: Any) -> None:
    one = battery(small("sequoia", nodes=8))
    costs = measure_costs(one.target, one.drafter, one.policy, [[1, 2]], rounds=2)
    assert set(costs.verify) == {0, 1, 2, 4, 8}
    assert equip(one.policy, costs).policy.nodes <= 8


class Broad(MarkovDrafter):
    """Proposes first tokens alone, however deep a tree is allowed."""

    def open(self, space: Space) -> MarkovState:
        self.state = BroadState(self.log_VV)
        return self.state


class BroadState(MarkovState):
    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        token_BN = torch.arange(budget.nodes).expand(len(view.slots), -1)
        root_BN, is_real_BN = torch.full_like(token_BN, -1), torch.ones_like(token_BN).bool()
        return DraftTree(token_BN, root_BN, token_BN, is_real_BN, NodeKind.POINT, 1)


def test_trees_of_short_paths_have_their_price(battery: Any) -> None:
    drafter, policy = Broad(torch.full((32, 32), 1 / 32)), make_policy({"policy": "direct"})
    costs = measure_costs(battery(policy).target, drafter, policy, [[1, 2]], rounds=4)
    assert max(costs.verify) == policy.depth > 1
    assert all(0 < seconds < inf for seconds in costs.verify.values())


def test_a_fitted_tree_that_does_not_pay_is_not_drafted() -> None:
    """It is drafted whole or not at all, by what rounds take in the run."""
    policy = make_policy({"policy": "sequoia", "nodes": 8, "length": 4})
    made = equip(policy, chain_costs(0.02, 0.002))
    assert made.policy is not None
    assert made.chooser is not None
    assert set(made.chooser.costs.verify) == {0, made.policy.depth}
    chooser, asked = made.chooser, []
    for _ in range(200):
        asked.append(depth := chooser.length(1))
        seconds = RoundSeconds(0.0, 1.0 + 0.8 * (depth > 0), 0.0)
        chooser.observe(drafted_in_vain(depth), seconds)
    assert asked[0] == made.policy.depth
    assert sum(depth > 0 for depth in asked) < 0.1 * len(asked)


def drafted_in_vain(depth: int) -> Outcome:
    none_B = torch.zeros(1, dtype=torch.long)
    view = RoundView((0,), none_B, none_B, none_B, ([],))
    token_BN = none_B[:, None].repeat(1, depth)
    tree = chain_tree(token_BN, torch.ones_like(token_BN, dtype=torch.bool), NodeKind.POINT)
    return Outcome(view, tree, none_B, (0,), none_B, ((0,),), (None,))


@pytest.mark.parametrize(
    "name", [name for name in TREES if isinstance(make_policy({"policy": name}), Fitting)]
)
def test_fitted_to_a_slow_device_it_asks_for_less(pair: Pair, name: str) -> None:
    """The costs of a chain, as the command line measures them, shape the tree."""
    fast, slow = chain_costs(0.02, 0.002), chain_costs(0.6, 0.4)
    policy: Any = make_policy({"policy": name})
    fitted = (equip(policy, costs).policy for costs in (fast, slow))
    large, little = (pair.run(one, tokens=24, rows=8) for one in fitted)
    assert little.calls < large.calls or little.mean_nodes < large.mean_nodes
