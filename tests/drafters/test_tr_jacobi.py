"""TR-Jacobi: the main chain is Jacobi's, side branches and copies come on top, noise fills up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import RecipeError
from specctl.drafters.windows.tr_jacobi import TrJacobi, TrJacobiOptions, TrJacobiState
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import counting_target, decode


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def make(target: Target, **options: Any) -> TrJacobi:
    return TrJacobi(TrJacobiOptions(**options), target.spec)


def test_the_main_chain_is_what_the_target_said_behind_the_last_one(target: Target) -> None:
    """Greedy, with no side branches and no copies, round n + 1 feeds the argmax behind the guesses
    of round n that were not accepted, and random tokens of the text behind those."""
    found = decode(target, make(target, depth=4, chances=(1.0,), ngram=0), length=4, nodes=4)
    assert len(found.outcomes) > 8
    for before, after in zip(found.outcomes, found.outcomes[1:], strict=False):
        if before.finished[0] is not None:
            continue
        assert before.topk_BTC is not None
        said = before.topk_BTC[0, before.num_accepted[0] + 1 :, 0].tolist()
        fed = after.tree.token_BN[0].tolist()
        assert fed[: len(said)] == said[: len(fed)]
        assert set(fed[len(said) :]) <= set(after.view.tokens[0])


def test_side_branches_are_the_next_best_tokens_of_their_places(target: Target) -> None:
    space = Space(1, 64, 16, torch.device("cpu"), torch.float32)
    state = TrJacobiState(TrJacobiOptions(depth=2, chances=(0.5, 0.2), ngram=0), space)
    state.start(0, [1, 2, 3], {})
    state.rows[0].places = [[7, 8], [9, 10]]
    trie = state.draft_row(0, [1, 2, 3], Budget(6, 2))
    assert list(zip(trie.tokens, trie.parents, strict=True))[:2] == [(7, -1), (9, 0)]
    paths = {(trie.tokens[trie.parents[n]] if p >= 0 else None, trie.tokens[n])
             for n, p in enumerate(trie.parents)}  # fmt: skip
    assert paths == {(None, 7), (None, 8), (7, 9), (7, 10), (8, 9), (8, 10)}


def test_the_copied_branch_follows_the_newest_ngram() -> None:
    space = Space(1, 64, 16, torch.device("cpu"), torch.float32)
    state = TrJacobiState(TrJacobiOptions(depth=3, ngram=2), space)
    text = [1, 2, 3, 4, 1, 2]
    state.start(0, text, {})
    state.rows[0].places = [[9], [9], [9]]
    trie = state.draft_row(0, text, Budget(16, 3))
    assert trie.tokens[:6] == [9, 9, 9, 3, 4, 1]
    assert trie.parents[:6] == [-1, 0, 1, -1, 3, 4]
    state.end(0)
    assert state.rows[0].places == []


def test_a_text_that_counts_is_accepted_whole(make_model: Any) -> None:
    """The next token depends on the last alone: a right guess makes the next ones right,
    and copying wins more where the text comes round."""
    target = counting_target(make_model, 8)
    prompts = [[0, 1, 2]]
    alone = decode(target, make(target, ngram=0), prompts=prompts, tokens=40, nodes=16)
    copying = decode(target, make(target), prompts=prompts, tokens=40, nodes=16)
    assert alone.answers == copying.answers == [tuple((3 + i) % 8 for i in range(40))]
    assert copying.tau > 3 > alone.tau > 1.0


@pytest.mark.parametrize("chances", [(), (0.9, 0.2), (0.0,)])
def test_chances_that_are_none_are_refused(chances: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match="probabilities"):
        TrJacobiOptions(chances=chances)
