"""How many siblings a node may be given, and when that must be settled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import Policy
from specctl.runtime.proof.enumerate import Case, drafted, outcomes
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import RULES
from specctl_testing.runtime.markov import Recorder, Silent, mixed

P = np.array([0.2, 0.5, 0.3])
Q = np.array([0.6, 0.1, 0.3])


def distribution_of_next(rule: str, kind: NodeKind, again: tuple[int, ...]) -> np.ndarray:
    """The exact distribution of the next token where a second sibling is drawn behind a first one
    that is among `again`."""
    paths = [(), (0,), (1,), (2,)]
    case = Case("", rule, kind, (-1,), dict.fromkeys(paths, P), dict.fromkeys(paths, Q), 3)
    found = np.zeros(3)

    def add(case: Case, tokens: list[int], weight: float) -> None:
        for chance, (at, distribution) in outcomes(
            RULES[rule].reference, drafted(case, tokens, case.q)
        ):
            found[:] += (
                weight * chance * (np.eye(3)[tokens[at - 1]] if at else np.asarray(distribution))
            )

    for first in range(3):
        if first not in again:
            add(case, [first], Q[first])
            continue
        rest = Q if kind is NodeKind.IID else np.where(np.arange(3) == first, 0.0, Q)
        for second, chance in enumerate(rest / rest.sum()):
            if chance:
                add(replace(case, shape=(-1, -1)), [first, second], Q[first] * chance)
    return found


IID, DISTINCT = NodeKind.IID, NodeKind.WITHOUT_REPLACEMENT
ADAPTIVE = [("multi-round", IID), ("traversal", IID), ("recursive", DISTINCT)]


@pytest.mark.parametrize(("rule", "kind"), [*ADAPTIVE, ("traversal", DISTINCT)])
@pytest.mark.parametrize("again", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_sibling_may_be_drawn_because_of_earlier_ones(
    rule: str, kind: NodeKind, again: tuple[int, ...]
) -> None:
    assert distribution_of_next(rule, kind, again) == pytest.approx(P, abs=1e-12)


def test_spectr_holds_only_where_the_number_is_settled_beforehand() -> None:
    """So that nobody takes the restriction of IID for a formality."""
    for settled in ((), (0, 1, 2)):
        assert distribution_of_next("spectr", IID, settled) == pytest.approx(P, abs=1e-9)
    assert np.abs(distribution_of_next("spectr", IID, (0,)) - P).max() > 0.01


SETTLED: dict[str, dict[str, Any]] = {
    "mcsd": {"policy": "mcsd", "branch": (3, 2, 2)},
    "mcsd-stopped": {"policy": "mcsd", "branch": (3, 2, 2), "confidence": 0.6},
    "mcsd-decided": {"policy": "mcsd", "branch": (3, 2, 2), "stop": "svip"},
    "paths": {"policy": "paths", "length": 3, "beam": 3},
    "top-plus-one": {"policy": "top-plus-one", "branch": (3, 2, 1)},
}


def drawn(policy: Policy) -> list[DraftTree]:
    """Trees of the engine, whose drafter is sure, unsure and silent behind one token or another."""
    pair, recorder = mixed(3, size=6, noise=1.0), Recorder(CostTable({}, {}, "", "", 1))
    engine = Engine(pair.target, Silent(pair.q_VV), policy, num_slots=16, chooser=recorder)
    engine.run([Request((i % 6,), Sampling(1.0, seed=i, max_new_tokens=30)) for i in range(16)])
    return [outcome.tree for outcome in recorder.outcomes]


@pytest.mark.parametrize("name", SETTLED)
def test_our_policies_give_a_node_all_its_children_or_none(name: str) -> None:
    """Whatever tokens come: with a drafter that is sure, unsure and silent in turn."""
    policy = make_policy(SETTLED[name])
    assert policy.kind(sampled=True) in (NodeKind.IID, NodeKind.PATHS, NodeKind.TOP_PLUS_ONE)
    trees = drawn(policy)
    counts: dict[int, set[int]] = {}
    for tree in trees:
        depth_BT = tree.depth_BT()
        for fed in range(tree.num_nodes + 1):
            of_fed_BN = tree.valid_BN & (tree.parent_BN + 1 == fed)
            for b, count in enumerate(of_fed_BN.sum(1).tolist()):
                counts.setdefault(int(depth_BT[b, fed]), set()).add(count)
    assert len(trees) > 5
    for depth, found in counts.items():
        assert len(found - {0}) <= 1, (depth, found)
