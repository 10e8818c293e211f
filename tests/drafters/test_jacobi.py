"""Jacobi, Gauss-Seidel and hybrid decoding: the fixed point, the number of steps, the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Outcome, Space
from specctl.core.errors import RecipeError
from specctl.drafters.windows.jacobi import Jacobi, JacobiOptions, JacobiState
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import PROMPTS, Ran, decode


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def ran(target: Target, schedule: str, **how: Any) -> Ran:
    options = {key: how.pop(key) for key in ("block", "assumed_length") if key in how}
    return decode(target, Jacobi(JacobiOptions(schedule, **options), target.spec), **how)


def argmaxes(target: Target, text: Sequence[int]) -> list[int]:
    """The target's best token after every token of a text, without a cache."""
    ids_1S = torch.tensor([list(text)])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        logits_BTV = target.lm.dense(ids_1S, torch.arange(len(text))[None], masks).logits_BTV
    assert logits_BTV is not None
    found: list[int] = logits_BTV[0].argmax(-1).tolist()
    return found


def by_definition(target: Target, prompt: Sequence[int], length: int) -> tuple[list[int], int]:
    """Algorithm 1 as printed: update all tokens until nothing changes; the updates that did."""
    guess, steps = [0] * length, 0
    while True:
        new = argmaxes(target, [*prompt, *guess])[len(prompt) - 1 : -1]
        if new == guess:
            return guess, steps
        guess, steps = new, steps + 1


def test_the_fixed_point_of_the_printed_algorithm_is_what_the_engine_emits(target: Target) -> None:
    for prompt in PROMPTS:
        fixed, steps = by_definition(target, prompt, 17)
        found = ran(target, "jacobi", prompts=[prompt], tokens=17, length=16, nodes=16)
        assert list(found.answers[0]) == fixed
        assert len(found.outcomes) <= steps + 1 <= 18


def test_fewer_rounds_than_tokens_are_needed(target: Target) -> None:
    for schedule in ("jacobi", "gauss-seidel", "hybrid"):
        found = ran(target, schedule)
        assert found.answers == decode(target, None).answers
        assert found.tau > 1.05


def test_blocks_feed_fewer_guesses_for_a_few_more_rounds(target: Target) -> None:
    whole = ran(target, "jacobi", length=12, nodes=12)
    blocks = ran(target, "gauss-seidel", block=5, length=12, nodes=12)
    assert blocks.drafted < 0.6 * whole.drafted
    assert len(whole.outcomes) <= len(blocks.outcomes) <= 60


def test_a_guess_stays_where_it_was_made_until_the_target_has_seen_it(target: Target) -> None:
    """Forgetting the iterate leaves only lucky padding: the method is its memory."""

    class Forgetful(JacobiState):
        def observe(self, outcome: Outcome) -> None:
            super().observe(outcome)
            self.iterate.guess_ZW.fill_(self.iterate.blank)

    class Without(Jacobi):
        def open(self, space: Space) -> JacobiState:
            return Forgetful(self.options, 0, space)

    options = JacobiOptions("jacobi")
    assert decode(target, Without(options, target.spec)).tau < ran(target, "jacobi").tau - 0.05


def test_no_guess_lies_beyond_its_block(target: Target) -> None:
    found = ran(target, "gauss-seidel", prompts=[PROMPTS[0]], block=4, tokens=30)
    final = 0
    for outcome in found.outcomes:
        assert int(outcome.tree.valid_BN.sum()) <= 4 - final % 4 - 1
        final += outcome.num_accepted[0] + 1


def test_hybrid_goes_on_token_by_token_after_the_assumed_length(target: Target) -> None:
    found = ran(target, "hybrid", prompts=[PROMPTS[0]], assumed_length=10, block=4)
    final, drafted_after = 0, []
    for outcome in found.outcomes:
        if final >= 10:
            drafted_after.append(int(outcome.tree.valid_BN.sum()))
        final += outcome.num_accepted[0] + 1
    assert len(drafted_after) > 15
    assert set(drafted_after) == {0}
    assert found.answers == decode(target, None, [PROMPTS[0]]).answers


def test_rows_of_one_batch_iterate_alone(target: Target) -> None:
    alone, together = ran(target, "jacobi"), ran(target, "jacobi", slots=3)
    assert together.answers == alone.answers
    assert [c.stats.rounds for c in together.completions] == [
        c.stats.rounds for c in alone.completions
    ]


def test_the_first_draft_is_padding(target: Target, round_view: Any) -> None:
    state = Jacobi(JacobiOptions(), target.spec).open(
        Space(1, 64, 8, torch.device("cpu"), torch.float32)
    )
    state.start(0, [5, 6], {})
    tree = state.propose(round_view({0: [5, 6]}), Budget(8, 3))
    assert tree.token_BN.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("fields", [{"schedule": "sor"}, {"block": 1}, {"assumed_length": 0}])
def test_an_empty_or_unknown_schedule_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        JacobiOptions(**fields)
