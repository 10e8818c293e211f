"""Token Recycling: the matrix, the template tree, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.drafters.parts.base import Budget, Space
from specctl.drafters.parts.template import greedy_paths
from specctl.drafters.token_recycling import (
    TokenRecycling,
    TokenRecyclingOptions,
    TokenRecyclingState,
)
from specctl.recipes.errors import FileError, RecipeError
from specctl.runtime.engine import Engine
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request

CPU = torch.device("cpu")


def make_state(target: Any, num_slots: int = 1, **options: Any) -> TokenRecyclingState:
    drafter = TokenRecycling(TokenRecyclingOptions(**options), target.spec)
    return drafter.open(Space(num_slots, 64, 32, CPU, torch.float32))


def ranks(first: int) -> list[int]:
    return list(range(first, first + 8))


def test_a_cold_matrix_drafts_nothing(make_target: Any, round_view: Any) -> None:
    state = make_state(make_target())
    assert state.propose(round_view({0: [4, 5]}), Budget(16, 4)).num_nodes == 0


def test_children_are_the_targets_best_after_their_parent(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target())
    state.learn(torch.tensor([5, 40, 41]), torch.tensor([ranks(40), ranks(60), ranks(20)]))
    tree = state.propose(round_view({0: [4, 5]}), Budget(14, 3))
    fitting = [p for p in state.paths if len(p) <= 3][:14]
    paths = sorted(
        (p for p in fitting if len(p) == 1 or (len(p) == 2 and p[0] < 2)),
        key=lambda path: (len(path), path),
    )
    expected = [40 + p[0] if len(p) == 1 else (60, 20)[p[0]] + p[1] for p in paths]
    assert tree.token_BN[0].tolist() == expected
    assert bool(tree.valid_BN.all())
    parents = tree.parent_BN[0].tolist()
    assert all(
        parents[i] == -1 if len(p) == 1 else tree.token_BN[0, parents[i]] == 40 + p[0]
        for i, p in enumerate(paths)
    )


def test_unwritten_rows_have_no_children_and_rows_may_differ(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target(), num_slots=2)
    state.learn(torch.tensor([5]), torch.tensor([ranks(40)]))
    tree = state.propose(round_view({0: [4, 5], 1: [9]}), Budget(14, 3))
    assert tree.depth == 1
    assert bool(tree.valid_BN[0].all())
    assert not bool(tree.valid_BN[1].any())


def test_of_one_token_fed_twice_the_later_ranking_stays(make_target: Any) -> None:
    state = make_state(make_target())
    state.learn(torch.tensor([5, 7, 5]), torch.tensor([ranks(1), ranks(2), ranks(3)]))
    assert state.snapshot()[5].tolist() == ranks(3)
    assert state.snapshot()[7].tolist() == ranks(2)


def test_padding_teaches_nothing(make_target: Any) -> None:
    target = make_target()
    state = make_state(target)
    state.learn(torch.tensor([5, target.spec.vocab_size]), torch.tensor([ranks(1), ranks(2)]))
    written = (state.snapshot() < target.spec.vocab_size).any(-1)
    assert written.nonzero()[:, 0].tolist() == [5]
    assert bool((state.matrix_WR[-1] == target.spec.vocab_size).all())


def run(target: Any, drafter: TokenRecycling, requests: int) -> tuple[Engine, list[float]]:
    """One engine, the same prompt again and again; tau of each answer."""
    engine = Engine(target, drafter, make_policy({"policy": "direct"}), num_slots=1)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    done = engine.run([Request((3, 1, 4, 1, 5), sampling) for _ in range(requests)])
    return engine, [c.stats.tokens / c.stats.rounds for c in done]


def test_acceptance_rises_while_the_matrix_warms(make_target: Any) -> None:
    target = make_target()
    _, taus = run(target, TokenRecycling(TokenRecyclingOptions(), target.spec), 3)
    assert taus[1] > taus[0] + 0.1


def test_a_warm_frozen_matrix_starts_warm_and_never_changes(make_target: Any) -> None:
    target = make_target()
    first = TokenRecycling(TokenRecyclingOptions(), target.spec)
    engine, cold = run(target, first, 2)
    assert isinstance(engine._state, TokenRecyclingState)
    learned = engine._state.snapshot()
    warm = TokenRecycling(TokenRecyclingOptions(freeze=True), target.spec)
    warm.load_tensors({"matrix": learned})
    engine, taus = run(target, warm, 2)
    assert taus[0] > cold[0] + 0.1
    assert isinstance(engine._state, TokenRecyclingState)
    assert torch.equal(engine._state.snapshot(), learned)


def test_freezing_without_a_matrix_is_refused(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="warm matrix"):
        make_state(make_target(), freeze=True)


def test_a_matrix_of_another_vocabulary_is_refused(make_target: Any) -> None:
    drafter = TokenRecycling(TokenRecyclingOptions(), make_target().spec)
    with pytest.raises(FileError, match="matrix"):
        drafter.load_tensors({"matrix": torch.zeros(10, 8, dtype=torch.int32)})


def test_template_paths_are_best_first_with_parents_before_children() -> None:
    paths = greedy_paths([[0.5, 0.2], [0.5, 0.2], [0.5, 0.2]], 6)
    assert paths == ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0))
    many = greedy_paths([[0.5, 0.2, 0.1]] * 4, 40)
    for index, path in enumerate(many):
        assert len(path) == 1 or path[:-1] in many[:index]
