"""PEARL where it must pay: target and drafter have a device each, and most drafts are accepted.

Counted, not timed: a forward pass of the target takes one unit, a drafted token a quarter of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.pearl import Pearl
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.markov import MarkovDrafter, Pair, alike

GAMMA = 4  # tokens that are drafted while the target reads once: the paper's choice of a length
TOKENS = 160
Cost = Callable[[float, float], float]  # of a round, by what the target and the drafter take


@pytest.fixture(scope="module")
def pair() -> Pair:
    return alike(3, noise=0.5)  # nine of ten drafted tokens are accepted


def speed(made: list[Completion], cost: Cost) -> Tensor:
    """Tokens per unit of time of each request; a round of no draft takes the target's time."""
    times = [one.stats.rounds * cost(1.0, one.stats.drafted / one.stats.rounds / GAMMA)
             for one in made]  # fmt: skip
    return torch.tensor([TOKENS / time for time in times])


def requests() -> list[Request]:
    one = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return [Request((i % 5,), Sampling(**one, seed=i)) for i in range(12)]


def in_turn(pair: Pair) -> Tensor:
    """The best of all lengths, one device waiting for the other."""
    found = []
    for length in range(1, 3 * GAMMA):
        engine = Engine(pair.target, MarkovDrafter(pair.q_VV), Chain(length=length), num_slots=12)
        found.append(speed(engine.run(requests()), lambda target, draft: target + draft))
    return max(found, key=lambda of_R: float(of_R.mean()))


def ahead(first_R: Tensor, second_R: Tensor) -> float:
    """The mean difference, in standard errors."""
    by_R = first_R - second_R
    return float(by_R.mean() / (by_R.std() / len(by_R) ** 0.5))


@pytest.fixture(scope="module")
def at_once(pair: Pair) -> list[Completion]:
    return Pearl(pair.target, MarkovDrafter(pair.q_VV), Chain(length=GAMMA)).run(requests())


@pytest.fixture(scope="module")
def best(pair: Pair) -> Tensor:
    return in_turn(pair)


@pytest.mark.proof
def test_with_a_device_each_drafting_while_verifying_beats_every_length(
    at_once: list[Completion], best: Tensor
) -> None:
    assert ahead(speed(at_once, max), best) > 4
    assert speed(at_once, max).mean() > 1.15 * best.mean()


def test_on_one_device_it_does_not(at_once: list[Completion], best: Tensor) -> None:
    assert ahead(speed(at_once, lambda target, draft: target + draft), best) < -2
