"""Lookahead: what the window computes, what enters the pool, what either is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.windows.lookahead import Lookahead, LookaheadOptions, LookaheadState, Window
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import PROMPTS, Ran, decode


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def make_state(target: Target, nodes: int = 56, **options: Any) -> LookaheadState:
    drafter = Lookahead(LookaheadOptions(**options), target.spec)
    return drafter.open(Space(2, 64, nodes, torch.device("cpu"), torch.float32))


def ran(target: Target, nodes: int = 56, length: int = 4, **options: Any) -> Ran:
    drafter = Lookahead(LookaheadOptions(**options), target.spec)
    return decode(target, drafter, tokens=48, nodes=nodes, length=length)


def test_tokens_come_faster_than_rounds_and_are_the_targets_own(target: Target) -> None:
    found = ran(target)
    assert found.answers == decode(target, None, tokens=48).answers
    assert found.tau > 1.6


def test_the_window_finds_ngrams_that_the_text_does_not_hold(target: Target) -> None:
    whole = ran(target).tau
    assert whole > ran(target, window=0).tau + 0.1
    assert ran(target, from_text=False).tau > 1.4


def test_a_pool_of_one_ngram_per_token_finds_less(target: Target) -> None:
    assert ran(target).tau > ran(target, guesses=1).tau + 0.1


def test_every_probe_is_read_behind_its_own_diagonal(target: Target) -> None:
    """What the target says after probe (r, i) equals a plain forward over the text, row 0 up to
    column i, and column i down to row r."""
    for outcome in ran(target, nodes=24, ngram=5).outcomes[3:9]:
        tree, rows, W = outcome.tree, 4, 3
        assert tree.num_probes == rows * W - 1
        assert outcome.topk_BTC is not None
        text = list(outcome.view.tokens[0][: int(outcome.view.kept_len_B[0]) + 1])
        window = [text[-1], *tree.token_BN[0, -tree.num_probes :].tolist()]
        said = outcome.topk_BTC[0, -tree.num_probes :, 0].tolist()
        for r, i in ((0, 1), (0, 2), (1, 0), (2, 1), (3, 2)):
            path = window[1 : i + 1] + [window[row * W + i] for row in range(1, r + 1)]
            assert said[r * W + i - 1] == next_token(target, [*text, *path])


def next_token(target: Target, text: list[int]) -> int:
    ids_1S = torch.tensor([text])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.no_grad():
        out = target.lm.dense(ids_1S, torch.arange(len(text))[None], masks)
    assert out.logits_BTV is not None
    return int(out.logits_BTV[0, -1].argmax())


def test_columns_become_ngrams_once_the_filling_is_gone() -> None:
    window = Window([[10, 11], [20, 21], [30, 31]])
    assert window.step([40, 41]) == []
    assert window.step([50, 51]) == []
    assert window.step([60, 61]) == [(30, 40, 50, 60), (31, 41, 51, 61)]
    assert window.rows == [[40, 41], [50, 51], [60, 61]]


def test_a_window_of_one_column_and_bigrams_is_a_memory_of_what_was_said(target: Target) -> None:
    found = ran(target, ngram=2, window=1, from_text=False, guesses=1)
    state = found.state
    assert isinstance(state, LookaheadState)
    assert all(outcome.tree.num_probes == 0 for outcome in found.outcomes)
    seen: dict[int, int] = {}
    for outcome in found.outcomes[: found.completions[0].stats.rounds]:
        root = int(outcome.view.root_B[0])
        drafted = outcome.tree.token_BN[0].tolist()
        assert drafted == ([seen[root]] if root in seen and drafted else [])
        if outcome.finished[0]:  # nothing may be drafted, and nobody is told more
            assert not drafted
            break
        assert outcome.topk_BTC is not None
        seen[root] = int(outcome.topk_BTC[0, 0, 0])


def test_guesses_with_equal_beginnings_are_one_path(target: Target, round_view: Any) -> None:
    state = make_state(target, window=0, ngram=4)
    state.start(0, [1, 2, 3, 4, 1, 2, 3, 5, 1], {})
    tree = state.propose(round_view({0: [1, 2, 3, 4, 1, 2, 3, 5, 1]}), Budget(16, 3))
    assert tree.token_BN[0].tolist() == [2, 3, 5, 4]
    assert tree.parent_BN[0].tolist() == [-1, 0, 1, 1]


def test_the_pool_keeps_the_newest_and_no_more_than_asked(target: Target, round_view: Any) -> None:
    state = make_state(target, window=0, ngram=2, guesses=2)
    text = [1, 5, 1, 6, 1, 5, 1, 7, 1]
    state.start(0, text, {})
    assert state.propose(round_view({0: text}), Budget(16, 1)).token_BN[0].tolist() == [7, 5]


def test_no_row_drafts_from_the_pool_of_another(target: Target, round_view: Any) -> None:
    state = make_state(target, window=0, ngram=2)
    state.start(0, [1, 5, 1], {})
    state.start(1, [1], {})
    tree = state.propose(round_view({0: [1, 5, 1], 1: [1]}), Budget(16, 1))
    assert tree.valid_BN.tolist() == [[True], [False]]


@pytest.mark.parametrize("slots", [2, 3])
def test_a_batch_changes_nothing(target: Target, slots: int) -> None:
    drafter = Lookahead(LookaheadOptions(), target.spec)
    prompts = [*PROMPTS, (7, 8, 9)]
    alone = decode(target, drafter, prompts, tokens=20, nodes=24)
    together = decode(target, drafter, prompts, tokens=20, nodes=24, slots=slots)
    assert together.answers == alone.answers
    for one, other in zip(together.completions, alone.completions, strict=True):
        assert one.stats.rounds == other.stats.rounds
        assert one.stats.drafted == other.stats.drafted


def test_a_window_that_does_not_fit_is_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match="place for a guess"):
        make_state(target, nodes=24, window=9)
    assert make_state(target, nodes=24).num_columns == 4
    assert make_state(target, nodes=1).num_columns == 0


@pytest.mark.parametrize("fields", [{"ngram": 1}, {"guesses": 0}, {"window": -1}])
def test_impossible_sizes_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match="out of range"):
        LookaheadOptions(**fields)
