"""Superposed decoding: several drafts a forward, and the n-grams that tell them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.lm.superposed import Superposed, SuperposedOptions, SuperposedState
from specctl.models.hf.hf_lm import HfLM
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import Ran, decode

PROMPTS = [(3, 1, 4, 1, 5), (20, 2, 20, 2), (7, 8, 9)]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


@pytest.fixture(scope="module")
def small(target: Target, train_a_little: Any) -> SmallLm:
    torch.manual_seed(5)
    drafter = SmallLm(SmallLmOptions(), target.spec)
    train_a_little(target, drafter, 60)
    return drafter


def superposed(small: SmallLm, **options: Any) -> Superposed:
    drafter = Superposed(SuperposedOptions(**options), small.spec)
    drafter.load_tensors(small.tensors())
    return drafter


def ran(target: Target, drafter: SmallLm, **how: Any) -> Ran:
    return decode(target, drafter, PROMPTS, tokens=40, **{"length": 4, "nodes": 12, **how})


def opened(small: SmallLm, text: list[int], **options: Any) -> SuperposedState:
    state = superposed(small, **options).open(Space(1, 64, 16, torch.device("cpu"), torch.float32))
    state.start(0, text, {})
    return state


def test_a_tree_of_drafts_costs_the_forwards_of_a_chain(target: Target, small: SmallLm) -> None:
    found = ran(target, superposed(small))
    assert found.answers == ran(target, small, policy="chain", nodes=None).answers
    full = [outcome for outcome in found.outcomes if outcome.tree.depth == 4]
    assert all(outcome.tree.num_nodes == 12 for outcome in full)
    state = found.state
    assert isinstance(state, SuperposedState)
    assert state.num_forwards == sum(outcome.tree.depth for outcome in found.outcomes)


def test_several_drafts_are_accepted_further_than_one(target: Target, small: SmallLm) -> None:
    chain = ran(target, small, policy="chain", nodes=None)
    assert ran(target, superposed(small)).tau > chain.tau + 0.1


def test_without_ngrams_the_drafts_get_each_others_tokens(target: Target, small: SmallLm) -> None:
    filtered, mixed = ran(target, superposed(small)), ran(target, superposed(small, alpha=0.0))
    assert filtered.answers == mixed.answers
    assert filtered.tau > mixed.tau + 0.1


def test_one_draft_is_the_draft_models_greedy_chain(
    target: Target, small: SmallLm, round_view: Any
) -> None:
    text = [3, 1, 4, 1, 5]
    tree = opened(small, text, paths=1, alpha=0.0).propose(round_view({0: text}), Budget(4, 4))
    assert tree.is_chain
    for drafted in tree.token_BN[0].tolist():
        ids_1S = torch.tensor([text])
        masks = small.lm.document_masks(torch.zeros_like(ids_1S))
        with torch.no_grad():
            out = small.lm.dense(ids_1S, torch.arange(len(text))[None], masks)
        assert out.logits_BTV is not None
        assert drafted == int(out.logits_BTV[0, -1].argmax())
        text = [*text, drafted]


def test_the_first_step_is_the_top_of_the_draft_models_distribution(
    target: Target, small: SmallLm, round_view: Any
) -> None:
    text = [3, 1, 4, 1, 5]
    state = opened(small, text)
    logits_1K = state.root(round_view({0: text}))
    tree = opened(small, text).propose(round_view({0: text}), Budget(9, 3))
    assert tree.token_BN[0, :3].tolist() == logits_1K[0].topk(3).indices.tolist()
    assert tree.parent_BN[0, :3].tolist() == [-1, -1, -1]


def test_an_ngram_decides_which_draft_a_token_belongs_to(small: SmallLm, round_view: Any) -> None:
    state = opened(small, [5], candidates=24)
    firsts = state.root(round_view({0: [5]}))[0].topk(3).indices.tolist()
    known = {(first, 23 - first) for first in firsts}
    for first, second in known:
        state.stores.at(0).add((first,), (second,))
    tree = state.propose(round_view({0: [5]}), Budget(6, 2))
    tokens, parents = tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()
    assert {(tokens[parents[n]], tokens[n]) for n in range(3, 6)} == known


def test_mixtures_leave_nothing_behind(target: Target, small: SmallLm) -> None:
    alone = ran(target, superposed(small))
    together = ran(target, superposed(small), slots=3)
    assert together.answers == alone.answers
    assert [c.stats.rounds for c in together.completions] == [
        c.stats.rounds for c in alone.completions
    ]


def test_a_model_that_reads_no_embeddings_is_refused(make_model: Any, target: Target) -> None:
    drafter = Superposed(SuperposedOptions(), target.spec, None, HfLM(make_model("phi", vocab=24)))
    with pytest.raises(IncompatibleError, match="mixture"):
        drafter.open(Space(1, 64, 16, torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("fields", [{"paths": 0}, {"alpha": 1.5}, {"weights": ()}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="out of range"):
        SuperposedOptions(**fields)
