"""The suffix automaton against brute force, and what is drafted from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.drafters.training_free.suffix_automaton import (
    Match,
    SuffixAutomaton,
    SuffixAutomatonDrafter,
    SuffixAutomatonOptions,
)
from specctl.runtime.target.target import Target
from specctl_testing.drafters.following import check_rows_are_private, follow

tokens_lists = st.lists(st.integers(0, 2), max_size=40)


def contains(text: Sequence[int], part: Sequence[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


@given(tokens_lists)
@settings(max_examples=120, deadline=None)
def test_the_longest_repeat_is_the_one_a_scan_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, 1):
        automaton.extend([token])
        match = automaton.repeat()
        wanted = max(n for n in range(size) if contains(text[: size - 1], text[size - n : size]))
        assert match.length == wanted
        if wanted:
            end = automaton.end[match.state]
            assert end < size - 1
            assert text[end + 1 - wanted : end + 1] == text[size - wanted : size]


@given(tokens_lists, tokens_lists)
@settings(max_examples=120, deadline=None)
def test_a_second_text_is_kept_up_with(corpus: list[int], text: list[int]) -> None:
    automaton, match = SuffixAutomaton(), Match()
    automaton.extend(corpus)
    for size, token in enumerate(text, 1):
        automaton.advance(match, token)
        wanted = max(n for n in range(size + 1) if contains(corpus, text[size - n : size]))
        assert match.length == wanted
        if wanted:
            end = automaton.end[match.state]
            assert corpus[end + 1 - wanted : end + 1] == text[size - wanted : size]


def test_it_has_at_most_two_states_and_three_edges_per_token() -> None:
    rng = random.Random(0)
    for text in ([rng.randrange(4) for _ in range(2000)], [0] * 2000, [0, 1] * 1000):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert len(automaton.length) < 2 * len(text)
        assert sum(map(len, automaton.following)) < 3 * len(text)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=96)
    return found


def drafter_of(target: Target, **options: Any) -> SuffixAutomatonDrafter:
    return SuffixAutomatonDrafter(SuffixAutomatonOptions(**options), target.spec)


def draft(drafter: SuffixAutomatonDrafter, round_view: Any, text: list[int], depth: int) -> Any:
    state = drafter.open(Space(1, 64, 16, torch.device("cpu"), torch.float32))
    state.start(0, text, {})
    return state.propose(round_view({0: text}), Budget(16, depth)).token_BN[0].tolist()


def test_a_longer_match_is_copied_further(target: Target, round_view: Any) -> None:
    text = list(range(20))
    drafter = drafter_of(target, factor=1.0, offset=1)
    assert draft(drafter, round_view, [*text, 90, 3], 16) == [4, 5]
    assert draft(drafter, round_view, [*text, 90, 3, 4, 5], 16) == [6, 7, 8, 9]
    assert draft(drafter, round_view, [*text, 90, 3, 4, 5], 2) == [6, 7]
    assert draft(drafter_of(target, min_match=2), round_view, [*text, 90, 3], 16) == []


def test_given_texts_win_with_a_clearly_longer_match(target: Target, round_view: Any) -> None:
    drafter = drafter_of(target, bias=2)
    drafter.learn([[1, 2, 3, 4, 50, 51], [52]])
    assert draft(drafter, round_view, [2, 3, 60, 2, 3], 2) == [60, 2]
    assert draft(drafter, round_view, [4, 60, 1, 2, 3, 4], 4) == [50, 51], (
        "it ran over a text's end"
    )


def repeating(seed: int, num_ids: int, piece: int, times: int) -> list[int]:
    """Pieces over few ids, so that short n-grams are ambiguous, each written several times."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(num_ids) for _ in range(piece)] for _ in range(4)]
    return [token for _ in range(times) for token in pieces[rng.randrange(4)]]


def test_where_short_ngrams_are_ambiguous_it_beats_prompt_lookup(
    target: Target, round_view: Any
) -> None:
    text, budget = repeating(1, 2, 40, 12), Budget(8, 8)
    ours = follow(drafter_of(target), round_view, text, 200, budget)
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    theirs = follow(lookup, round_view, text, 200, budget)
    assert ours.tau > 1.5 * theirs.tau


def test_on_fresh_text_it_drafts_little_and_on_copied_text_much(
    target: Target, round_view: Any
) -> None:
    rng = random.Random(2)
    fresh = [rng.randrange(96) for _ in range(300)]
    budget = Budget(8, 8)
    on_fresh = follow(drafter_of(target), round_view, fresh, 100, budget)
    on_copy = follow(drafter_of(target), round_view, fresh[:150] * 2, 152, budget)
    assert on_copy.tau > 6
    assert on_fresh.tau < 1.1
    assert on_fresh.nodes < 3.5


def test_rows_are_private(target: Target, round_view: Any) -> None:
    check_rows_are_private(drafter_of(target), round_view)


def test_options_that_never_draft_are_refused() -> None:
    with pytest.raises(RecipeError, match="out of range"):
        SuffixAutomatonOptions(factor=0.0, offset=0)


def test_a_corpus_of_other_ids_is_refused(target: Target) -> None:
    for tensor in (torch.tensor([1, 96, -1]).int(), torch.tensor([1, -1]), torch.zeros(2, 2).int()):
        with pytest.raises(Exception, match="no corpus"):
            drafter_of(target).load_tensors({"corpus": tensor})
