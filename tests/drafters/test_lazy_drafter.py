"""Rows that draft nothing cost their drafter nothing, and nothing else changes."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from specctl.core.drafter import RoundSeconds
from specctl.drafters import families
from specctl.drafters.states.lm_state import MOST_AT_ROOT
from specctl.runtime.batching.fixed import Fixed
from specctl.runtime.batching.table import BySize
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.states import opened_states

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), (11, 12, 11, 12, 11), (20, 2, 20), (8, 8))


@dataclass
class Turns:
    """Row i drafts in rounds that follow from its name, others from nothing but the round."""

    rounds: int = 0
    seen: list = field(default_factory=list)

    def would_draft(self, rows):
        return True

    def lengths(self, rows):
        self.rounds += 1
        return tuple(row.at_most(3 * ((self.rounds + row.index) // 3 % 3 == 0)) for row in rows)

    def observe(self, outcome, seconds):
        self.seen.append((outcome.tree.valid_BN.sum(1).tolist(), seconds))

    def to_json(self):
        return {}


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=3, vocab=24)


@pytest.fixture(scope="module")
def drafters(target, train_a_little):
    made = {}
    for name in ("eagle3", "small-lm", "medusa", "dflash"):
        torch.manual_seed(5)
        drafter = families()[name].build(families()[name].options(), target.spec, None)
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        train_a_little(target, drafter, 12)
        made[name] = drafter
    return made


def requests(temperature=0.0, new=17):
    return [
        Request(prompt, Sampling(temperature, seed=i, max_new_tokens=new + i, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]


def engine_of(target, drafter, batching, slots=3, chunk=None, **named):
    length = {"policy": families()[drafter.family].policies[0]}
    return Engine(
        target, drafter, make_policy(length), num_slots=slots, batching=batching,
        prefill_chunk=chunk, **named,
    )  # fmt: skip


def opened(engine):
    """The state of its drafter, with memory for 128 positions a row."""
    states = opened_states(engine.drafter)
    engine.open(128)
    return states[0]


def spied(engine):
    """How often the state is called, and the positions that `observe` was told of."""
    state, calls = opened(engine), Counter()

    def spy(name, inner, *given):
        calls[name] += 1
        if name == "observe":
            calls["told"] += sum(map(len, given[0].emitted))
        return inner(*given)

    for name in ("join", "prefill", "start", "observe", "end"):
        setattr(state, name, partial(spy, name, getattr(state, name)))
    return calls


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", ["eagle3", "small-lm", "dflash"])
def test_a_drafter_is_never_called_while_nothing_is_drafted(target, drafters, name, chunk):
    engine = engine_of(target, drafters[name], Fixed(0), slots=1 if chunk else 3, chunk=chunk)
    calls = spied(engine)
    done = engine.run(requests())
    assert [row.tokens for row in done] == [r.tokens for r in Engine(target).run(requests())]
    assert not calls, "not even for prompts that are read before any round is planned"
    assert len(engine.drafting) == 0


@pytest.mark.parametrize("name", ["eagle3", "small-lm"])
def test_no_prompt_is_read_ahead_for_a_crowd_that_will_not_draft(target, drafters, name):
    found = {}
    for crowd in (3, 9):  # rows from which on nothing is drafted
        engine = engine_of(target, drafters[name], BySize({1: 3, crowd: 0}), chunk=3)
        calls = spied(engine)
        for index, request in enumerate(requests(new=40)):
            if index == 2:
                for _ in range(12):
                    engine.step()  # two rows draft when the third comes
                assert calls.pop("prefill") > 0
            engine.submit(index, request)
        for _ in range(5):
            engine.step()
        found[crowd] = calls["prefill"]
    assert found[3] == 0 < found[9]


@pytest.mark.parametrize(("is_guarded", "temperature"), [(False, 0.0), (True, 0.8)])
@pytest.mark.parametrize("name", ["eagle3", "small-lm", "medusa", "dflash"])
def test_rows_that_sleep_by_turns_draft_as_if_all_had_followed(
    target, drafters, name, is_guarded, temperature
):
    found = []
    for sleeps in (True, False):
        batching, guard = Turns(), Guard(target.spec.vocab_size, print)
        wrap = guard.wrap if is_guarded else None
        engine = engine_of(target, drafters[name], batching, wrap_drafter=wrap)
        engine.drafting.is_lazy = sleeps
        calls = spied(engine)
        done = engine.run(requests(temperature))
        rounds = [drafted for drafted, _ in batching.seen]
        found.append(([(row.tokens, row.stats) for row in done], rounds))
        told = calls["told"]
        if sleeps:
            assert told < sum(len(row.tokens) for row in done), "who ends asleep has cost nothing"
            assert any(min(drafted) == 0 < max(drafted) for drafted in rounds)
            assert max(seconds.wake for _, seconds in batching.seen) > 0
    assert found[0] == found[1]
    assert sum(row.stats.drafted for row in done) > 0
    if temperature == 0:
        assert [row.tokens for row in done] == [r.tokens for r in Engine(target).run(requests())]


def test_many_missed_tokens_are_read_before_the_root(target, drafters):
    """Not with logits at all of them."""

    class Late(Fixed):
        rounds = 0

        def lengths(self, rows):
            type(self).rounds += 1
            return super().lengths(rows) if self.rounds > 2 * MOST_AT_ROOT else (0,) * len(rows)

    engine = engine_of(target, drafters["small-lm"], Late(3))
    state, widths = opened(engine), []
    missing = state._missing

    def spy(view, guesses):
        found = missing(view, guesses)
        widths.append(found.ids_BW.shape[1])
        return found

    state._missing = spy
    [done] = engine.run([Request(PROMPTS[0], Sampling(max_new_tokens=90, ignore_eos=True))])
    assert done.stats.accepted > 0
    assert max(widths) <= 2, "the root, and the last token of a draft that was accepted whole"


def test_a_drafter_that_fails_as_it_wakes_costs_drafts_only(target, drafters):
    guard = Guard(target.spec.vocab_size, print)
    engine = engine_of(target, drafters["eagle3"], Turns(), wrap_drafter=guard.wrap)
    state = opened(engine)
    inner, plain = state.observe, Engine(target).run(requests())

    def fails(outcome):
        if guard.num_disabled == 0 and engine.drafting.backlog(engine.rows[0]) > 3:
            raise ValueError
        inner(outcome)

    state.observe = fails
    done = engine.run(requests())
    assert guard.num_disabled > 0
    assert guard.why_off is None
    assert [row.tokens for row in done] == [row.tokens for row in plain]
    assert done[-1].stats.drafted > 0, "rows that join later are drafted for"


def test_waking_is_part_of_no_other_time(target, drafters):
    batching = Turns()
    engine = engine_of(target, drafters["eagle3"], batching)
    engine.run(requests())
    times = [seconds for _, seconds in batching.seen]
    assert all(isinstance(each, RoundSeconds) for each in times)
    assert engine.draft_seconds == pytest.approx(sum(each.draft for each in times), rel=1e-6)
    assert engine.prefill_seconds > sum(each.wake for each in times) > 0
