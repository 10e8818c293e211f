"""A drafter reads the prompt of a joining row in parts, as the target does; its drafts are those of
a drafter that has read it whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from specctl.core.drafter import Outcome
from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import default_policy, generate
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.states import opened_states

# a model of its own, alone and with more beside it; features of the target, one or several layers,
# several tokens per pass
AHEAD = ("small-lm", "staged", "superposed", "rasd", "eagle", "eagle3", "gumiho", "falcon", "flash")
CHUNK = 5
LONG = tuple((7 * at * at + 3 * at) % 90 for at in range(33))
PROMPTS = (LONG, (4,), LONG[:17], (5, 6), LONG[:CHUNK], LONG[: CHUNK + 1], LONG[: CHUNK + 2])


@dataclass
class Seen(LengthChooser):
    """Drafts as long as the policy allows and keeps every round's tree."""

    first_is_free = False
    trees: list = field(default_factory=list)

    def length(self, batch: int) -> int:
        return 99

    def observe(self, outcome: Outcome, seconds: object) -> None:
        tree = outcome.tree
        parts = (tree.token_BN, tree.parent_BN, tree.valid_BN)
        self.trees.append([part.tolist() for part in parts])


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=3)


def build(target, name):
    torch.manual_seed(1)
    found = families()[name]
    drafter = found.build(found.options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def engine_of(target, name, chunk, slots=1, drafter=None, **named):
    drafter = build(target, name) if drafter is None else drafter
    chooser = Seen(CostTable({0: 1.0}, {0: 1.0}, "", "", 1))
    engine = Engine(
        target, drafter, default_policy(drafter), num_slots=slots, chooser=chooser,
        prefill_chunk=chunk, **named,
    )  # fmt: skip
    engine.open(96)
    return engine, chooser


def counted(state):
    """How many positions the drafter reads by round and slot; filled as the engine goes."""
    read, at = [], {}
    prefill, start = state.prefill, state.start

    def spy_prefill(slot, tokens, taps, first, last):
        assert first == 0 or at[slot] == first
        read.append(last - first)
        at[slot] = last
        prefill(slot, tokens, taps, first, last)

    def spy_start(slot, tokens, taps):
        read.append(len(tokens) - 1 - at.pop(slot, 0))
        start(slot, tokens, taps)

    state.prefill, state.start = spy_prefill, spy_start
    return read


def requests(conversation=None):
    sampling = Sampling(max_new_tokens=5, ignore_eos=True)
    return [Request(prompt, sampling, conversation) for prompt in PROMPTS]


@pytest.mark.parametrize("name", [*AHEAD, "medusa", "prompt-lookup"])
def test_drafts_are_those_of_a_drafter_that_read_the_prompt_whole(target, name):
    found = []
    for splits in (False, True):
        drafter = build(target, name)
        states = opened_states(drafter)
        engine, seen = engine_of(target, name, CHUNK, drafter=drafter)
        states[0].prefills_in_parts &= splits
        read = counted(states[0])
        done = engine.run(requests())
        found.append(([row.tokens for row in done], [row.stats for row in done], seen.trees))
    assert found[0] == found[1]
    assert (max(read) <= CHUNK) == (name in AHEAD)


@pytest.mark.parametrize("name", ["small-lm", "eagle3", "falcon"])
def test_what_a_conversation_has_cached_is_read_in_parts_too(target, name):
    drafter = build(target, name)
    states = opened_states(drafter)
    engine, _ = engine_of(target, name, CHUNK, slots=2, drafter=drafter)
    read = counted(states[0])
    talk = [Request(LONG, Sampling(max_new_tokens=6, ignore_eos=True), "talk")]
    first = engine.run(talk)[0].tokens
    again = [Request((*LONG, *first, 3), talk[0].sampling, "talk")]
    second = engine.run(again)[0]
    assert max(read) <= CHUNK
    assert (
        second.tokens
        == generate(target, [again[0].tokens], sampling=talk[0].sampling).outputs[0].token_ids
    )
    assert second.stats == engine_of(target, name, CHUNK)[0].run(again)[0].stats


@pytest.mark.parametrize("name", ["small-lm", "falcon"])
def test_a_row_that_leaves_half_read_leaves_nothing_to_the_next(target, name):
    engine, seen = engine_of(target, name, CHUNK)
    engine.submit(0, Request(LONG, Sampling(max_new_tokens=5)))
    for _ in range(3):
        engine.step()
    assert not engine.rows, "it is still being read"
    assert engine.cancel(0)
    whole, expected = engine_of(target, name, None)
    for each in (engine, whole):
        each.run([Request(LONG[5:9], Sampling(max_new_tokens=9, ignore_eos=True))])
    assert seen.trees == expected.trees


def test_a_drafter_that_fails_in_a_part_costs_the_drafts_of_that_row_alone(target):
    drafter, guard = build(target, "small-lm"), Guard(target.spec.vocab_size, print)
    states = opened_states(drafter)
    engine, _ = engine_of(target, "small-lm", CHUNK, drafter=drafter, wrap_drafter=guard.wrap)
    [state], calls = states, []
    prefill = state.prefill

    def fails(slot, tokens, taps, first, last):
        calls.append(first)
        if len(calls) == 3:
            raise ValueError
        prefill(slot, tokens, taps, first, last)

    state.prefill = fails
    done = engine.run(requests()[:3])
    plain = Engine(target).run(requests()[:3])
    assert [row.tokens for row in done] == [row.tokens for row in plain]
    assert guard.num_disabled == 1
    assert [row.stats.drafted > 0 for row in done] == [False, True, True]
