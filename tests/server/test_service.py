"""The service on a small random target: many asks at once, each answered as if it were alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from specctl.runtime.batching import BATCHINGS, BatchCosts, make_batching
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.server.engine_thread.service import (
    Busy,
    GenerateRequest,
    Limits,
    Service,
    TooLong,
    Unavailable,
)
from specctl_testing.runtime.service_requests import (
    alone,
    collect,
    drafter_of,
    requests_of,
    served,
    small_target,
    text_of,
    tokens_of,
)


@pytest.fixture(scope="module")
def target(make_model):
    return small_target(make_model)


@pytest.mark.parametrize("name", [None, "prompt-lookup"])
def test_every_answer_is_what_it_would_be_alone(target, name):
    asks = requests_of(12)

    async def run():
        given = () if name is None else (drafter_of(target, name),)
        async with served(target, *given, max_batch=3, prefill_chunk=16) as service:
            return await asyncio.gather(*(collect(service, ask) for ask in asks)), service

    answers, service = asyncio.run(run())
    for ask, pieces in zip(asks, answers, strict=True):
        wanted = alone(target, ask)
        assert tokens_of(pieces) == wanted.token_ids
        assert text_of(pieces) == wanted.text
        assert all("".join(piece.spans) == piece.text for piece in pieces)
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == wanted.finish_reason
    assert service.counters.requests == {"length": 12}
    assert service.counters.tokens == sum(len(tokens_of(p)) for p in answers)
    assert service.counters.rounds == service.counters.drafts + service.counters.spec_off


def test_a_stop_string_is_cut_wherever_drafts_and_tokens_end(tiny_target):
    """Of a text that repeats itself, so that stop strings end inside accepted drafts."""
    prompt = tuple(tiny_target.encode("def one():\n    return 1\n\ndef two():\n    return 2\n"))
    free = GenerateRequest(prompt, Sampling(max_new_tokens=48))
    text = alone(tiny_target, free).text
    stops = [(text[at : at + size],) for at, size in ((2, 1), (9, 5), (20, 12), (35, 3))]
    asks = [replace(free, sampling=replace(free.sampling, stop=stop)) for stop in stops]

    async def run():
        async with served(tiny_target, drafter_of(tiny_target), max_batch=4) as service:
            return await asyncio.gather(*(collect(service, ask) for ask in asks))

    answers = asyncio.run(run())
    assert any(sum(piece.accepted) > 1 for pieces in answers for piece in pieces)
    for ask, pieces in zip(asks, answers, strict=True):
        wanted = alone(tiny_target, ask)
        assert text_of(pieces) == wanted.text == text[: text.index(ask.sampling.stop[0])]
        assert pieces[-1].finish_reason == "stop"
        assert "".join(span for piece in pieces for span in piece.spans) == wanted.text


def test_an_ask_that_can_never_fit_is_refused_and_the_others_live_on(target):
    async def run():
        async with served(target, max_batch=2, max_len=64) as service:
            task = asyncio.create_task(collect(service, requests_of(1)[0]))
            with pytest.raises(TooLong, match="64") as refused:
                await service.submit(
                    GenerateRequest(tuple(range(10, 60)), Sampling(max_new_tokens=15))
                )
            assert (refused.value.found_tokens, refused.value.allowed_tokens) == (50, 64)
            bias = Sampling(logit_bias={10**6: 1.0}, max_new_tokens=2)
            with pytest.raises(Exception, match="vocabulary"):
                await service.submit(GenerateRequest((10,), bias))
            with pytest.raises(Exception, match="ids below"):
                await service.submit(GenerateRequest((10**6,), Sampling(max_new_tokens=2)))
            return await task

    assert asyncio.run(run())[-1].finish_reason == "length"


def test_the_queue_has_an_exact_length(target):
    async def run():
        async with served(target, max_batch=2, max_queue=3) as service:
            long = GenerateRequest((10,), Sampling(max_new_tokens=200, ignore_eos=True))
            tickets, refused = [], []
            for _ in range(9):
                try:
                    tickets.append(await service.submit(long))
                except Busy as error:
                    refused.append(error.retry_after)
            assert len(tickets) == 5
            assert all(1 <= seconds <= 60 for seconds in refused)
            for ticket in tickets:
                ticket.cancel()
            answers = [[piece async for piece in ticket] for ticket in tickets]
            assert all(pieces == [] or pieces[-1].finish_reason is None for pieces in answers)
            assert service.counters.requests == {"refused": 4, "cancelled": 5}
            assert service.status().running == service.status().waiting == 0

    asyncio.run(run())


def test_who_waits_too_long_is_told_so(target):
    async def run():
        async with served(target, max_batch=1, queue_timeout=0.05) as service:
            first = await service.submit(
                GenerateRequest((10,), Sampling(max_new_tokens=400, ignore_eos=True))
            )
            second = await service.submit(GenerateRequest((11,), Sampling(max_new_tokens=2)))
            with pytest.raises(Busy, match="too long"):
                await anext(second)
            first.cancel()
            assert service.counters.requests["timeout"] == 1

    asyncio.run(run())


def test_cancelling_at_any_moment_frees_the_slot_and_disturbs_nobody(target):
    asks, rng = requests_of(12), random.Random(3)

    async def impatient(service, ask, pieces):
        ticket = await service.submit(ask)
        for _ in range(pieces):
            if await anext(ticket, None) is None:
                break
        ticket.cancel()
        ticket.cancel()
        return [piece async for piece in ticket]

    async def run():
        drafter = drafter_of(target)
        async with served(target, drafter, max_batch=3, prefill_chunk=4) as service:
            leaving = [
                asyncio.create_task(impatient(service, ask, rng.randrange(4))) for ask in asks
            ]
            staying = await asyncio.gather(*(collect(service, ask) for ask in asks))
            await asyncio.gather(*leaving)
            while service.status().running or service.status().waiting:
                await asyncio.sleep(0.005)
            engine = service._worker.engine
            assert not engine.is_busy
            assert sorted(engine.scheduler.free) == [0, 1, 2]
            assert service._worker.jobs == {}
            return staying

    for ask, pieces in zip(asks, asyncio.run(run()), strict=True):
        assert tokens_of(pieces) == alone(target, ask).token_ids


def test_a_drain_finishes_live_rows_and_refuses_new_ones(target):
    async def run():
        async with served(target, max_batch=2) as service:
            tasks = [asyncio.create_task(collect(service, ask)) for ask in requests_of(5)]
            await asyncio.sleep(0)
            drained = asyncio.create_task(service.drain(30.0))
            await asyncio.sleep(0)
            assert service.status().state == "draining"
            with pytest.raises(Unavailable, match="draining"):
                await service.submit(requests_of(1)[0])
            assert await drained
            return [await task for task in tasks]

    answers = asyncio.run(run())
    assert {pieces[-1].finish_reason for pieces in answers} == {"length"}


def test_a_drain_that_takes_too_long_says_so_and_stopping_ends_the_streams(target):
    async def run():
        async with served(target) as service:
            ticket = await service.submit(
                GenerateRequest((10,), Sampling(max_new_tokens=450, ignore_eos=True))
            )
            assert not await service.drain(0.03)
            service.stop()
            assert [p.finish_reason async for p in ticket][-1:] in ([], [None])
            with pytest.raises(Unavailable, match="stopped"):
                await service.submit(requests_of(1)[0])

    asyncio.run(run())


def test_a_conversation_is_not_read_twice(target):
    async def run():
        async with served(target, max_batch=2) as service:
            first = GenerateRequest(
                tuple(range(10, 50)), Sampling(max_new_tokens=5, ignore_eos=True), "a"
            )
            answer = await collect(service, first)
            text = (*first.tokens, *tokens_of(answer), 77, 78)
            again = replace(first, tokens=text)
            reread = await collect(service, again)
            reused = service.counters.reused_tokens
            stranger = await collect(service, replace(again, conversation="b"))
            assert service.counters.reused_tokens == reused == 40 + 4
            assert tokens_of(reread) == tokens_of(stranger) == alone(target, again).token_ids

    asyncio.run(run())


def test_logprobs_of_greedy_tokens_are_the_best_ones(target):
    async def run():
        async with served(target, drafter_of(target)) as service:
            return await collect(service, replace(requests_of(2)[1], logprobs=3))

    pieces = asyncio.run(run())
    found = [one for piece in pieces for one in piece.logprobs]
    assert [one.token for one in found] == list(tokens_of(pieces))
    for one in found:
        assert one.top[0] == (one.token, one.logprob)
        assert sorted((value for _, value in one.top), reverse=True) == [v for _, v in one.top]


def test_metrics_callbacks_hear_of_every_ask(target):
    heard = []

    async def run():
        async with served(target, max_batch=2) as service:
            service.on_finish.extend([heard.append, lambda found: 1 / 0])
            await asyncio.gather(*(collect(service, ask) for ask in requests_of(4)))

    asyncio.run(run())
    assert [found.outcome for found in heard] == ["length"] * 4
    for found in heard:
        assert found.first_token_seconds >= found.queue_seconds >= 0
        assert len(found.inter_token_seconds) == found.stats.tokens - 1


def test_a_service_says_whether_it_drafts(target):
    async def run():
        async with served(target) as plain, served(target, drafter_of(target)) as drafting:
            return plain.status(), drafting.status()

    plain, drafting = asyncio.run(run())
    assert (plain.speculation, plain.why_off) == ("off", "no drafter")
    assert (drafting.speculation, drafting.why_off) == ("on", None)
    assert drafting.context == 512


def test_too_little_memory_for_one_row_is_refused_at_once(target):
    with pytest.raises(Exception, match="does not fit"):
        Service(target, limits=Limits(memory=1000))
    slot = Service(target).room.slot_bytes
    assert Service(target, limits=Limits(memory=3 * slot)).room.slots == 3


class Wild:
    """Draft lengths drawn at random, by row."""

    def __init__(self):
        self.rng = random.Random(1)

    def would_draft(self, rows):
        return True

    def lengths(self, rows):
        return tuple(row.at_most(self.rng.randrange(5)) for row in rows)

    def observe(self, outcome, seconds):
        pass

    def to_json(self):
        return {}


def batching_of(name):
    if name == "wild":
        return Wild()
    seconds = {k: 1.0 + 0.1 * k for k in range(5)}
    table = CostTable(dict.fromkeys(range(5), 0.0), seconds, "cpu", "float32", 1)
    return make_batching(name, 4, BatchCosts({1: table, 3: table}))


@pytest.mark.parametrize("name", [*BATCHINGS, "wild"])
def test_answers_do_not_depend_on_who_decides_the_draft_lengths(target, name):
    """Greedy and seeded, rows joining and leaving: fixed, by goodput, by a table or at random."""
    asks = requests_of(7, new=18)

    async def run():
        policy = make_policy({"policy": "chain", "length": 4})
        given = (target, drafter_of(target, "stand"), policy)
        service = Service(*given, batching=batching_of(name), limits=Limits(max_batch=3))
        service.start()
        while service.status().state == "loading":
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*(collect(service, ask) for ask in asks))
        service.stop()
        return answers, service.status(), service.counters

    answers, status, counters = asyncio.run(run())
    for ask, pieces in zip(asks, answers, strict=True):
        assert tokens_of(pieces) == alone(target, ask).token_ids
    assert (status.why_off, counters.spec_disabled) == (None, 0)
