"""Before the first round and between rounds: joining, leaving, chunked reading, reused prefixes."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import default_policy, generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling

TREE = {"policy": "dynamic-tree", "length": 3, "nodes": 6, "beam": 3}
CHAIN = {"policy": "chain", "length": 4}
# a model of its own, trees; features of the target; drafts from the text; rows that say nothing
DRAFTERS = {
    "plain": (None, None),
    "small-lm chain": ("small-lm", CHAIN),
    "small-lm tree": ("small-lm", TREE),
    "eagle3": ("eagle3", TREE),
    "medusa": ("medusa", None),
    "prompt-lookup": ("prompt-lookup", None),
    "stand": ("stand", CHAIN),
}


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=3)


def build(target, name):
    family, serve = DRAFTERS[name]
    if family is None:
        return None, None
    found = families()[family]
    torch.manual_seed(1)
    drafter = found.build(found.options(), target.spec, None).to(target.device, target.dtype)
    return drafter, default_policy(drafter) if serve is None else make_policy(serve)


def engine_of(target, name, slots=3, chunk=None, longest=96, **named):
    drafter, policy = build(target, name)
    engine = Engine(target, drafter, policy, "target-only", slots, prefill_chunk=chunk, **named)
    engine.open(longest)
    return engine


def requests_of(count, seed=0, longest=30, new=20):
    """Prompts and answers of different lengths; every other row greedy, the others seeded."""
    rng = random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(96) for _ in range(rng.choice([1, 2, rng.randint(3, longest)]))),
            Sampling(0.8 * (i % 2), seed=i, max_new_tokens=rng.randint(1, new)),
        )
        for i in range(count)
    ]


def alone(target, request):
    return _alone(target, request.tokens, request.sampling)


@cache
def _alone(target, tokens, sampling):
    return generate(target, [tokens], sampling=sampling).outputs[0].token_ids


class Stage:
    """Drives an engine by hand and keeps what every request got."""

    def __init__(self, engine):
        self.engine, self.got, self.done = engine, {}, {}

    def advance(self):
        for emission in self.engine.step():
            row = emission.row
            self.got.setdefault(row.index, []).extend(emission.tokens)
            if row.finished is not None:
                self.done[row.index] = row

    def finish(self):
        while self.engine.is_busy:
            self.advance()
        return self


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_join_and_leave_at_random_write_what_they_would_alone(target, name):
    requests, rng = requests_of(7, new=16), random.Random(5)
    stage, waiting = Stage(engine_of(target, name, chunk=8)), list(enumerate(requests))
    while waiting or stage.engine.is_busy:
        for _ in range(rng.randrange(3)):
            if waiting:
                stage.engine.submit(*waiting.pop(0))
        stage.advance()
    for index, request in enumerate(requests):
        assert tuple(stage.got[index]) == alone(target, request), name
    assert not stage.engine.rows
    assert sorted(stage.engine.scheduler.free) == [0, 1, 2]


@pytest.mark.parametrize("name", ["plain", "small-lm tree"])
def test_a_request_that_is_given_up_at_any_moment_disturbs_nobody(target, name):
    requests = requests_of(6, seed=2, new=12)
    wanted = [alone(target, request) for request in requests]
    for moment in (0, 1, 3, 6, 11):
        stage = Stage(engine_of(target, name, slots=2, chunk=5))
        for index, request in enumerate(requests):
            stage.engine.submit(index, request)
        for _ in range(moment):
            stage.advance()
        leaving = {moment % 6, (moment + 3) % 6} - set(stage.done)
        assert all(stage.engine.cancel(index) for index in leaving)
        assert not any(stage.engine.cancel(index) for index in leaving)
        stage.finish()
        for index in set(range(6)) - leaving:
            assert tuple(stage.got[index]) == wanted[index], (moment, index)
        assert sorted(stage.engine.scheduler.free) == [0, 1]


@pytest.mark.parametrize("name", ["plain", "small-lm chain", "eagle3", "medusa"])
def test_a_prompt_read_in_chunks_is_a_prompt_read_whole(target, name):
    """The same tokens, and the same drafts: the drafter got the same features."""
    long = Request(tuple(range(3, 43)), Sampling(0.8, seed=3, max_new_tokens=12))
    found = []
    for chunk in (None, 1, 7, 64):
        stage = Stage(engine_of(target, name, slots=1, chunk=chunk))
        stage.engine.submit(0, long)
        stage.finish()
        found.append((stage.got[0], stage.done[0].stats))
    assert found == [found[0]] * 4
    assert tuple(found[0][0]) == alone(target, long)


def test_prompts_of_different_lengths_are_read_side_by_side(target):
    requests = requests_of(5, seed=3, longest=40)
    for chunk in (1, 7):
        stage = Stage(engine_of(target, "medusa", slots=5, chunk=chunk))
        for index, request in enumerate(requests):
            stage.engine.submit(index, request)
        stage.finish()
        for index, request in enumerate(requests):
            assert tuple(stage.got[index]) == alone(target, request)


def test_a_long_prompt_is_read_one_chunk_a_round_while_others_go_on(target, monkeypatch):
    widths = []
    run = type(target.lm).run

    def watched(self, feed, kv):
        widths.append(feed.ids_BT.shape[1])
        return run(self, feed, kv)

    monkeypatch.setattr(type(target.lm), "run", watched)
    stage = Stage(engine_of(target, "plain", slots=2, chunk=8))
    stage.engine.submit(0, Request((5,), Sampling(max_new_tokens=30)))
    stage.advance()
    stage.engine.submit(1, Request(tuple(range(60)), Sampling(max_new_tokens=2)))
    before = len(stage.got[0])
    while 1 not in stage.got:
        stage.advance()
    assert max(widths) == 8
    assert len(stage.got[0]) - before == 8, "a token in every round of the eight that read"


def chat(engine, turns, conversation):
    """A conversation of that many turns; every prompt is all that was said and two tokens more."""
    stage, text, got = Stage(engine), tuple(range(20)), []
    for turn in range(turns):
        sampling = Sampling(0.8, seed=turn, max_new_tokens=9)
        request = Request(text, sampling, conversation)
        engine.submit(turn, request)
        stage.finish()
        got.append((request, tuple(stage.got[turn]), stage.done[turn].reused_len))
        text = (*text, *stage.got[turn], 7, turn)
    return got


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_conversation_goes_on_where_it_was_read(target, name):
    engine = engine_of(target, name)
    turns = chat(engine, 3, "ours")
    reads_answers = not engine.needs.taps  # of what was emitted, no features are kept
    for turn, (request, tokens, reused) in enumerate(turns):
        assert tokens == alone(target, request)
        before = turns[turn - 1][0].tokens if turn else ()
        said = len(before) + (len(turns[turn - 1][1]) if turn else 0)
        assert reused == max(0, (said if reads_answers else len(before)) - 1)


def test_nothing_is_reused_between_conversations_or_without_one(target):
    text = tuple(range(30))
    for names in (("a", "b"), (None, None), ("a", None), (None, "a"), ("a", "A")):
        stage = Stage(engine_of(target, "plain", slots=1))
        for index, name in enumerate(names):
            stage.engine.submit(index, Request(text, Sampling(max_new_tokens=3), name))
            stage.finish()
            assert stage.done[index].reused_len == 0


def test_of_a_prompt_given_up_half_way_only_what_was_read_is_reused(target):
    request = Request(tuple(range(40)), Sampling(max_new_tokens=6), "a")
    stage = Stage(engine_of(target, "plain", slots=1, chunk=8))
    stage.engine.submit(0, request)
    stage.advance()
    stage.advance()
    assert stage.engine.cancel(0)
    stage.engine.submit(1, request)
    stage.finish()
    assert stage.done[1].reused_len == 16
    assert tuple(stage.got[1]) == alone(target, request)


def test_the_slot_with_the_longest_beginning_is_taken(target):
    stage = Stage(engine_of(target, "plain", slots=3))
    texts = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9, 9), (8, 8)]
    for index, text in enumerate(texts):
        stage.engine.submit(index, Request(text, Sampling(max_new_tokens=1), "a"))
    stage.finish()
    request = Request((1, 2, 3, 9, 9, 7, 7), Sampling(max_new_tokens=6), "a")
    stage.engine.submit(3, request)
    stage.finish()
    assert (stage.done[3].slot, stage.done[3].reused_len) == (stage.done[1].slot, 5)
    assert tuple(stage.got[3]) == alone(target, request)


def test_a_forgotten_conversation_makes_room_for_the_newest(target):
    stage = Stage(engine_of(target, "plain", slots=2))
    for index, name in enumerate("abc"):
        stage.engine.submit(index, Request((3, 4, 5, 6), Sampling(max_new_tokens=2), name))
        stage.finish()
    kept = {one.conversation for one in stage.engine.scheduler.prefixes.values()}
    assert kept == {"b", "c"}


def test_larger_caches_remember_nothing(target):
    engine = engine_of(target, "plain", slots=1, longest=16)
    chat_request = Request((3, 4, 5, 6), Sampling(max_new_tokens=2), "a")
    Stage(engine).engine.run([chat_request])
    assert engine.scheduler.prefixes
    engine.open(200)
    assert not engine.scheduler.prefixes


def test_a_prompt_that_cannot_be_read_is_refused_when_it_comes(target):
    engine = engine_of(target, "plain")
    with pytest.raises(SpecctlError, match="does not fit"):
        engine.submit(0, Request(tuple([1] * 256), Sampling()))
    assert not engine.is_busy


class Lengths:
    """Draft lengths from a list, in turn; remembers what it was asked and told."""

    def __init__(self, plan):
        self.plan, self.asked, self.told = list(plan), [], []

    def would_draft(self, rows):
        return True

    def lengths(self, rows):
        wanted = self.plan[len(self.asked) % len(self.plan)]
        self.asked.append([(row.index, row.room) for row in rows])
        return tuple(row.at_most(wanted[row.index]) for row in rows)

    def observe(self, outcome, seconds):
        self.told.append(outcome.tree.valid_BN.sum(1).tolist())

    def to_json(self):
        return {}


@pytest.mark.parametrize("name", ["small-lm chain", "small-lm tree", "eagle3"])
def test_every_row_drafts_as_deep_as_the_batch_policy_says(target, name):
    plan = Lengths([(0, 2, 3), (1, 0, 2), (0, 0, 0)])
    stage = Stage(engine_of(target, name, batching=plan))
    requests = [
        Request((i + 3, 8), Sampling(0.9 * (i % 2), seed=i, max_new_tokens=18)) for i in range(3)
    ]
    for index, request in enumerate(requests):
        stage.engine.submit(index, request)
    stage.advance()
    stage.advance()
    stage.advance()
    assert [[index for index, _ in rows] for rows in plan.asked] == [[0, 1, 2]] * 3
    assert plan.told[0][0] == plan.told[1][1] == 0
    assert plan.told[2] == [0, 0, 0]
    if name == "small-lm chain":
        assert plan.told[:2] == [[0, 2, 3], [1, 0, 2]]
    else:
        assert 0 < plan.told[0][1] <= plan.told[0][2]
    stage.finish()
    for index, request in enumerate(requests):
        assert tuple(stage.got[index]) == alone(target, request)
        assert len(stage.done[index].stats.tested_at) <= 3


@pytest.mark.parametrize(
    ("dtype", "read"), [(torch.float32, [12, 1, 1]), (torch.bfloat16, [11, 1, 1, 1])]
)
def test_in_16_bits_the_last_of_a_prompt_is_read_as_it_is_beside_a_draft(
    make_target, monkeypatch, dtype, read
):
    """Prompts may be summed in another order than rounds, which can decide between two tokens: a
    text without drafts was another one than with drafts, whose round reads the last token."""
    target, fed = make_target(num_layers=2, dtype=dtype), []
    run = target.lm.run
    monkeypatch.setattr(target.lm, "run_width", lambda rows, width: width)

    def recorded(feed, kv):
        fed.append(feed.ids_BT.shape[1])
        return run(feed, kv)

    monkeypatch.setattr(target.lm, "run", recorded)
    forward = target.lm.forward

    def step(ids_BT, *given, **named):
        fed.append(ids_BT.shape[1])
        return forward(ids_BT, *given, **named)

    monkeypatch.setattr(target.lm, "forward", step)
    made = generate(target, [list(range(1, 13))], sampling=Sampling(max_new_tokens=3))
    assert len(made.outputs[0].token_ids) == 3
    assert fed == read
