"""Stores: counting, caps, freezing, tensors, and whose text helps whom."""

from __future__ import annotations

import random
import tracemalloc
from threading import Thread

import pytest
import torch
from safetensors.torch import load, save

from specctl.core.errors import IntegrityError, RecipeError
from specctl.core.spec import Identity
from specctl.drafters.retrieval.store import NgramStore, NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope

HERE = Identity("tokenizer", "target")


def ids_of(store: NgramStore, *key: int) -> list[tuple[int, ...]]:
    return [found.ids for found in store.get(key)]


def test_the_heaviest_continuation_comes_first_and_of_equals_the_newest() -> None:
    store = NgramStore()
    for ids in ((1,), (2, 3), (2, 3), (4,)):
        store.add((7,), ids)
    assert [(c.ids, c.weight) for c in store.get((7,))] == [((2, 3), 2.0), ((4,), 1.0), ((1,), 1.0)]
    assert store.get((8,)) == ()


def test_a_newest_first_store_drops_what_was_not_repeated() -> None:
    store = NgramStore(StoreLimits(per_key=2, newest_first=True))
    for ids in ((1,), (2,), (1,), (3,)):
        store.add((7,), ids)
    assert ids_of(store, 7) == [(3,), (1,)]


def test_a_counting_store_drops_the_lightest() -> None:
    store = NgramStore(StoreLimits(per_key=2))
    for ids in ((1,), (1,), (2,), (3,)):
        store.add((7,), ids)
    assert ids_of(store, 7) == [(1,), (3,)]


def test_fading_makes_old_counts_weigh_less() -> None:
    store = NgramStore()
    store.add((7,), (1,), 4.0)
    store.add((7,), (2,), 1.0, fade=0.5)
    store.add((7,), (2,), 1.0, fade=0.5)
    assert [(c.ids, c.weight) for c in store.get((7,))] == [((2,), 1.5), ((1,), 1.0)]


def test_the_longest_known_suffix_answers() -> None:
    store = NgramStore()
    store.add((2, 3), (50,))
    store.add((3,), (60,))
    assert store.longest([1, 2, 3], range(3, 0, -1))[0].ids == (50,)
    assert store.longest([3], range(3, 0, -1))[0].ids == (60,)
    assert store.longest([9], range(3, 0, -1)) == ()


def test_the_key_that_went_unwritten_for_longest_is_evicted_first() -> None:
    store = NgramStore(StoreLimits(max_bytes=2000))
    store.add((1,), (1, 1))
    store.add((2,), (2, 2))
    store.add((1,), (1, 1))  # written again: now (2,) is the oldest
    store.get((2,))  # reading does not count
    store.add((3,), (3, 3))
    assert ids_of(store, 2) == []
    assert ids_of(store, 1) == [(1, 1)]
    assert ids_of(store, 3) == [(3, 3)]


def test_bytes_are_counted_as_python_takes_them_and_the_cap_holds() -> None:
    rng = random.Random(0)
    store = NgramStore(StoreLimits(max_bytes=600_000))
    tracemalloc.start()
    for _ in range(6000):
        key = tuple(rng.randrange(1000, 30_000) for _ in range(3))
        for _ in range(2):
            store.add(key, tuple(rng.randrange(1000, 30_000) for _ in range(5)))
        assert store.num_bytes <= 600_000
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 * taken < store.num_bytes < 1.5 * taken
    assert len(store) < 6000


def test_a_frozen_store_learns_nothing() -> None:
    store = NgramStore()
    store.add((1,), (2,))
    store.freeze()
    store.add((1,), (3,))
    store.add((4,), (5,))
    assert ids_of(store, 1) == [(2,)]
    assert len(store) == 1


def test_a_store_survives_safetensors_with_its_order_and_bytes() -> None:
    rng = random.Random(1)
    store = NgramStore(StoreLimits(per_key=3, newest_first=True))
    for _ in range(200):
        key = tuple(rng.randrange(5) for _ in range(rng.randrange(1, 3)))
        store.add(key, tuple(rng.randrange(5) for _ in range(rng.randrange(4))), rng.random())
    tensors = load(save(store.tensors("pool.")))
    again = NgramStore.from_tensors(tensors, store.limits, "pool.")
    assert list(again._of) == list(store._of)
    assert again.num_bytes == store.num_bytes
    for key in store._of:
        assert [c.ids for c in again.get(key)] == [c.ids for c in store.get(key)]
    assert len(NgramStore.from_tensors(NgramStore().tensors())) == 0


@pytest.mark.parametrize("name", ["key_end", "entry_end", "ids_end", "weight"])
def test_a_damaged_store_is_refused(name: str) -> None:
    store = NgramStore()
    store.add((1, 2), (3, 4))
    store.add((5,), (6,))
    whole = store.tensors()
    for broken in (
        {**whole, name: whole[name][:-1]},
        {n: t for n, t in whole.items() if n != name},
    ):
        with pytest.raises(IntegrityError, match="cannot be read"):
            NgramStore.from_tensors(broken)
    backwards = {**whole, "ids_end": torch.tensor([3, 1])}
    with pytest.raises(IntegrityError, match="runs"):
        NgramStore.from_tensors(backwards)


def test_by_default_a_row_reads_only_what_it_wrote() -> None:
    rows = NgramStores(Scope.REQUEST).rows(HERE, 2)
    rows.join(0, "a")
    rows.join(1, "a")
    rows.start(0).add((1,), (2,))
    assert rows.start(1).get((1,)) == ()
    rows.end(0)
    assert rows.start(0).get((1,)) == ()


def test_a_conversation_goes_on_with_its_own_text_and_no_other() -> None:
    room = NgramStores(Scope.CONVERSATION)
    rows = room.rows(HERE, 2)
    for slot, conversation in ((0, "anna"), (1, "bert")):
        rows.join(slot, conversation)
        rows.start(slot).add((1,), (slot,))
        rows.end(slot)
    rows.join(1, "anna")
    assert ids_of(rows.start(1), 1) == [(0,)]
    assert len(rows.start(0)) == 0, "a row without a conversation took up the one before it"
    assert len(rows.start(1)) == 0
    other_engine = room.rows(HERE, 1)
    other_engine.join(0, "bert")
    assert ids_of(other_engine.start(0), 1) == [(1,)]


def test_old_conversations_are_forgotten() -> None:
    room = NgramStores(Scope.CONVERSATION)
    first = room.store(HERE, "0")
    for i in range(300):
        room.store(HERE, str(i)).add((1,), (2,))
    assert len(room._shared) == 256
    assert room.store(HERE, "0") is not first


def test_a_process_shares_among_rows_of_one_target_and_tokenizer() -> None:
    room = NgramStores(Scope.PROCESS)
    rows = room.rows(HERE, 2)
    rows.start(0).add((1,), (2,))
    assert ids_of(rows.start(1), 1) == [(2,)]
    for other in (Identity("tokenizer", "other"), Identity("other", "target"), None):
        assert len(room.rows(other, 1).start(0)) == 0
    room.clear()
    assert len(rows.start(0)) == 0


def test_a_disk_store_is_read_and_never_written() -> None:
    disk = NgramStore()
    disk.add((1,), (2,))
    rows = NgramStores(Scope.DISK, disk=disk).rows(HERE, 1)
    rows.start(0).add((1,), (3,))
    assert ids_of(rows.at(0), 1) == [(2,)]
    with pytest.raises(RecipeError, match="not loaded"):
        NgramStores(Scope.DISK).rows(HERE, 1).start(0)


def test_threads_that_share_a_store_lose_no_count() -> None:
    store = NgramStore(StoreLimits(per_key=4))

    def write() -> None:
        for i in range(2000):
            store.add((i % 3,), (i % 2,))

    threads = [Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(c.weight for key in range(3) for c in store.get((key,))) == 8000


def test_limits_of_no_size_are_refused() -> None:
    with pytest.raises(RecipeError, match="no size"):
        StoreLimits(per_key=0)
