"""A row's text is the same alone and in any batch: under every rule and policy whose drafts follow
from the row alone, whatever the other rows' limits, temperatures and number are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.verify import legal_rules
from specctl_testing.runtime.markov import MarkovDrafter, Pair, Silent, mixed

LIMITS = (19, 1, 2, 12, 5, 3, 4, 6)
POLICIES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "length": 5},
    "chain-stopped": {"policy": "chain", "length": 6, "confidence": 0.5},
    "static-tree": {"policy": "static-tree", "branch": (3, 2, 1, 1)},
    "dyspec-greedy": {"policy": "dyspec", "nodes": 9, "length": 5, "threshold": 0.0},
    "dyspec-layers": {"policy": "dyspec", "nodes": 9, "length": 5, "threshold": 0.05},
    "rsd": {"policy": "rsd", "length": 4, "beam": 3},
    "sequoia": {"policy": "sequoia", "length": 4, "nodes": 10},
    "mcsd": {"policy": "mcsd", "branch": (3, 2, 1), "confidence": 0.4},
    "paths": {"policy": "paths", "length": 4, "beam": 3},
    "top-plus-one": {"policy": "top-plus-one", "branch": (3, 2, 1)},
    "dynamic-tree": {"policy": "dynamic-tree", "length": 4, "nodes": 8, "beam": 3},
    "opt-tree": {"policy": "opt-tree", "length": 5, "nodes": 8, "threshold": 0.3},
    "ddd": {"policy": "ddd", "length": 5, "nodes": 8, "beam": 3, "threshold": 0.5},
    "cape": {"policy": "cape", "length": 4, "widths": (4, 3, 2, 1)},
    "merged-beams": {"policy": "merged-beams", "length": 4, "beam": 3},
    "hardware-tree": {"policy": "hardware-tree", "length": 4, "nodes": 9},
}
CASES = [
    (policy, rule)
    for policy, serve in POLICIES.items()
    for made in [make_policy(serve)]
    for rule in legal_rules(made.kind(sampled=True), made.is_chain)
    if rule not in ("greedy", "target-only" if policy != "rsd" else "")
] + [("chain", "auto"), ("static-tree", "auto"), ("dynamic-tree", "auto")]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mixed(3, size=7, noise=1.0)


def requests() -> list[Request]:
    """Several limits, temperatures and truncations, a greedy row among them."""
    ways = (Sampling(1.0), Sampling(0.8, top_p=0.8), Sampling(0.0), Sampling(1.3, top_k=3))
    return [
        Request((i % 7,), replace(ways[i % 4], seed=100 + i, max_new_tokens=limit))
        for i, limit in enumerate(LIMITS)
    ]


def texts(pair: Pair, kind: type[MarkovDrafter], case: tuple[str, str], slots: int) -> list[Any]:
    policy, rule = case
    made = make_policy(POLICIES[policy])
    engine = Engine(pair.target, kind(pair.q_VV), made, rule, num_slots=slots)
    if slots > 1:
        return [done.tokens for done in engine.run(requests())]
    return [engine.run([request])[0].tokens for request in requests()]


@pytest.mark.parametrize("drafter", [MarkovDrafter, Silent])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_rows_text_does_not_depend_on_the_batch(pair: Pair, case: Any, drafter: Any) -> None:
    alone = texts(pair, drafter, case, 1)
    assert [len(text) for text in alone] == list(LIMITS)
    assert texts(pair, drafter, case, 5) == alone, "rows join when others leave"


class Some:
    """A batch policy under which sampled rows do not draft and greedy ones do."""

    def would_draft(self, rows: Any) -> bool:
        return True

    def lengths(self, rows: Any) -> tuple[int, ...]:
        return tuple(row.at_most(3 if row.index % 4 == 2 else 0) for row in rows)

    def observe(self, outcome: Any, seconds: Any) -> None:
        pass


def test_greedy_rows_that_draft_alone_leave_the_rule_to_the_sampled_ones(pair: Pair) -> None:
    """Their drafts are of the kind that the rule of the whole batch can verify."""
    made = make_policy(POLICIES["chain"])
    engine = Engine(pair.target, MarkovDrafter(pair.q_VV), made, "block", 8, batching=Some())  # type: ignore[arg-type]
    done = engine.run(requests())
    assert [len(each.tokens) for each in done] == list(LIMITS)
    assert sum(each.stats.drafted for each in done[2::4]) > 0
