"""OPT-Tree, DDD, CaPE and the hardware-aware tree: optimal, calibrated, cheaper than without."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from specctl.core.errors import RecipeError
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.cape import Caterpillar
from specctl.runtime.policies.ddd import DynamicDepth
from specctl.runtime.policies.dynamic_tree import DynamicTree
from specctl.runtime.policies.dyspec import DySpec
from specctl.runtime.policies.hardware_tree import HardwareTree, expected_tokens
from specctl.runtime.policies.opt_tree import OptTree
from specctl_testing.runtime.markov import Pair, Rounds, alike, mixed


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mixed(1)


def best_value(q_VV: np.ndarray, state: int, nodes: int, depth: int) -> float:
    """Largest sum of path products over every tree of that many nodes, by trying them all: nodes
    shared out among the tokens after `state` in every way."""

    @cache
    def best(state: int, nodes: int, depth: int) -> float:
        if nodes == 0 or depth == 0:
            return 0.0
        table = {0: 0.0}
        for token in range(len(q_VV)):
            chance, new = q_VV[state, token], dict(table)
            for used, worth in table.items():
                for size in range(1, nodes - used + 1):
                    value = worth + chance * (1.0 + best(token, size - 1, depth - 1))
                    new[used + size] = max(new.get(used + size, 0.0), value)
            table = new
        return max(table.values())

    return best(state, nodes, depth)


def values(done: Rounds) -> np.ndarray:
    """The policy's own estimate of every round's tree."""
    trees = [outcome.tree for outcome in done.outcomes]
    return np.concatenate([(t.estimate_BN * t.valid_BN).sum(1).numpy() for t in trees])


@pytest.mark.parametrize(
    "policy", [OptTree(3, 5, threshold=0.0), DySpec(3, 5, threshold=0.0), DynamicTree(3, 5, 8)]
)
def test_no_tree_of_that_size_is_worth_more(pair: Pair, policy: Policy) -> None:
    q_VV = pair.q_VV.double().numpy()
    done = pair.run(policy, "target-only", tokens=16, rows=16)
    for outcome in done.outcomes:
        worth_B = (outcome.tree.estimate_BN * outcome.tree.valid_BN).sum(1)
        for state, worth in zip(outcome.view.root_B.tolist(), worth_B.tolist(), strict=True):
            assert worth == pytest.approx(best_value(q_VV, state, 5, 3), rel=1e-5)


def test_a_narrow_beam_misses_the_best_tree(pair: Pair) -> None:
    wide = values(pair.run(OptTree(3, 5, threshold=0.0), "target-only"))
    narrow = values(pair.run(OptTree(3, 5, 1, 0.0), "target-only"))
    assert narrow.mean() < 0.97 * wide.mean()


def test_the_estimate_of_an_honest_drafter_is_the_measured_length(pair: Pair) -> None:
    honest = Pair(pair.p_VV, pair.p_VV)
    for policy in (OptTree(6, 8), DynamicDepth(6, 8), DySpec(6, 8)):
        done = honest.run(policy, "target-only")
        gap = done.accepted - values(done)
        assert abs(gap.mean()) < 4.5 * gap.std() / np.sqrt(len(gap))


def test_the_threshold_trades_depth_for_draft_calls(pair: Pair) -> None:
    eager, thrifty = (
        pair.run(OptTree(8, 8, threshold=limit), rows=1, tokens=500) for limit in (0.0, 0.3)
    )
    assert thrifty.calls < 0.8 * eager.calls
    assert thrifty.mean / thrifty.calls > 1.1 * eager.mean / eager.calls


def test_dynamic_depth_spares_draft_calls_at_the_same_length(pair: Pair) -> None:
    fixed = pair.run(DynamicTree(10, 12, 3), rows=1, tokens=600)
    grown = pair.run(DynamicDepth(10, 12, 3, 0.15), rows=1, tokens=600)
    assert grown.calls < 0.75 * fixed.calls
    assert grown.mean > fixed.mean - 3 * (grown.error + fixed.error)


def test_it_asks_at_the_given_depths_only(pair: Pair) -> None:
    done = pair.run(DynamicDepth(9, 12, 3, 0.9, (3, 6)), rows=1, tokens=200)
    assert {outcome.tree.depth for outcome in done.outcomes} <= {3, 6, 9}


def test_siblings_where_it_is_unsure_beat_a_plain_chain(pair: Pair) -> None:
    chain = pair.run(Caterpillar(4, (1,)), "target-only")
    crawler = pair.run(Caterpillar(4, (6, 3, 1, 1)), "target-only")
    assert crawler.calls == pytest.approx(chain.calls, abs=0.5)
    assert crawler.mean > chain.mean + 3 * (crawler.error + chain.error)
    widths = {True: [], False: []}  # type: dict[bool, list[int]]
    for outcome in crawler.outcomes:
        first_B = ((outcome.tree.parent_BN == -1) & outcome.tree.valid_BN).sum(1)
        for state, width in zip(outcome.view.root_B.tolist(), first_B.tolist(), strict=True):
            widths[bool(pair.q_VV[state].max() > 0.5)].append(width)
    assert np.mean(widths[False]) > 2 * np.mean(widths[True])
    even = pair.run(Caterpillar(4, (2,)), "target-only")
    per_node = [(one.mean - chain.mean) / (one.mean_nodes - 4) for one in (crawler, even)]
    assert per_node[0] > per_node[1], "the siblings are not where they help"


def test_a_sparse_tree_yields_what_its_profile_says() -> None:
    one = alike(2, spread=1.0, noise=1.0)
    order = np.argsort(-one.q_VV[0].numpy())
    profile = (tuple(float(x) for x in one.p_VV[0].numpy()[order]),) * 5
    for nodes in (3, 9, 20):
        done = one.run(HardwareTree(5, nodes, profile), "target-only")
        assert abs(1 + done.mean - expected_tokens(profile, nodes)) < 4.5 * done.error


def test_each_device_gets_the_size_with_most_tokens_per_second() -> None:
    policy = HardwareTree(6, 40)
    chosen = []
    for costs in (TreeCosts(0.0, {0: 1.0, 64: 1.2}), TreeCosts(0.0, {0: 1.0, 64: 9.0})):
        fit = policy.fitted(costs)
        rates = [expected_tokens(policy.profile, n) / costs.verify_seconds(n) for n in range(1, 41)]
        assert fit.nodes == 1 + int(np.argmax(rates))
        chosen.append(fit.nodes)
    assert chosen[0] > chosen[1]


@pytest.mark.parametrize(
    "serve",
    [
        {"policy": "cape", "widths": (4, 0)},
        {"policy": "cape", "widths": ()},
        {"policy": "hardware-tree", "profile": ((0.9, 0.4),)},
        {"policy": "hardware-tree", "profile": ()},
        {"policy": "mcsd", "branch": (2, 0)},
    ],
)
def test_settings_without_sense_are_refused(serve: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="for example"):
        make_policy(serve)
