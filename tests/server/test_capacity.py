"""How many rows fit: a drafter's memory of a row counts like the target's cache of it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from specctl.core.drafter import Space, tensor_bytes
from specctl.core.errors import ResourceError
from specctl.drafters import families
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import Limits, Service
from specctl_testing.runtime.foreign import drafter_of as foreign_drafter
from specctl_testing.runtime.foreign import make_tokenizer
from specctl_testing.runtime.service_requests import (
    alone,
    collect,
    drafter_of,
    requests_of,
    served,
    small_target,
    tokens_of,
)

KEEPING = ("small-lm", "eagle3", "medusa", "hydra", "glide")


@pytest.fixture(scope="module")
def target(make_model):
    return small_target(make_model)


def bound(target, name):
    drafter = drafter_of(target, name)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def told_and_taken(drafter):
    """Bytes of a slot as they are told, and as two states of that size differ."""
    spaces = [Space(n, 300, 9, torch.device("cpu"), torch.float32) for n in (2, 5)]
    sizes = [tensor_bytes(drafter.open(space), drafter) for space in spaces]
    return drafter.slot_bytes(spaces[0]), (sizes[1] - sizes[0]) // 3


@pytest.mark.parametrize("name", sorted(families()))
def test_what_a_slot_takes_is_told_before_a_state_of_that_size_is_opened(target, name):
    told, taken = told_and_taken(bound(target, name))
    assert told == taken


@pytest.mark.parametrize("method", ["tli", "slem", "slrs"])
def test_a_draft_of_another_tokenizer_takes_no_more_than_its_own_context(make_model, method):
    one, other = make_tokenizer(1, 24), make_tokenizer(2, 28)
    model = make_model(num_layers=1, vocab=len(other), max_position_embeddings=160)
    drafter = foreign_drafter(
        Target.from_model(model, other, "draft"),
        Target.from_model(make_model(num_layers=1, vocab=len(one)), one),
        method,
    )
    told, taken = told_and_taken(drafter)
    assert told == taken > 0


def test_a_tensor_counts_once_and_weights_do_not_count():
    whole = torch.zeros(4, 8)
    held = {"a": [whole, whole[1:]], "b": (whole.view(-1), torch.nn.Linear(8, 8)), "c": "text"}
    assert tensor_bytes(held) == whole.numel() * 4
    assert tensor_bytes(held, without=held["a"]) == whole.numel() * 4
    assert tensor_bytes([whole], without=whole) == 0


@pytest.mark.parametrize("name", KEEPING)
def test_a_budget_holds_the_rows_of_target_and_drafter(target, name):
    room = Service(target, bound(target, name)).room
    assert room.drafter_bytes > 0
    limits = Limits(memory=3 * room.slot_bytes)
    assert Service(target, bound(target, name), limits=limits).room.slots == 3
    assert Service(target, limits=limits).room.slots > 3


def test_a_row_that_does_not_fit_is_refused_with_what_either_takes(target):
    room = Service(target, bound(target, "eagle3")).room
    cache = room.slot_bytes - room.drafter_bytes
    with pytest.raises(ResourceError) as caught:
        Service(target, bound(target, "eagle3"), limits=Limits(memory=room.slot_bytes - 1))
    told = f"{cache / 1e3:.0f} kB for the target and {room.drafter_bytes / 1e3:.0f} kB for the"
    assert told in str(caught.value.expected)
    assert "without the drafter" in str(caught.value.do)


def test_a_drafter_that_cannot_be_measured_is_no_reason_not_to_serve(target, monkeypatch):
    drafter, asks = drafter_of(target), requests_of(2)
    monkeypatch.setattr(drafter, "open", lambda space: 1 / 0)

    async def run():
        async with served(target, drafter) as service:
            return service.room, [await collect(service, ask) for ask in asks]

    room, found = asyncio.run(run())
    assert room.drafter_bytes == 0
    assert [tokens_of(each) for each in found] == [alone(target, ask).token_ids for ask in asks]
