"""A service in which something fails: as few answers as possible go with it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.text.text_stream import TextStream
from specctl.server.engine_thread.service import (
    GenerateRequest,
    Limits,
    Service,
    Unavailable,
)
from specctl_testing.runtime.service_requests import (
    alone,
    collect,
    drafter_of,
    requests_of,
    served,
    small_target,
    tokens_of,
)


@pytest.fixture(scope="module")
def target(make_model):
    return small_target(make_model)


def test_a_round_that_fails_ends_what_runs_and_serves_the_next(target, monkeypatch):
    run_lm = type(target.lm).run
    broken = []

    def sometimes(self, feed, kv):
        if broken:
            raise RuntimeError(broken.pop())
        return run_lm(self, feed, kv)

    monkeypatch.setattr(type(target.lm), "run", sometimes)

    async def run():
        async with served(target, max_batch=2) as service:
            ticket = await service.submit(
                GenerateRequest((10,), Sampling(max_new_tokens=99, ignore_eos=True))
            )
            await anext(ticket)
            broken.append("out of memory")
            rest = [piece async for piece in ticket]
            after = await collect(service, requests_of(2)[1])
            return ticket, rest, after, service.counters

    ticket, rest, after, counters = asyncio.run(run())
    assert rest[-1].finish_reason == "error"
    assert "RuntimeError" in ticket.failure.found
    assert "out of memory" not in str(ticket.failure)
    assert tokens_of(after) == alone(target, requests_of(2)[1]).token_ids
    assert counters.requests == {"error": 1, "length": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_the_target_reads_before_anybody_asks(target, monkeypatch, caplog, fails):
    run_lm, read = type(target.lm).run, []

    def noted(self, feed, kv):
        read.append(feed.ids_BT.numel())
        if fails and len(read) == 1:
            raise RuntimeError("a first forward")
        return run_lm(self, feed, kv)

    monkeypatch.setattr(type(target.lm), "run", noted)

    async def run():
        async with served(target, max_batch=2) as service:
            before = list(read)
            return before, await collect(service, requests_of(2)[1]), service.counters

    before, answer, counters = asyncio.run(run())
    assert max(before) > 30
    assert tokens_of(answer) == alone(target, requests_of(2)[1]).token_ids
    assert counters.requests == {"length": 1}
    assert ("not warmed up" in caplog.text) is fails


@pytest.mark.parametrize("where", ["needs", "open", "propose", "observe"])
def test_a_broken_drafter_is_counted_and_said_and_the_answers_stay_right(
    target, where, monkeypatch
):
    drafter, said, asks = drafter_of(target), [], requests_of(5)

    def fails(*args):
        raise ZeroDivisionError

    if where in ("needs", "open"):
        monkeypatch.setattr(drafter, where, fails)
    else:
        opened = drafter.open
        monkeypatch.setattr(drafter, "open", lambda space: with_fault(opened(space)))

    def with_fault(state):
        monkeypatch.setattr(state, where, fails)
        return state

    async def run():
        service = Service(target, drafter, limits=Limits(max_batch=2), say=said.append)
        service.start()
        while service.status().state == "loading":
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*(collect(service, ask) for ask in asks))
        status = service.status()
        service.stop()
        return answers, status, service.counters

    answers, status, counters = asyncio.run(run())
    for ask, pieces in zip(asks, answers, strict=True):
        assert tokens_of(pieces) == alone(target, ask).token_ids
    assert counters.spec_disabled >= 1
    assert any("ZeroDivisionError" in line for line in said)
    assert (status.speculation, "ZeroDivisionError" in status.why_off) == ("off", True)


def test_several_event_loops_may_ask_and_one_that_dies_holds_no_slot(target):
    asks = requests_of(6)
    service = Service(target, limits=Limits(max_batch=2))
    service.start()

    async def ready():
        while service.status().state == "loading":
            await asyncio.sleep(0.005)

    async def abandon():
        ticket = await service.submit(
            GenerateRequest((10,), Sampling(max_new_tokens=450, ignore_eos=True))
        )
        await anext(ticket)  # and the loop is closed with the row running

    asyncio.run(ready())
    asyncio.run(abandon())
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda ask: asyncio.run(collect(service, ask)), asks))
    service.stop()
    for ask, pieces in zip(asks, answers, strict=True):
        assert tokens_of(pieces) == alone(target, ask).token_ids
    assert service.counters.requests == {"length": 6, "cancelled": 1}


def test_code_that_raises_inside_a_round_fails_its_own_row_only(target):
    class Faulty:
        """A logits processor that gives up at the third token."""

        def __call__(self, ids, scores):
            if ids.shape[1] > 3:
                raise RuntimeError("no more")
            return scores

    async def run():
        async with served(target, max_batch=2) as service:
            good = asyncio.create_task(collect(service, replace(requests_of(2)[1])))
            bad = GenerateRequest((10, 11), Sampling(max_new_tokens=9, processors=(Faulty(),)))
            return await collect(service, bad), await good

    failed, good = asyncio.run(run())
    assert [piece.finish_reason for piece in failed] == [None, None, "error"]
    assert tokens_of(good) == alone(target, requests_of(2)[1]).token_ids


def test_text_that_cannot_be_written_fails_its_own_answer_only(target, monkeypatch):
    add = TextStream.add

    def picky(self, token):
        if self._held._stops.plain == ("never",):
            raise UnicodeError
        return add(self, token)

    monkeypatch.setattr(TextStream, "add", picky)
    good, odd = requests_of(2)
    odd = replace(odd, sampling=replace(odd.sampling, stop=("never",)))

    async def run():
        async with served(target, max_batch=2) as service:
            answers = await asyncio.gather(collect(service, good), collect(service, odd))
            assert sorted(service._worker.engine.scheduler.free) == [0, 1]
            return answers

    answered, failed = asyncio.run(run())
    assert tokens_of(answered) == alone(target, good).token_ids
    assert [piece.finish_reason for piece in failed] == ["error"]


def test_a_target_that_fails_in_every_round_ends_the_service(target, monkeypatch):
    def broken(self, feed, kv):
        raise RuntimeError

    monkeypatch.setattr(type(target.lm), "run", broken)

    async def run():
        async with served(target, max_batch=1) as service:
            asks = [collect(service, ask) for ask in requests_of(6)]
            answers = await asyncio.gather(*asks)
            assert service.status().state == "failed"
            with pytest.raises(Unavailable, match="failed"):
                await service.submit(requests_of(1)[0])
            return answers

    for pieces in asyncio.run(run()):
        assert [piece.finish_reason for piece in pieces] == ["error"]


def test_where_nobody_may_wait_who_finds_a_free_slot_is_served(target):
    asks = requests_of(4)

    async def run():
        async with served(target, max_batch=2, queue_timeout=0.0) as service:
            found = [await collect(service, ask) for ask in asks]
            return found, service.counters.requests

    found, requests = asyncio.run(run())
    assert [tokens_of(pieces) for pieces in found] == [alone(target, ask).token_ids for ask in asks]
    assert requests == {"length": 4}


def test_a_drafter_that_could_not_be_opened_is_counted_before_anybody_asks(target, monkeypatch):
    drafter = drafter_of(target)
    monkeypatch.setattr(drafter, "open", lambda space: 1 / 0)

    async def run():
        async with served(target, drafter) as service:
            return service.counters.spec_disabled, service.status().speculation

    assert asyncio.run(run()) == (1, "off")
