"""Staged speculation: the draft model's own drafts, for fewer of its forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.lm.staged import INNER, Staged, StagedOptions, StagedState
from specctl.drafters.retrieval.best_ngrams import BestNgrams
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import Ran, decode


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


@pytest.fixture(scope="module")
def small(target: Target) -> SmallLm:
    torch.manual_seed(5)
    return SmallLm(SmallLmOptions(), target.spec)


def staged(small: SmallLm, **options: Any) -> Staged:
    drafter = Staged(StagedOptions(**options), small.spec)
    drafter.load_tensors(small.tensors())
    return drafter


def state_of(ran: Ran) -> StagedState:
    state = ran.state
    assert isinstance(state, StagedState)
    return state


def same_drafts(one: Ran, other: Ran) -> bool:
    rounds = zip(one.outcomes, other.outcomes, strict=True)
    return all(torch.equal(a.tree.token_BN, b.tree.token_BN) for a, b in rounds)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafts_are_those_of_the_draft_model_alone_for_fewer_forwards(
    target: Target, small: SmallLm, inner: str, temperature: float
) -> None:
    how = {"policy": "chain", "length": 6, "temperature": temperature}
    alone = decode(target, small, **how)
    found = decode(target, staged(small, inner=inner), **how)
    assert found.answers == alone.answers
    assert same_drafts(found, alone)
    state = state_of(found)
    assert state.num_asked == sum(outcome.tree.num_nodes for outcome in alone.outcomes)
    most = 0.6 if (inner, temperature) == ("ngram", 0.0) else 0.99
    assert state.num_forwards < most * state.num_asked


def test_distributions_handed_to_verification_are_the_draft_models_own(
    target: Target, small: SmallLm
) -> None:
    how = {"policy": "chain", "length": 4, "temperature": 1.0, "tokens": 16}
    alone, found = decode(target, small, **how), decode(target, staged(small), **how)
    distributions = [
        (a.tree.q, b.tree.q)
        for a, b in zip(alone.outcomes, found.outcomes, strict=True)
        if a.tree.num_nodes
    ]
    assert len(distributions) > 10
    for mine, theirs in distributions:
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.prob_BTK, theirs.prob_BTK, rtol=1e-4, atol=1e-6)


def test_more_guesses_save_more_forwards(target: Target, small: SmallLm) -> None:
    forwards = [
        state_of(
            decode(target, staged(small, inner_length=n), policy="chain", length=6)
        ).num_forwards
        for n in (1, 2, 5)
    ]
    assert forwards[0] > forwards[1] > forwards[2]


@pytest.mark.parametrize(
    ("policy", "inner"),
    [(policy, "ngram") for policy in ("dynamic-tree", "static-tree", "rsd")]
    + [("dynamic-tree", "prompt-lookup")],
)
def test_trees_are_grown_from_the_same_logits_for_fewer_forwards(
    target: Target, small: SmallLm, policy: str, inner: str
) -> None:
    """Two rows of unequal length; drawn trees, too."""
    prompts = [(3, 1, 4, 1, 5), (20, 2, 20)]
    how = {"policy": policy, "length": 4, "tokens": 24, "slots": 2}
    how |= (
        {"temperature": 1.0}
        if policy == "rsd"
        else {"nodes": 6} | ({"beam": 2} if policy == "dynamic-tree" else {})
    )
    alone = decode(target, small, prompts, **how)
    found = decode(target, staged(small, inner=inner, inner_length=6), prompts, **how)
    assert found.answers == alone.answers
    assert same_drafts(found, alone)
    assert state_of(found).num_forwards <= state_of(found).num_asked


def test_a_second_stage_that_knows_the_draft_model_leaves_it_few_trees_to_read(
    target: Target, small: SmallLm
) -> None:
    """The same request again: what is asked for was guessed, all but the root and its children."""
    how = {"policy": "dynamic-tree", "length": 4, "nodes": 6, "beam": 2, "tokens": 24}
    drafter = staged(small, inner_length=40, order=3, scope="process")
    first, second = (state_of(decode(target, drafter, [(3, 1, 4, 1, 5)], **how)) for _ in range(2))
    assert second.num_asked == first.num_asked
    assert second.num_forwards < first.num_forwards
    assert second.num_forwards < 0.6 * second.num_asked


def batch_of(texts: list[list[int]], progress: float) -> TrainBatch:
    ids_BS = torch.tensor(texts)
    at_S = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    return TrainBatch(ids_BS, torch.ones_like(ids_BS).bool(), ids_BS * 0, at_S, progress=progress)


def test_the_second_stage_is_learned_before_it_serves(target: Target, small: SmallLm) -> None:
    """From the draft model's own best tokens, late in training, and kept with its weights: the
    first rounds of a request are drafted for, already."""
    text = torch.randint(24, (8, 40), generator=torch.Generator().manual_seed(3)).tolist()
    drafter = staged(small, loss="ce")
    drafter.loss(batch_of(text, progress=0.5))
    assert drafter.ngrams is not None
    assert drafter.ngrams.best(text[0][:5]) is None
    drafter.loss(batch_of(text, progress=1.0))
    said = drafter.lm.dense(
        torch.tensor(text[-1:]),
        torch.arange(40)[None],
        drafter.lm.document_masks(torch.zeros(1, 40)),
    ).logits_BTV
    assert said is not None
    assert drafter.ngrams.best(text[-1]) == int(said[0, -1].argmax())
    kept = staged(small)
    kept.load_tensors(drafter.tensors())
    empty, first = (
        state_of(decode(target, one, policy="chain", length=6, tokens=8)).num_forwards
        for one in (staged(small), kept)
    )
    assert first < empty


def test_n_grams_do_not_cross_documents() -> None:
    table = BestNgrams(2, 1024)
    ids, best = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]])
    table.learn(ids, torch.tensor([[0, 0, 1, 1]]), best)
    assert [table.best(text) for text in ([1], [9, 1], [1, 2], [3, 4], [2, 3])] == [5, 5, 6, 8, 7]
    assert table.best([2, 9]) is None
    assert int((table.tokens[1] >= 0).sum()) == 2


def test_rows_of_a_batch_are_guessed_for_one_by_one(target: Target, small: SmallLm) -> None:
    prompts = [(3, 1, 4, 1, 5), (20, 2, 20), (7,)]
    how = {"policy": "chain", "length": 5, "tokens": 16}
    alone = decode(target, small, prompts, slots=3, **how)
    found = decode(target, staged(small), prompts, slots=3, **how)
    assert found.answers == alone.answers
    assert same_drafts(found, alone)
    assert state_of(found).num_forwards < state_of(found).num_asked


@pytest.mark.parametrize(
    "fields", [{"inner": "medusa"}, {"inner_length": 0}, {"order": 0}, {"table": 1000}]
)
def test_a_second_stage_that_drafts_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        StagedOptions(**fields)
