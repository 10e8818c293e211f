"""Questions are asked by category, in turn, and later ones behind the contender's own answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specctl.runtime.measure.bench import Contender, OnAnswers, bench, engine_contender
from specctl.runtime.measure.questions import Question, question_of
from specctl.runtime.measure.timed import AnswerCount, Timed
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.chat_targets import spoken_with
from specctl_testing.runtime.service_requests import drafter_of

SAMPLING = Sampling(max_new_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def chatty(tiny_target: Target) -> Target:
    return spoken_with(tiny_target)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def scripted(name: str, seen: list[tuple[str, tuple[tuple[int, ...], ...]]]) -> Contender:
    """Answers every prompt by the token 65 + its place, in one round of two tokens."""

    def run(prompts: Any, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        seen.append((name, tuple(map(tuple, prompts))))
        ids = tuple((65 + i, 65 + i) for i in range(len(prompts)))
        counts = []
        for prompt in prompts:
            counts.append(AnswerCount(seconds=1.0))
            counts[-1].count(len(prompt), 2)
        on_answers(len(prompts))
        return Timed(2 * len(ids), 1.0 * len(ids), ids, 2.0, 0.0, (1,), (1,), tuple(counts))

    return Contender(name, run)


def test_a_second_question_stands_behind_the_answer_to_the_first(chatty: Target) -> None:
    seen: list[Any] = []
    talk = question_of(chatty, [[user("a")], [user("b")]], "talk")
    bench(chatty, [scripted("plain", seen)], [talk], [SAMPLING], repeats=1)
    warming, first, second = seen
    assert warming[1] == first[1] == (tuple(chatty.encode_chat([user("a")])),)
    answer = {"role": "assistant", "content": chatty.decode([65, 65])}
    assert second[1] == (tuple(chatty.encode_chat([user("a"), answer, user("b")])),)


def test_contenders_take_turns_category_by_category(chatty: Target) -> None:
    seen: list[Any] = []
    questions = [
        Question((1, 2), "one"), Question((3,), "two"), Question((4,), "one"),
    ]  # fmt: skip
    ways = [scripted("plain", seen), scripted("other", seen)]
    report = bench(chatty, ways, questions, [SAMPLING], repeats=1)
    asked_ = seen[2:]  # behind the warm-up of each
    assert asked_ == [
        ("plain", ((1, 2), (4,))), ("other", ((1, 2), (4,))), ("plain", ((3,),)),
        ("other", ((3,),)),
    ]  # fmt: skip
    assert report.categories == {"one": 2, "two": 1}
    other = report.rows[1]
    assert [one.category for one in other.categories] == ["one", "two"]
    assert (other.tau, other.tau_error, other.speedup) == (2.0, 0.0, 1.0)
    assert other.categories[1].tau_error is None  # of a single question
    assert "Speed-up (tau) by category, greedy" in report.details()


def test_what_was_measured_is_told_after_each_category_and_run(chatty: Target) -> None:
    questions = [Question((1, 2), "one"), Question((3,), "two"), Question((4,), "one")]
    ways, parts = [scripted("plain", []), scripted("other", [])], list[Any]()
    bench(chatty, ways, questions, [SAMPLING] * 2, repeats=2, so_far=parts.append)
    assert [one.categories for one in parts[:2]] == [{"one": 2}, {"one": 2, "two": 1}]
    assert [one.num_prompts for one in parts[:2]] == [2, 3]
    assert [one.repeats for one in parts] == [1, 1, 1, 2] * 2  # runs of the newest rows
    assert [len(one.rows) for one in parts] == [2] * 4 + [4] * 4
    assert "other" in str(parts[0].table())


def test_a_turn_for_which_the_context_has_no_room_is_left_out(chatty: Target) -> None:
    seen: list[Any] = []
    long = question_of(chatty, [[user("a")], [user("x = 1\n" * 2000)]], "talk")
    report = bench(chatty, [scripted("plain", seen)], [long], [SAMPLING], repeats=1)
    assert len(seen) == 2
    assert report.rows[0].tokens_per_second > 0


def test_the_engine_counts_every_round_by_question_and_context(tiny_target: Target) -> None:
    prompt = tuple(tiny_target.encode("x = x + 1\n" * 30))
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    way = engine_contender("copy", tiny_target, drafter_of(tiny_target))
    timed = way.run([prompt, prompt[:9]], sampling, lambda answers: None)
    assert [one.tokens for one in timed.answers] == [24, 24]
    rounds = sum(one.rounds for one in timed.answers)
    assert timed.tau == pytest.approx(48 / rounds)
    assert all(one.seconds > 0 for one in timed.answers)
    assert sum(timed.answers[1].context_rounds[1:]) == 0
    both = engine_contender("copy", tiny_target, drafter_of(tiny_target), batch=2)
    together = both.run([prompt, prompt[:9]], sampling, lambda answers: None)
    assert [one.seconds for one in together.answers] == [0.0, 0.0]
    assert together.token_ids == timed.token_ids


def test_rows_of_relaxed_rules_are_marked(tiny_target: Target) -> None:
    """In the table, in every detail, and in JSON; a lossless one beside it is not."""
    prompt = tuple(tiny_target.encode("x = x + 1\n" * 4))
    ways = [
        engine_contender("plain", tiny_target),
        engine_contender("copy", tiny_target, drafter_of(tiny_target)),
        engine_contender("loose", tiny_target, drafter_of(tiny_target), rule="fly:0.5"),
        scripted("theirs", []),
    ]
    report = bench(tiny_target, ways, [prompt], [SAMPLING], repeats=1)
    marks = [row["verification"] for row in report.to_json()["rows"]]
    assert marks[:2] == ["lossless:plain", "lossless:greedy"]
    assert str(marks[2]).startswith("approximate:fly:0.5")
    assert marks[3] is None
    names = [row[0] for row in report.table().rows]
    assert names == ["plain", "copy", "loose (approximate)", "theirs"]
    assert "loose (approximate): its answers are not the target's own" in str(report.table())
    assert [row.name for row in report.rows] == ["plain", "copy", "loose", "theirs"]
    of_two = replace(report.rows[2], verification="approximate of average:0.5:fly:0.5:6")
    assert of_two.shown == "loose (approximate)"
