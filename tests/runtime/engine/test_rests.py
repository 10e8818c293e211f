"""Rests: rounds in which nobody is consulted, learned of at once when they are over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from specctl.core.drafter import Outcome, RoundSeconds, RoundView
from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import length
from specctl.runtime.policies.base import RestSpan
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import RESTED, LengthChooser
from specctl.runtime.sampling.sampling import Sampling

ASSUMED = RoundSeconds(0.25, 0.5, 0.125)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(num_layers=2, vocab=64)


@dataclass
class Sleepy(LengthChooser):
    """Never drafts, and rests five rounds at a time, asked before every second of them."""

    asked: list[int] = field(default_factory=list)  # the length of the text each time
    observed: int = 0
    glanced: list[int] = field(default_factory=list)
    ends_at: int = 1 << 20  # length of the text at which a rest has a reason to end
    rests: list[tuple[int, float]] = field(default_factory=list)

    def length(self, batch: int) -> int:
        self.asked.append(batch)
        return 0

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.observed += 1

    def rest(self) -> RestSpan | None:
        return RestSpan(5, glance=2)

    def wakes(self, view: RoundView) -> bool:
        self.glanced.append(len(view.tokens[0]))
        return len(view.tokens[0]) >= self.ends_at

    def rested(self, rest: RestSpan) -> None:
        self.rests.append((rest.tokens, rest.usual))


def engine_of(target: Any, chooser: LengthChooser, **named: Any) -> Engine:
    found = families()["prompt-lookup"]
    drafter = found.build(found.options(), target.spec, None)
    made = Engine(
        target, drafter, Direct(2, 2), "auto", 2, chooser=chooser, assumed_seconds=ASSUMED, **named
    )
    made.open(64)
    return made


def finish(engine: Engine) -> None:
    while engine.is_busy:
        engine.step()


def request(new: int) -> Request:
    return Request((1, 2, 3), Sampling(max_new_tokens=new, ignore_eos=True))


def chooser(**named: Any) -> Sleepy:
    return Sleepy(CostTable({0: 0.1}, {0: 1.0}, "", "", 1), **named)


def test_a_rest_is_learned_of_at_once_and_nobody_is_consulted_meanwhile(target: Any) -> None:
    sleepy = chooser()
    engine = engine_of(target, sleepy)
    engine.submit(0, request(1 + 2 * 6 + 3))  # the first token comes with the prompt
    finish(engine)
    assert (len(sleepy.asked), sleepy.observed) == (3, 4), "and that first round"
    assert sleepy.rests == [(5, 0.75), (5, 0.75), (2, 0.75)], "as it was assumed"
    assert sleepy.glanced == [6, 8, 12, 14, 18], "before every second round of a rest"


def test_a_reason_ends_a_rest(target: Any) -> None:
    sleepy = chooser(ends_at=8)
    engine = engine_of(target, sleepy)
    engine.submit(0, request(1 + 6))
    finish(engine)
    assert sleepy.glanced == [6, 8]
    assert sleepy.rests[0] == (3, 0.75), "the glance before its fourth round"
    assert len(sleepy.asked) == 2


def test_rows_that_join_or_leave_end_a_rest(target: Any) -> None:
    sleepy = chooser()
    engine = engine_of(target, sleepy)
    engine.submit(0, request(12))
    for _ in range(4):  # with the prompt; asked; two rounds of rest
        engine.step()
    engine.submit(1, request(20))
    engine.step()
    assert (sleepy.asked, [tokens for tokens, _ in sleepy.rests]) == ([1, 2], [2])
    finish(engine)
    assert sleepy.asked[-1] == 1
    idle = sum(tokens for tokens, _ in sleepy.rests)
    assert idle + sum(sleepy.asked) + 1 == 32, "one token came with the first prompt"


def test_a_rest_that_fails_costs_the_drafts_alone(target: Any) -> None:
    class Broken(Sleepy):
        def rested(self, rest: RestSpan) -> None:
            raise ValueError

    said: list[str] = []
    guard = Guard(64, said.append)
    engine = engine_of(target, Broken(chooser().costs), wrap_drafter=guard.wrap)
    engine.submit(0, request(30))
    finish(engine)
    assert said, "it is said"


@pytest.mark.parametrize("probe_first", [999, RESTED])  # far away; due, but more than it may lose
def test_a_length_chooser_that_is_off_thinks_about_few_rounds(
    target: Any, probe_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "GLANCE", 8)
    dear = CostTable({0: 0.1, 2: 5.0}, {0: 1.0, 2: 5.0}, "", "", 1)
    made = LengthChooser(dear, alpha=0.05, probe_first=probe_first)
    asked = []
    real = LengthChooser.length
    counting = type("Counting", (LengthChooser,), {})
    counted = counting(dear, alpha=0.05, probe_first=probe_first)
    counting.length = lambda self, batch: (asked.append(self._since), real(self, batch))[1]
    engine = engine_of(target, counted)
    engine.submit(0, request(50))
    finish(engine)
    assert asked[:RESTED] == list(range(RESTED))
    assert {b - a for a, b in zip(asked[RESTED - 1 :], asked[RESTED:], strict=False)} == {8}
    assert counted.rounds == counted.account.rounds == counted.rounds_off == 49
    assert made.rest() is None, "nothing was chosen yet"
