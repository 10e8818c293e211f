"""CopySpec: the first occurrence of the last gamma tokens, and what gamma trades."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.training_free.copyspec import CopySpec, CopySpecOptions
from specctl.runtime.target.target import Target
from specctl_testing.drafters.following import check_rows_are_private, follow


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=96)
    return found


def drafter_of(target: Target, **options: int) -> CopySpec:
    return CopySpec(CopySpecOptions(**options), target.spec)


def draft(drafter: CopySpec, round_view: Any, text: list[int], depth: int = 16) -> list[int]:
    state = drafter.open(Space(1, 64, 16, torch.device("cpu"), torch.float32))
    state.start(0, text[:-1], {})
    found: list[int] = state.propose(round_view({0: text}), Budget(16, depth)).token_BN[0].tolist()
    return found


def test_the_first_occurrence_is_copied(target: Target, round_view: Any) -> None:
    text = [1, 2, 3, 50, 51, 1, 2, 3, 60, 61, 1, 2, 3]
    assert draft(drafter_of(target), round_view, text, 2) == [50, 51]


def test_a_shorter_repeat_than_gamma_is_not_copied(target: Target, round_view: Any) -> None:
    assert draft(drafter_of(target), round_view, [1, 2, 50, 51, 1, 2]) == []
    assert draft(drafter_of(target, gamma=2), round_view, [1, 2, 50, 51, 1, 2], 1) == [50]
    assert draft(drafter_of(target), round_view, [1, 2]) == []


def test_copies_are_as_long_as_the_option_and_the_budget_say(
    target: Target, round_view: Any
) -> None:
    text = [*range(30), 0, 1, 2]
    assert draft(drafter_of(target), round_view, text) == list(range(3, 13))
    assert draft(drafter_of(target, copy=4), round_view, text) == [3, 4, 5, 6]
    assert draft(drafter_of(target), round_view, text, 2) == [3, 4]


def test_a_larger_gamma_attempts_less_and_wastes_less(target: Target, round_view: Any) -> None:
    rng = random.Random(3)
    pieces = [[rng.randrange(12) for _ in range(12)] for _ in range(5)]
    text = [token for _ in range(40) for token in pieces[rng.randrange(5)]]
    found = {
        gamma: follow(drafter_of(target, gamma=gamma), round_view, text, 120, Budget(10, 10))
        for gamma in (1, 3, 6)
    }
    nodes = [found[gamma].nodes for gamma in (1, 3, 6)]
    waste = [found[gamma].nodes - (found[gamma].tau - 1) for gamma in (1, 3, 6)]
    assert nodes == sorted(nodes, reverse=True)
    assert waste == sorted(waste, reverse=True)
    assert found[3].tau > max(found[1].tau, found[6].tau)


def test_gain_grows_with_the_text_that_can_be_copied(target: Target, round_view: Any) -> None:
    rng = random.Random(4)
    answer = [rng.randrange(96) for _ in range(60)]
    tau = []
    for share in (0, 30, 60):
        other = [rng.randrange(96) for _ in range(60 - share)]
        text = [*answer[:share], *other, *answer]
        tau.append(follow(drafter_of(target), round_view, text, 63, Budget(10, 10)).tau)
    assert tau[0] < 1.1 < tau[1] < tau[2]


def test_rows_are_private(target: Target, round_view: Any) -> None:
    check_rows_are_private(drafter_of(target), round_view)


def test_options_that_copy_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match="out of range"):
        CopySpecOptions(gamma=0)
