"""Rows of one batch that draft differently deep, or not at all: each follows the target's
distribution.

Transitions are counted over many seeded rows of the Markov oracle and compared with its
distribution by chi-square; a rule that took a row's missing nodes for rejected ones would be off by
the residual.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import GuardedEngine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.markov import MarkovDrafter, MarkovState, Pair, Silent, mixed

ROWS, TOKENS = 96, 80
SERVES = {
    "block": {"policy": "chain", "length": 3},
    "traversal": {"policy": "static-tree", "branch": (2, 2, 1)},
    "recursive": {"policy": "rsd", "length": 3, "width": 2},
    "target-only": {"policy": "static-tree", "branch": (2, 1, 1)},
}


class Uneven:
    """Row i drafts i % 4 tokens in even rounds and 3 - i % 4 in odd ones."""

    def __init__(self) -> None:
        self.rounds = 0

    def would_draft(self, rows: int) -> bool:
        return True

    def lengths(self, rows: Any) -> tuple[int, ...]:
        self.rounds += 1
        wanted = [row.index % 4 for row in rows]
        if self.rounds % 2:
            wanted = [3 - length for length in wanted]
        return tuple(row.at_most(k) for row, k in zip(rows, wanted, strict=True))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        pass

    def to_json(self) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mixed(1, size=6, noise=1.2)


def requests(size: int) -> list[Request]:
    return [Request((i % size,), Sampling(1.0, seed=i, max_new_tokens=TOKENS)) for i in range(ROWS)]


def off_the_distribution(pair: Pair, done: list[Completion]) -> tuple[float, float]:
    """Chi-square of the transitions against the distribution, and what one in 10,000 exceeds."""
    size = len(pair.p_VV)
    counts = np.zeros((size, size))
    for completion in done:
        for before, after in pairwise((completion.request.tokens[-1], *completion.tokens)):
            counts[before, after] += 1
    expected = counts.sum(1, keepdims=True) * pair.p_VV.numpy()
    big = expected > 5
    found = ((counts - expected)[big] ** 2 / expected[big]).sum()
    return float(found), float(chi2.ppf(1 - 1e-4, int(big.sum()) - size))


@pytest.mark.parametrize("rule", SERVES)
def test_rows_of_uneven_draft_length_follow_the_distribution(pair: Pair, rule: str) -> None:
    drafter, policy = MarkovDrafter(pair.q_VV), make_policy(SERVES[rule])
    engine = Engine(pair.target, drafter, policy, rule, ROWS, batching=Uneven())
    done = engine.run(requests(len(pair.p_VV)))
    found, most = off_the_distribution(pair, done)
    assert found < most
    drafted = [sum(c.stats.drafted for c in done[row::4]) for row in range(4)]
    assert min(drafted) > 0, "each kind of row drafted in some rounds"


WIDE = {
    "block": {"policy": "chain", "length": 4},
    "traversal": {"policy": "static-tree", "branch": (3, 2, 1)},
    "sequoia": {"policy": "sequoia", "length": 3, "nodes": 8},
    "spectr": {"policy": "mcsd", "branch": (3, 1, 1)},
    "multi-round": {"policy": "mcsd", "branch": (3, 1, 1)},
    "multi-path": {"policy": "paths", "length": 3, "beam": 3},
    "top-plus-one": {"policy": "top-plus-one", "branch": (3, 2, 1)},
}


@pytest.mark.parametrize("rule", WIDE)
def test_rows_of_a_drafter_that_falls_silent_follow_the_distribution(rule: str) -> None:
    """Behind two tokens nothing is drafted, so that paths end early and trees lose whole columns;
    the first token of each row is what most rows draft around."""
    pair = mixed(5, size=6, noise=1.2)
    rows, size = 4000, 6
    drafter, policy = Silent(pair.q_VV), make_policy(WIDE[rule])
    engine = Engine(pair.target, drafter, policy, rule, 400)
    asks = [Request((1,), Sampling(1.0, seed=i, max_new_tokens=4)) for i in range(rows)]
    done = engine.run(asks)
    counts = np.zeros((size, size))
    for completion in done:
        counts[completion.tokens[:2]] += 1
    p_VV = pair.p_VV.numpy()
    expected = rows * p_VV[1][:, None] * p_VV
    big = expected > 5
    found = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert found < chi2.ppf(1 - 1e-4, int(big.sum()) - 1)


class Broken(MarkovState):
    """From its third round on, every other row is drafted from NaN."""

    def root(self, view: Any) -> torch.Tensor:
        logits_BK = super().root(view)
        self.rounds = getattr(self, "rounds", 0) + 1
        return (
            logits_BK
            if self.rounds != 3
            else logits_BK.clone().index_fill_(0, torch.arange(0, len(view.slots), 2), torch.nan)
        )


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_rows_that_lost_their_drafts_follow_the_distribution(pair: Pair, rule: str) -> None:
    drafter = MarkovDrafter(pair.q_VV)
    drafter.open = lambda space: Broken(drafter.log_VV)  # type: ignore[method-assign, assignment]
    policy = make_policy(SERVES[rule])
    engine = GuardedEngine(pair.target, drafter, policy, rule, ROWS, say=lambda text: None)
    done = engine.run(requests(len(pair.p_VV)))
    assert engine.num_disabled == ROWS // 2
    for part in (done[0::2], done[1::2]):
        found, most = off_the_distribution(pair, part)
        assert found < most
    accepted = [sum(c.stats.accepted for c in part) for part in (done[0::2], done[1::2])]
    assert accepted[1] > 10 * accepted[0]


class BrokenAtOnce(MarkovState):
    """Every other row is drafted from NaN in the first round."""

    def root(self, view: Any) -> torch.Tensor:
        every_other = torch.arange(0, len(view.slots), 2)
        return super().root(view).clone().index_fill_(0, every_other, torch.nan)


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_the_very_round_that_was_drafted_from_nan_follows_the_distribution(
    pair: Pair, rule: str
) -> None:
    drafter, rows = MarkovDrafter(pair.q_VV), 3000
    drafter.open = lambda space: BrokenAtOnce(drafter.log_VV)  # type: ignore[method-assign, assignment]
    policy = make_policy(SERVES[rule])
    engine = GuardedEngine(pair.target, drafter, policy, rule, rows, say=lambda text: None)
    engine.open(16)
    for index in range(rows):
        engine.submit(index, Request((1,), Sampling(1.0, seed=index, max_new_tokens=9)))
    first = np.array([emission.tokens[0] for emission in engine.advance()])
    assert engine.num_disabled == rows // 2
    expected = 0.5 * rows * pair.p_VV[1].numpy()
    for part in (first[0::2], first[1::2]):
        counts = np.bincount(part, minlength=len(expected))
        found = ((counts - expected) ** 2 / expected).sum()
        assert found < chi2.ppf(1 - 1e-4, len(expected) - 1)
