"""REST: the suffix array against brute force, the count trie, the store in a package."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.core.drafter import Budget
from specctl.core.errors import IncompatibleError, IntegrityError, RecipeError
from specctl.drafters.retrieval.corpus import BREAK, joined
from specctl.drafters.retrieval.suffix_array import SuffixArray, suffix_order
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.drafters.training_free.rest import Rest, RestOptions
from specctl.export.package.folder import load_drafter, save_package
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare
from specctl.train.datastore import fill
from specctl_testing.drafters.following import check_rows_are_private, follow

texts_of = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@given(texts_of, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_suffixes_are_sorted_by_what_may_be_read_of_them(
    texts: list[list[int]], reach: int
) -> None:
    ids = joined(texts)
    order = suffix_order(ids, reach)
    assert sorted(order.tolist()) == list(range(len(ids)))
    read = [tuple(ids.view(np.uint32)[at : at + reach].tolist()) for at in order.tolist()]
    assert read == sorted(read)


@given(texts_of, st.lists(st.integers(0, 2), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_the_longest_match_and_its_counts_are_those_of_a_scan(
    texts: list[list[int]], tail: list[int]
) -> None:
    ids, span = joined(texts), 3
    array = SuffixArray(ids, 8)
    flat = ids.tolist()
    places = array.longest(tail, range(1, 6)) if len(ids) else None
    best: list[int] = []
    for n in range(1, min(5, len(tail)) + 1):
        found = [i for i in range(len(flat) - n + 1) if flat[i : i + n] == tail[-n:]]
        best = [i + n for i in found] or best
    if not best:
        assert places is None
        return
    assert places is not None
    assert places.last - places.first == len(best)
    wanted: Counter[tuple[int, ...]] = Counter()
    for at in best:
        follows = flat[at : at + span]
        follows = follows[: follows.index(BREAK)] if BREAK in follows else follows
        wanted.update(tuple(follows[: k + 1]) for k in range(len(follows)))
    trie = array.trie(places, span, 999, 999)
    path: dict[int, tuple[int, ...]] = {-1: ()}
    for node in range(len(trie)):
        path[node] = (*path[trie.parents[node]], trie.tokens[node])
    got = {path[n]: round(trie.estimates[n] * len(best)) for n in range(len(trie))}
    assert got == dict(wanted)


def test_only_the_most_frequent_prefixes_are_kept() -> None:
    array = SuffixArray(joined([[9, 1, 2], [9, 1, 3], [9, 1, 2], [9, 4]]), 8)
    places = array.find([9])
    trie = array.trie(places, 2, 2, 999)
    assert list(zip(trie.tokens, trie.estimates, strict=True)) == [(1, 0.75), (2, 0.5)]
    assert sum(array.trie(places, 2, 9, 2).estimates) > 0, "a sample of the places"


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=96)
    return found


def rest_of(target: Target, texts: list[list[int]], **options: Any) -> Rest:
    drafter = Rest(RestOptions(**options), target.spec)
    if texts:
        drafter.learn(texts)
    return drafter


def phrases(seed: int, count: int, length: int = 10) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for _ in range(count)]


def text_of(parts: list[list[int]], seed: int, times: int) -> list[int]:
    rng = random.Random(seed)
    return [token for _ in range(times) for token in parts[rng.randrange(len(parts))]]


def test_a_store_of_the_same_kind_beats_prompt_lookup_on_fresh_text_and_not_on_other_text(
    target: Target, round_view: Any
) -> None:
    parts, budget = phrases(1, 40), Budget(8, 8)
    store = [text_of(parts, seed, 20) for seed in range(10, 20)]
    text = text_of(parts, 2, 20)
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    plain = follow(lookup, round_view, text, 10, budget).tau
    drafter = rest_of(target, store)
    assert follow(drafter, round_view, text, 10, budget).tau > 1.3 * plain
    other = text_of(phrases(3, 40), 4, 20)
    unhelped = follow(rest_of(target, []), round_view, other, 10, budget).tau
    assert follow(drafter, round_view, other, 10, budget).tau == pytest.approx(unhelped, rel=0.05)


def test_a_tree_of_counts_beats_the_commonest_chain_at_the_same_depth(
    target: Target, round_view: Any
) -> None:
    parts = phrases(5, 4, 3)
    heads = [[7, 8, 9, *part] for part in parts]  # one opening, four ways to go on
    store = [text_of(heads, seed, 30) for seed in range(30, 36)]
    text = text_of(heads, 6, 30)
    drafter = rest_of(target, store, own=False, max_match=3)
    wide = follow(drafter, round_view, text, 20, Budget(24, 6)).tau
    assert wide > 1.1 * follow(drafter, round_view, text, 20, Budget(6, 6)).tau


def test_the_row_itself_is_searched_unless_told_otherwise(target: Target, round_view: Any) -> None:
    text = phrases(7, 1, 60)[0] * 2
    assert follow(rest_of(target, []), round_view, text, 63, Budget(8, 8)).tau > 6
    assert follow(rest_of(target, [], own=False), round_view, text, 63, Budget(8, 8)).tau == 1


def test_rows_are_private(target: Target, round_view: Any) -> None:
    check_rows_are_private(rest_of(target, []), round_view)


def save(drafter: Rest, target: Target, out: Path) -> None:
    save_package(
        drafter, target, out, serve={}, recipe_digest="", acceptance=None, command=["test"]
    )


def test_a_package_carries_the_store_and_belongs_to_its_target(
    target: Target, make_target: Any, tmp_path: Path, round_view: Any
) -> None:
    parts = phrases(8, 10)
    drafter = rest_of(target, parts, span=6)
    save(drafter, target, tmp_path / "store")
    again = load_drafter(tmp_path / "store", target)
    assert torch.equal(again.tensors()["corpus"], drafter.tensors()["corpus"])
    text = text_of(parts, 9, 6)
    ours = follow(drafter, round_view, text, 4, Budget(8, 8))
    assert follow(again, round_view, text, 4, Budget(8, 8)) == ours
    with pytest.raises(IncompatibleError, match="target"):
        load_drafter(tmp_path / "store", make_target(num_layers=2, vocab=96, seed=3))
    body = bytearray((tmp_path / "store" / "model.safetensors").read_bytes())
    body[-3] ^= 1
    (tmp_path / "store" / "model.safetensors").write_bytes(body)
    with pytest.raises(IntegrityError, match="changed"):
        load_drafter(tmp_path / "store", target)


def test_options_that_retrieve_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match="retrieved"):
        RestOptions(min_match=3, max_match=2)


def test_a_store_filled_by_the_datastore_code_serves_the_embedded_target(
    tiny_target: Target, tmp_path: Path, round_view: Any
) -> None:
    (tmp_path / "texts.txt").write_text("def main(path):\n    return path\n\n" * 40)
    recipe = load_recipe("rest", [f"data.source={tmp_path / 'texts.txt'}"])
    drafter = Rest(RestOptions(), tiny_target.spec)
    rows = partial(prepare, recipe, tiny_target, tmp_path / "out")
    num_tokens = fill(drafter, tiny_target, rows)
    held = drafter.tensors()["corpus"]
    assert int((held != BREAK).sum()) == num_tokens
    assert 200 < num_tokens < 2000
    text = held[:100].tolist()
    assert follow(drafter, round_view, text, 10, Budget(24, 8)).tau > 4
    plain = generate(tiny_target, ["def main("], sampling=Sampling(max_new_tokens=16))
    drafted = generate(
        tiny_target, ["def main("], drafter=drafter, sampling=Sampling(max_new_tokens=16)
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_family_without_texts_has_no_store_to_fill(target: Target, tmp_path: Path) -> None:
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    with pytest.raises(RecipeError, match="retrieves from no texts"):
        fill(lookup, target, partial(prepare, load_recipe("rest", []), target, tmp_path))
