"""SuffixDecoding: counts against a scan, the bound of a tenant's answers, who drafts from them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.nets.options import served_anew
from specctl.drafters.retrieval.corpus import BREAK
from specctl.drafters.retrieval.responses import ID_BYTES, ResponseStore, continued, suffixes
from specctl.drafters.team import Team
from specctl.drafters.training_free.suffix_decoding import (
    SuffixDecoding,
    SuffixDecodingOptions,
    SuffixDecodingState,
)
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.policies.direct import Direct
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

texts = st.lists(st.integers(-1, 2), min_size=1, max_size=40)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def ids(text: Sequence[int]) -> Any:
    return np.array(text, dtype=np.int32)


@given(texts, contexts)
@settings(max_examples=80, deadline=None)
def test_suffixes_and_path_probabilities_are_those_of_a_scan(
    text: list[int], context: list[int]
) -> None:
    """A node's chance: of all places of the suffix the share that goes on with the whole path."""
    found = suffixes(ids(text), context)
    counts = []
    for length, places in found:
        suffix = context[-length:]
        wanted = [i for i in range(length - 1, len(text)) if text[i + 1 - length : i + 1] == suffix]
        assert places.tolist() == wanted
        counts.append(len(wanted))
        behind = Counter(
            tuple(text[i + 1 : i + 1 + k])
            for i in wanted
            for k in range(1, 4)
            if len(text[i + 1 : i + 1 + k]) == k and BREAK not in text[i + 1 : i + 1 + k]
        )
        trie = continued(ids(text), places, 100, 3, 0.2, branches=True)
        paths = {path_of(trie, n): trie.estimates[n] for n in range(len(trie))}
        likely = {path: n / len(wanted) for path, n in behind.items() if n / len(wanted) >= 0.2}
        assert paths == pytest.approx(likely)
    lengths = [length for length, _ in found]
    assert lengths == sorted(lengths, reverse=True)
    assert counts == sorted(set(counts))  # of suffixes at the same places only the longest


def path_of(trie: Any, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(trie.tokens[node])
        node = trie.parents[node]
    return tuple(path[::-1])


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(2, 25))
@settings(max_examples=80, deadline=None)
def test_the_store_is_bounded_and_the_oldest_answers_go_first(sizes: list[int], bound: int) -> None:
    store, kept = ResponseStore(bound), list[list[int]]()
    for number, size in enumerate(sizes):
        answer = [number] * size
        store.add(answer)
        kept.append(answer[-(bound - 1) :])
        while sum(len(one) + 1 for one in kept) > bound:
            kept.pop(0)
        assert store.ids_R.tolist() == [i for one in kept for i in (*one, BREAK)]
        assert store.num_bytes <= ID_BYTES * bound


def test_what_a_full_store_holds_in_memory_is_its_bound() -> None:
    import tracemalloc

    store, rng = ResponseStore(50_000), random.Random(0)
    tracemalloc.start()
    for _ in range(400):
        store.add(range(rng.randrange(1, 3_000)))  # half a million tokens and more
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store.ids_R) > 40_000
    assert size < ID_BYTES * 50_000 + 4_000


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=1, vocab=96)
    return found


def drafter_of(target: Target, **options: Any) -> SuffixDecoding:
    return SuffixDecoding(SuffixDecodingOptions(**options), target.spec)


def opened(drafter: SuffixDecoding, slots: int = 2) -> SuffixDecodingState:
    return drafter.open(Space(slots, 64, 32, torch.device("cpu"), torch.float32))


def remember(state: SuffixDecodingState, tenant: str | None, *answers: list[int]) -> None:
    for answer in answers:
        state.belong(0, tenant)
        state.start(0, [90], {})
        state.finish(0, answer)
        state.end(0)


def drafted(
    state: SuffixDecodingState, tenant: str | None, text: list[int], nodes: int = 16
) -> dict[tuple[int, ...], float]:
    """Paths and their chances."""
    state.belong(1, tenant)
    state.start(1, text, {})
    trie = state.draft_row(1, text, Budget(nodes, 16))
    return {path_of(trie, node): trie.estimates[node] for node in range(len(trie))}


def test_answers_branch_by_their_counts_and_a_match_bounds_the_draft(target: Target) -> None:
    state = opened(drafter_of(target))
    remember(state, "anna", *[[1, 2, 3, 4, 5]] * 3, [1, 2, 3, 6, 7])
    assert drafted(state, "anna", [50, 1, 2, 3]) == {(4,): 0.75, (4, 5): 0.75, (6,): 0.25}
    assert drafted(state, "anna", [50, 3]) == {(4,): 0.75}  # factor 1: one token matches
    chain = opened(drafter_of(target, tree=False, factor=2.0))
    remember(chain, "anna", *[[1, 2, 3, 4, 5]] * 3, [1, 2, 3, 6, 7])
    assert drafted(chain, "anna", [50, 1, 2, 3]) == {(4,): 0.75, (4, 5): 0.75}


def test_the_better_source_wins_and_equals_go_to_the_row_itself(target: Target) -> None:
    state = opened(drafter_of(target))
    remember(state, "anna", [1, 2, 8, 9, 10])
    assert drafted(state, "anna", [1, 2, 3, 4, 1, 2]) == {(3,): 1.0, (3, 4): 1.0}
    remember(state, "anna", [7, 1, 2, 8, 9, 10])
    longer = drafted(state, "anna", [1, 2, 3, 4, 7, 1, 2])
    assert longer == {(8,): 1.0, (8, 9): 1.0, (8, 9, 10): 1.0}


def test_nothing_is_shared_between_tenants_and_only_so_many_are_kept(target: Target) -> None:
    state = opened(drafter_of(target, tenants=2))
    remember(state, "anna", [1, 2, 3, 4])
    remember(state, None, [1, 2, 3, 4])
    assert drafted(state, "bert", [1, 2]) == {}
    assert drafted(state, None, [1, 2]) == {}
    assert drafted(state, "anna", [1, 2]) == {(3,): 1.0, (3, 4): 1.0}
    remember(state, "bert", [1, 2, 5, 6])
    assert drafted(state, "bert", [1, 2]) == {(5,): 1.0, (5, 6): 1.0}
    remember(state, "carl", [7])
    assert drafted(state, "anna", [1, 2]) == {}  # the least recent of three


def run(engine: Engine, *requests: Request) -> list[Completion]:
    return engine.run(requests)


def test_an_engine_drafts_from_finished_answers_of_the_same_tenant(target: Target) -> None:
    """The text never changes; the number of rounds says who drafts from what. A team hands on who
    is served."""
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    anna = Request((3, 1, 4, 1, 5), sampling, tenant="anna")
    bert, unnamed = (Request(anna.tokens, sampling, tenant=name) for name in ("bert", None))
    plain = run(Engine(target, num_slots=3), anna)[0]
    drafters = drafter_of(target), Team.of([drafter_of(target)])
    for drafter in drafters:
        engine = Engine(target, drafter, Direct(length=16, nodes=16), num_slots=3)
        engine.open(64)
        engine.submit(0, Request(anna.tokens, sampling, tenant="anna"))
        for _ in range(3):
            engine.step()
        assert engine.cancel(0)
        cold = run(engine, anna, bert, unnamed)  # side by side: none has finished
        warm = run(engine, anna, unnamed)
        other = run(engine, Request(anna.tokens, sampling, tenant="carl"))
        assert {row.tokens for row in (*cold, *warm, *other)} == {plain.tokens}
        rounds = {row.stats.rounds for row in (*cold, warm[1], *other)}
        assert len(rounds) == 1  # a cancelled row left nothing, nor did other tenants
        assert warm[0].stats.rounds < min(rounds) // 2


def test_settings_that_draft_nothing_are_refused() -> None:
    for options in (
        {"max_tokens": 1},
        {"tenants": 0},
        {"factor": 0.0},
        {"min_prob": 0.0},
        {"factor": math.inf},
    ):
        with pytest.raises(RecipeError):
            SuffixDecodingOptions(**options)
    assert served_anew(SuffixDecodingOptions(), {"max_tokens": 99}).max_tokens == 99
    with pytest.raises(RecipeError, match="max_match of a drafter has another type"):
        served_anew(SuffixDecodingOptions(), {"max_match": True})
