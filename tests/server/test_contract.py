"""The service's types and the stub that stands in for a model: what every client may rely on."""

from __future__ import annotations

import asyncio

import pytest

from specctl.core.errors import RecipeError
from specctl.runtime.sampling.sampling import Sampling
from specctl.server.engine_thread.service import (
    Busy,
    GenerateRequest,
    Limits,
    TooLong,
    Unavailable,
)
from specctl_testing.runtime.serving import StubService, stub_target


def ask(**fields):
    return GenerateRequest((0, 7, 9), Sampling(max_new_tokens=fields.pop("limit", 64)), **fields)


async def collect(service, one):
    return [piece async for piece in await service.submit(one)]


def test_the_stub_streams_its_text_in_pieces_that_join_to_it():
    service = StubService(text="naïve 😀 日本\u2028x", chunk=2)
    service.start()
    pieces = asyncio.run(collect(service, ask(logprobs=2)))
    assert "".join(p.text for p in pieces) == service.text
    assert all("".join(p.spans) == p.text for p in pieces)
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(len(one.top) == 2 for p in pieces for one in p.logprobs)
    assert service.counters.requests == {"length": 1}


def test_the_stub_refuses_as_the_service_does():
    limits = Limits(max_batch=1, max_queue=1)

    async def overload():
        service = StubService(delay=0.01, limits=limits)
        with pytest.raises(Unavailable, match="loading"):
            await service.submit(ask())
        service.start()
        with pytest.raises(TooLong, match="1,024"):
            await service.submit(ask(limit=1022))
        first, second = await service.submit(ask()), await service.submit(ask())
        with pytest.raises(Busy):
            await service.submit(ask())
        first.cancel()
        first.cancel()
        assert len([p async for p in second]) > 1
        assert await service.drain(1.0)
        return service

    service = asyncio.run(overload())
    assert service.counters.requests == {"cancelled": 1, "length": 1}
    assert service.status().running == 0


def test_the_stub_fails_where_it_is_told_to():
    service = StubService(fail_after=2)
    service.start()
    pieces = asyncio.run(collect(service, ask()))
    assert [p.finish_reason for p in pieces] == [None, None, "error"]


def test_limits_refuse_what_makes_no_sense():
    with pytest.raises(RecipeError, match="max_batch"):
        Limits(max_batch=0)
    assert stub_target().encode("a")
