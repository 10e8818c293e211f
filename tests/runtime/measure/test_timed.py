"""What is counted in timed runs: contexts, sums, standard errors."""

from __future__ import annotations

import math

import pytest

from specctl.runtime.measure.timed import (
    AnswerCount,
    Timed,
    added,
    context_name,
    context_range,
    jackknife,
    joined,
    speedup_error,
    tau_error,
)


@pytest.mark.parametrize(
    ("length", "name"),
    [(0, "0-512"), (511, "0-512"), (512, "512-1k"), (4095, "2k-4k"), (8191, "4k-8k"),
     (8192, "8k+"), (100_000, "8k+")],
)  # fmt: skip
def test_a_context_lies_in_a_range_up_to_8k(length: int, name: str) -> None:
    assert context_name(context_range(length)) == name


def test_rounds_are_counted_by_the_context_in_which_they_were_played() -> None:
    answer = AnswerCount()
    for context, tokens in ((510, 3), (513, 2), (515, 1)):
        answer.count(context, tokens)
    assert (answer.tokens, answer.rounds) == (6, 3)
    assert answer.context_tokens[:2] == [3, 3]
    assert answer.context_rounds[:2] == [1, 2]


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    mean = sum(values) / 4
    usual = math.sqrt(sum((v - mean) ** 2 for v in values) / 3 / 4)
    found = jackknife(4, lambda kept: sum(values[i] for i in kept) / len(kept))
    assert found == pytest.approx(usual)
    assert jackknife(1, lambda kept: 0.0) is None


def answer(tokens: int, rounds: int, seconds: float = 0.0) -> AnswerCount:
    return AnswerCount(tokens, rounds, seconds)


def test_tau_of_like_questions_has_no_error_and_of_unlike_ones_has() -> None:
    assert tau_error([answer(20, 10), answer(40, 20)]) == pytest.approx(0.0)
    # without one of two: tau 3 or 1, so sqrt(1/2 * ((3 - 2)^2 + (1 - 2)^2)) = 1
    assert tau_error([answer(10, 10), answer(30, 10)]) == pytest.approx(1.0)


def test_the_error_of_a_speed_up_pairs_the_questions() -> None:
    plain = [answer(10, 10, 1.0), answer(10, 10, 4.0)]
    twice = [answer(10, 5, 0.5), answer(10, 5, 2.0)]
    assert speedup_error(twice, plain) == pytest.approx(0.0)
    mixed = [answer(10, 5, 0.5), answer(10, 5, 4.0)]
    assert speedup_error(mixed, plain) == pytest.approx(0.5)


def test_rows_that_are_decoded_together_have_no_seconds_of_their_own() -> None:
    together = [answer(10, 5), answer(10, 5)]
    assert speedup_error(together, together) is None


def test_runs_that_follow_each_other_add_up() -> None:
    one = Timed(10, 1.0, ((1,) * 10,), 2.0, 0.5, (3, 1), (5, 3), (answer(10, 5),))
    other = Timed(30, 3.0, ((2,) * 30,), 3.0, 0.1, (9,), (10,), (answer(30, 10),))
    whole = joined([one, other])
    assert (whole.tokens, whole.seconds) == (40, 4.0)
    assert whole.tau == pytest.approx(40 / 15)
    assert whole.draft_share == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)
    assert (whole.accepted_at, whole.tested_at) == ((12, 1), (15, 3))
    assert whole.well_counted == (0.8,)
    assert added(whole.answers).rounds == 15
    assert joined([one, Timed(1, 1.0, ((1,),))]).tau is None
