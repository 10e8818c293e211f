"""Prompt lookup: which occurrence is copied, and what the index costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.training_free.prompt_lookup import (
    NgramIndex,
    PromptLookup,
    PromptLookupOptions,
)

LENGTHS = range(4, 0, -1)


def lookup(tokens: Sequence[int], length: int) -> list[int]:
    index = NgramIndex(LENGTHS)
    index.read(tokens)
    return index.continuation(tokens, length)


def naive(tokens: list[int], length: int) -> list[int]:
    """Scan backwards for the longest suffix."""
    for n in LENGTHS:
        for end in range(len(tokens) - 2, n - 2, -1):
            if n < len(tokens) and tokens[end + 1 - n : end + 1] == tokens[len(tokens) - n :]:
                period = len(tokens) - 1 - end
                return [tokens[end + 1 + i % period] for i in range(length)]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_index_finds_what_a_scan_finds(tokens: list[int], length: int) -> None:
    assert lookup(tokens, length) == naive(tokens, length)


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    assert lookup([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], 1) == [50]


def test_of_equal_suffixes_the_most_recent_wins() -> None:
    assert lookup([1, 2, 50, 1, 2, 60, 1, 2], 1) == [60]


def test_a_copy_that_reaches_the_end_goes_on_copying_itself() -> None:
    assert lookup([7, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_text_without_repetition_drafts_nothing() -> None:
    assert lookup([1, 2, 3, 4, 5], 4) == []
    assert lookup([1], 4) == []


def test_reading_more_text_costs_only_its_new_tokens() -> None:
    class Counting(list[int]):
        slices = 0

        def __getitem__(self, key: Any) -> Any:
            self.slices += isinstance(key, slice)
            return super().__getitem__(key)

    tokens = Counting(list(range(500)))
    index = NgramIndex(LENGTHS)
    index.read(tokens)
    tokens.slices = 0
    tokens.extend([3, 4])
    index.read(tokens)
    assert tokens.slices == 2 * len(LENGTHS)


def test_rows_draft_their_own_text_and_short_drafts_are_padded(
    make_target: Any, round_view: Any
) -> None:
    drafter = PromptLookup(PromptLookupOptions(), make_target().spec)
    state = drafter.open(Space(3, 64, 8, torch.device("cpu"), torch.float32))
    texts = {0: [5, 6, 7, 5, 6], 2: [1, 2, 3]}
    for slot, text in texts.items():
        state.start(slot, text, {})
    tree = state.propose(round_view(texts), Budget(4, 3))
    assert tree.token_BN[0].tolist() == [7, 5, 6]
    assert tree.valid_BN.tolist() == [[True] * 3, [False] * 3]
    assert tree.is_chain


def test_a_new_row_never_sees_the_text_of_the_old_one(make_target: Any, round_view: Any) -> None:
    drafter = PromptLookup(PromptLookupOptions(), make_target().spec)
    state = drafter.open(Space(1, 64, 8, torch.device("cpu"), torch.float32))
    state.start(0, [1, 2, 3, 1, 2], {})
    state.end(0)
    state.start(0, [9, 1, 2], {})
    assert state.propose(round_view({0: [9, 1, 2]}), Budget(4, 4)).num_nodes == 0


def test_an_empty_range_of_ngrams_is_refused() -> None:
    with pytest.raises(RecipeError, match="min_ngram"):
        PromptLookupOptions(max_ngram=2, min_ngram=3)
