"""Drafts of one pass beside drafts of a pass a token, where it is known which must pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import fit, make_heads
from specctl_testing.drafters.parallel_runs import counting_batch, counting_target, decode

SIZE, PRICE, LONGEST = 24, 0.2, 5  # a pass of the drafter, where one of the target costs 1


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Any]) -> Target:
    """Counts: every token to come is known from the newest one."""
    return counting_target(make_model, size=SIZE)


def worth(drafter: Any, target: Target, length: int, passes: int, policy: str) -> float:
    """Tokens a unit of cost."""
    ran = decode(target, drafter, ((3, 4, 5), (20, 21)), tokens=20, length=length, policy=policy)
    return ran.tau / (1.0 + PRICE * passes)


@pytest.fixture(scope="module")
def best_chain(target: Target, capture_batch: Any) -> float:
    """EAGLE-3's best length."""
    drafter = make_heads(target, "eagle3", loss="kl", ttt_steps=LONGEST)
    fit(drafter, capture_batch(target, drafter, counting_batch(rows=12, seed=0, size=SIZE)), 40)
    return max(worth(drafter, target, n, n, "chain") for n in range(1, LONGEST + 1))


@pytest.mark.proof
@pytest.mark.parametrize("name", ["dflash", "p-eagle"])
def test_where_tokens_are_known_ahead_one_pass_is_worth_more_than_eagle3_of_any_length(
    target: Target, best_chain: float, capture_batch: Any, name: str
) -> None:
    drafter = make_heads(target, name, loss="kl", num_heads=LONGEST, layers=1, anchors=20)
    fit(drafter, capture_batch(target, drafter, counting_batch(rows=12, seed=0, size=SIZE)), 40)
    assert worth(drafter, target, LONGEST, 1, "direct") > 1.1 * best_chain
