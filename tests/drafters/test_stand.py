"""STAND: remembered distributions, what is drawn from them, and why drawing beats the best
token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.drafter import Space
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind, QRows, fitted
from specctl.drafters.training_free.stand import Stand, StandOptions, StandState
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

CPU = torch.device("cpu")
PROMPT = (3, 1, 4, 1, 5)


def make_state(target: Target, num_slots: int = 1, **options: Any) -> StandState:
    drafter = Stand(StandOptions(**options), target.spec)
    return drafter.open(Space(num_slots, 64, 32, CPU, torch.float32))


def distribution(logits_V: torch.Tensor) -> dict[int, float]:
    """The tokens that can be drafted, with their weights."""
    known = (logits_V > -torch.inf).nonzero().flatten().tolist()
    return {token: round(float(logits_V[token].exp()), 4) for token in known}


def test_a_node_has_the_summed_distribution_of_its_longest_known_context(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target())
    state.start(0, [9], {})
    store = state.stores.at(0)
    for key, token, chance in (
        ((5,), 1, 0.5),
        ((4, 5), 2, 0.75),
        ((4, 5), 2, 0.25),
        ((4, 5), 6, 0.25),
        ((2,), 7, 1.0),
    ):
        store.add(key, (token,), chance)
    assert distribution(state.root(round_view({0: [9, 4, 5]}))[0]) == {2: 1.0, 6: 0.25}
    logits_BMV = state.expand(torch.tensor([[2, 6, 5]]), torch.tensor([[-1, -1, -1]]))
    assert [distribution(row) for row in logits_BMV[0]] == [{7: 1.0}, {}, {1: 0.5}]
    deeper = state.expand(torch.tensor([[4]]), torch.tensor([[0]]))
    assert distribution(state.expand(torch.tensor([[5]]), torch.tensor([[3]]))[0, 0]) == {
        2: 1.0,
        6: 0.25,
    }
    assert distribution(deeper[0, 0]) == {}


def test_the_prompt_is_read_as_distributions_of_one_token(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target())
    state.start(0, [4, 5, 6, 4, 5, 7, 4, 5], {})
    assert distribution(state.root(round_view({0: [4, 5, 6, 4, 5, 7, 4, 5]}))[0]) == {
        6: 1.0,
        7: 1.0,
    }


def run(
    target: Target,
    drafter: Stand,
    samples: int,
    temperature: float,
    new: int,
    slots: int,
    **serve: Any,
) -> list[Completion]:
    """`samples` answers to one prompt, each with a seed of its own; `slots` of them at once."""
    engine = Engine(target, drafter, make_policy(serve), num_slots=slots)
    seeds = [
        Sampling(temperature, seed=i, max_new_tokens=new, ignore_eos=True) for i in range(samples)
    ]
    return engine.run([Request(PROMPT, one) for one in seeds])


def tau(done: list[Completion]) -> float:
    return sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done)


def test_what_was_never_seen_is_not_drafted_and_costs_no_node(make_target: Any) -> None:
    target = make_target(num_layers=2)
    drafter = Stand(StandOptions(), target.spec)
    for serve in ({"policy": "chain"}, {"policy": "static-tree"}, {"policy": "dynamic-tree"}):
        engine = Engine(target, drafter, make_policy(serve))
        engine.open(8)
        engine.submit(0, Request((7,), Sampling(0.9, max_new_tokens=3, ignore_eos=True)))
        engine.step()
        assert engine.rows[0].stats.drafted == 0
        assert engine.rows[0].stats.tested_at == []


@pytest.mark.proof
def test_drawn_drafts_are_accepted_more_often_than_the_best_token(make_target: Any) -> None:
    """The same memory, the same number of nodes: sum min(p, q) against p(best)."""
    target = make_target(num_layers=2, vocab=24)
    taus = [
        tau(run(target, Stand(StandOptions(scope="process"), target.spec), 24, 1.0, 40, 8, **serve))
        for serve in (
            {"policy": "chain", "length": 3},
            {"policy": "dynamic-tree", "length": 3, "nodes": 3, "beam": 1},
        )
    ]
    assert taus[0] > 1.05 * taus[1]


@pytest.mark.proof
def test_later_samples_of_a_prompt_profit_from_earlier_ones(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=96)
    serve = {"policy": "static-tree", "branch": (3, 2, 1)}
    shared, alone = (
        run(target, Stand(StandOptions(scope=scope), target.spec), 30, 0.7, 12, 1, **serve)
        for scope in ("process", "request")
    )
    assert tau(shared[10:]) > tau(shared[:5]) + 0.1
    assert tau(shared[10:]) > tau(alone[10:]) + 0.1


def test_a_store_that_can_hold_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="out of range"):
        StandOptions(max_context=0)


def test_columns_that_no_row_fills_are_left_out_with_their_distributions() -> None:
    distribution_BTK = torch.eye(5).expand(
        2, 5, 5
    )  # the distribution of fed index t is certain of token t
    tree = DraftTree(
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        torch.tensor([[-1, -1, 0, 2], [-1, -1, 0, 2]]),
        torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0]]),
        torch.tensor([[True, False, True, False], [True, False, False, False]]),
        NodeKind.WITHOUT_REPLACEMENT,
        3,
        q=QRows(distribution_BTK),
    )
    small = fitted(tree)
    assert small.token_BN.tolist() == [[1, 3], [5, 7]]
    assert small.parent_BN.tolist() == [[-1, 0], [-1, 0]]
    assert small.valid_BN.tolist() == [[True, True], [True, False]]
    assert small.depth == 2
    assert small.q is not None
    assert small.q.prob_BTK.argmax(-1).tolist() == [[0, 1, 3], [0, 1, 3]]
    assert small.expanded_BN is not None
    assert small.expanded_BN.tolist() == [[0, 2], [0, 2]]
    empty = fitted(replace(tree, valid_BN=torch.zeros(2, 4, dtype=torch.bool)))
    assert (empty.num_nodes, empty.depth) == (0, 0)
