"""FastCoT: the sliding window, and the early answer that is no longer the target's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Outcome, Space
from specctl.core.errors import RecipeError
from specctl.drafters.windows.fastcot import FastCot, FastCotOptions, FastCotState
from specctl.drafters.windows.jacobi import Jacobi, JacobiOptions
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import PROMPTS, Ran, decode

TRIGGER = (22, 23)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def ran(target: Target, drafter: FastCot | None = None, **how: Any) -> Ran:
    return decode(target, drafter or FastCot(FastCotOptions(), target.spec), **how)


class Unrefreshed(FastCotState):
    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.window.guess_ZW.fill_(self.window.blank)


class Forgetful(FastCot):
    def open(self, space: Space) -> FastCotState:
        return Unrefreshed(self.options, 0, space)


def test_a_window_that_slides_needs_no_more_rounds_than_blocks(target: Target) -> None:
    sliding = ran(target)
    blocks = decode(target, Jacobi(JacobiOptions(block=5), target.spec))
    assert sliding.answers == blocks.answers == decode(target, None).answers
    assert sliding.tau > blocks.tau + 0.05


def test_a_window_that_is_not_refreshed_accepts_less(target: Target) -> None:
    forgetful = ran(target, Forgetful(FastCotOptions(), target.spec))
    assert ran(target).tau > forgetful.tau + 0.1


def early(target: Target, after: int, kind: type[FastCot] = FastCot, **how: Any) -> Ran:
    drafter = kind(FastCotOptions(answer_after=after, trigger=TRIGGER), target.spec)
    return ran(target, drafter, **how)


def place(answer: tuple[int, ...], after: int) -> int:
    """Where the trigger stands: behind a rationale of so many tokens at least."""
    return next(i for i in range(after, len(answer)) if answer[i : i + 2] == TRIGGER)


def test_an_early_answer_follows_from_exact_text_guesses_and_trigger(target: Target) -> None:
    plain = decode(target, None).answers
    found = early(target, 10)
    for prompt, exact, answer in zip(PROMPTS, plain, found.answers, strict=True):
        at = place(answer, 10)
        written = at - 6  # the window is 8 long and holds the trigger
        assert written >= 10
        assert answer[:written] == exact[:written]
        behind = decode(target, None, [(*prompt, *answer[: at + 2])], tokens=32 - at - 2)
        assert answer[at + 2 :] == behind.answers[0]


def test_the_share_of_guesses_falls_with_the_length_of_the_rationale(target: Target) -> None:
    shares = []
    for after in (4, 12, 20):
        found = early(target, after, prompts=[PROMPTS[0]])
        state = found.state
        assert isinstance(state, FastCotState)
        assert state.unverified == [6]
        shares.append(6 / place(found.answers[0], after))
    assert shares[0] > shares[1] > shares[2]


def test_refreshed_guesses_agree_with_the_text_they_stand_for_more_often(target: Target) -> None:
    prompts = [(a, b, a) for a in range(1, 5) for b in range(7, 9)]
    exact = decode(target, None, prompts, tokens=24).answers

    def agreement(kind: type[FastCot]) -> int:
        answers = early(target, 8, kind, prompts=prompts, tokens=24).answers
        total = 0
        for true, answer in zip(exact, answers, strict=True):
            at = place(answer, 8)
            total += sum(answer[i] == true[i] for i in range(at - 6, at))
        return total

    assert agreement(FastCot) > 1.5 * agreement(Forgetful)


def test_only_an_early_answer_is_marked_approximate(target: Target) -> None:
    for options, mark in (
        (FastCotOptions(), "lossless:greedy"),
        (FastCotOptions(answer_after=4, trigger=TRIGGER), "approximate:greedy"),
    ):
        drafter = FastCot(options, target.spec)
        policy = make_policy({"policy": "direct", "length": 8})
        sampling = Sampling(max_new_tokens=16)
        made = generate(target, [PROMPTS[0]], drafter=drafter, policy=policy, sampling=sampling)
        assert made.stats.verification == mark
        assert drafter.lossless == mark.startswith("lossless")


def test_rows_of_a_batch_answer_when_their_own_rationale_is_long_enough(target: Target) -> None:
    alone, together = early(target, 9), early(target, 9, slots=2)
    assert together.answers == alone.answers


def test_a_row_without_room_for_the_trigger_goes_on_exactly(target: Target) -> None:
    assert early(target, 30).answers == decode(target, None).answers


def test_sampled_early_answers_hold_the_trigger(target: Target) -> None:
    for answer in early(target, 6, temperature=1.0).answers:
        assert any(answer[i : i + 2] == TRIGGER for i in range(6, 24))


@pytest.mark.parametrize(
    "fields", [{"trigger": (1,)}, {"answer_after": 4}, {"answer_after": -1, "trigger": (1,)}]
)
def test_half_an_early_answer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"trigger|early answer"):
        FastCotOptions(**fields)


def test_a_trigger_that_fits_no_round_is_refused(target: Target) -> None:
    drafter = FastCot(FastCotOptions(answer_after=1, trigger=tuple(range(9))), target.spec)
    with pytest.raises(RecipeError, match="longer than"):
        drafter.open(Space(1, 64, 8, torch.device("cpu"), torch.float32))
