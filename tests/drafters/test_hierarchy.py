"""Hierarchy Drafting: which database is asked when, and why near memories come first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Space
from specctl.core.errors import FileError, RecipeError
from specctl.drafters.training_free.hierarchy import Hierarchy, HierarchyOptions, HierarchyState
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.states import opened_states

CPU = torch.device("cpu")


def make(target: Target, **options: Any) -> Hierarchy:
    return Hierarchy(HierarchyOptions(**options), target.spec)


def open_one(drafter: Hierarchy, tokens: list[int]) -> HierarchyState:
    state = drafter.open(Space(1, 64, 32, CPU, torch.float32))
    state.start(0, tokens, {})
    return state


def asked(state: HierarchyState, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """The guesses with the letters of their databases."""
    state._read(0, tokens)
    return [(state.options.order[source], span) for source, span in state.spans(0, tokens)]


TEXT = [5, 1, 2, 7, 8, 5, 3, 4, 9, 9, 5]


def test_databases_are_asked_in_order_until_enough_is_found(make_target: Any) -> None:
    drafter = make(make_target(), span=2, guesses=4)
    drafter.count_spans("S", [[5, 20, 21, 5, 20, 21, 5, 22, 23]])
    drafter.count_spans("L", [[5, 30, 31], [5, 1, 2], [5, 32, 33]])
    found = asked(open_one(drafter, TEXT), TEXT)
    assert found == [("W", (3, 4)), ("W", (1, 2)), ("S", (20, 21)), ("S", (22, 23))]
    drafter = make(make_target(), span=2, guesses=4, order="LW")
    drafter.count_spans("L", [[5, 30, 31], [5, 1, 2], [5, 32, 33]])
    letters = [level for level, _ in asked(open_one(drafter, TEXT), TEXT)]
    assert letters == ["L", "L", "L", "W"]


def test_a_span_that_has_only_begun_is_drafted_as_far_as_it_goes(make_target: Any) -> None:
    text = [7, 5, 1, 2, 7, 5]
    assert asked(open_one(make(make_target(), span=6), text), text) == [("W", (1, 2, 7, 5))]


def test_longer_keys_are_asked_before_shorter_ones(make_target: Any) -> None:
    text = [6, 5, 1, 2, 8, 5, 3, 4, 9, 6, 5]
    assert asked(open_one(make(make_target(), span=2), text), text)[0] == ("W", (1, 2))
    first = asked(open_one(make(make_target(), span=2, previous=1), text), text)[0]
    assert first == ("W", (3, 4))


def test_the_model_database_counts_answers_and_not_prompts(make_target: Any) -> None:
    drafter = make(make_target(), span=2, order="S", previous=1)
    state = open_one(drafter, TEXT)
    assert asked(state, TEXT) == []
    answered = [*TEXT, 6, 7, 5, 6, 7, 5]
    assert asked(state, answered) == [("S", (6, 7))]
    assert state.stores.at(0).get((5,))[0].weight == 2.0  # once each, however often it is read


def test_equal_beginnings_share_their_nodes(make_target: Any, round_view: Any) -> None:
    drafter = make(make_target(), span=3, order="L")
    drafter.count_spans("L", [[5, 30, 31, 32], [5, 30, 31, 33], [5, 40, 41, 42]])
    text = [9, 5]
    tree = open_one(drafter, text).propose(round_view({0: text}), Budget(24, 4))
    assert sorted(tree.token_BN[0].tolist()) == [30, 31, 32, 33, 40, 41, 42]
    assert tree.depth == 3


def test_databases_travel_with_the_drafter(make_target: Any) -> None:
    target = make_target()
    drafter = make(target, span=2)
    drafter.count_spans("S", [[5, 20, 21]])
    drafter.count_spans("L", [[5, 30, 31]])
    twin = make(target, span=2)
    twin.load_tensors(drafter.tensors())
    text = [9, 5]
    assert asked(open_one(twin, text), text) == [("S", (20, 21)), ("L", (30, 31))]
    with pytest.raises(FileError, match="database"):
        twin.load_tensors({"matrix": torch.zeros(2)})


@pytest.fixture(scope="module")
def world(make_target: Any) -> tuple[Target, list[Request], list[list[int]], list[list[int]]]:
    """A target, prompts, answers it gave to other prompts, and a corpus it did not write: its own
    text at a high temperature, where only its commonest habits are left."""
    target = make_target(num_layers=2, vocab=48)
    generator = torch.Generator().manual_seed(1)

    def prompts(count: int) -> list[tuple[int, ...]]:
        rows = torch.randint(0, 48, (count, 6), generator=generator).tolist()
        return [tuple(row) for row in rows]

    def texts(temperature: float) -> list[list[int]]:
        sampling = Sampling(temperature, max_new_tokens=48, ignore_eos=True, seed=3)
        done = Engine(target).run([Request(prompt, sampling) for prompt in prompts(8)])
        return [[*c.request.tokens, *c.tokens] for c in done]

    answers, corpus = texts(0.0), texts(1.5)
    greedy = Sampling(max_new_tokens=48, ignore_eos=True)
    return target, [Request(prompt, greedy) for prompt in prompts(6)], answers, corpus


def served(world: Any, order: str, guesses: int = 3) -> tuple[float, dict[str, int]]:
    """tau and the right guesses of each database."""
    target, requests, answers, corpus = world
    drafter = make(target, order=order, guesses=guesses)
    drafter.count_spans("S", answers)
    drafter.count_spans("L", corpus)
    states = opened_states(drafter)
    engine = Engine(target, drafter, make_policy({"policy": "direct", "length": 4, "nodes": 12}))
    done = engine.run(requests)
    [state] = states
    assert isinstance(state, HierarchyState)
    tau = sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done)
    return tau, state.right


def test_near_memories_first_beats_the_reversed_order(world: Any) -> None:
    assert served(world, "WSL")[0] > served(world, "LSW")[0] + 0.1


def test_every_database_contributes(world: Any) -> None:
    tau, right = served(world, "WSL", guesses=7)
    assert min(right.values()) > 0
    assert tau > served(world, "SL", guesses=7)[0] + 0.1
    assert tau > served(world, "W", guesses=7)[0]


def test_a_datastore_is_the_database_that_the_options_name(make_target: Any) -> None:
    text = [9, 5]
    for level in ("S", "L"):
        drafter = make(make_target(), span=2, learns=level)
        drafter.learn([[5, 20, 21]])
        drafter.learn([[5, 30, 31]])
        assert asked(open_one(drafter, text), text) == [(level, (30, 31))]


def test_an_order_of_unknown_databases_is_refused() -> None:
    for order in ("", "WX", "WW"):
        with pytest.raises(RecipeError, match="order of databases"):
            HierarchyOptions(order=order)
