"""Goose: where spine and branches stand, how chances are learned, and what the shape brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, Outcome, Space
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.drafters import families
from specctl.drafters.training_free.goose import Goose, GooseOptions, GooseState, Rates
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

CPU = torch.device("cpu")
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


def make_state(target: Target, **options: Any) -> GooseState:
    drafter = Goose(GooseOptions(**options), target.spec)
    state = drafter.open(Space(1, 64, 32, CPU, torch.float32))
    state.start(0, TEXT, {})
    for token in range(1, 10):
        for rank in range(3):
            state.stores.at(0).add((token,), (20 + 3 * token + rank,), 0.5 - 0.1 * rank)
    return state


def depth_of(tree: DraftTree, tokens: set[int]) -> int:
    """Depth of the deepest node that carries one of the tokens."""
    pairs = zip(tree.token_BN[0].tolist(), tree.depth_BT()[0, 1:].tolist(), strict=True)
    return max((depth for token, depth in pairs if token in tokens), default=0)


def test_the_spine_is_deep_and_the_branches_hang_beside_it(
    make_target: Any, round_view: Any
) -> None:
    view = round_view({0: TEXT})
    tree = make_state(make_target()).propose(view, Budget(12, 8))
    spine = depth_of(tree, set(TEXT))
    branches = tree.token_BN[0][tree.token_BN[0] > 20]
    assert spine >= 6
    assert len(branches) == 12 - spine
    balanced = make_state(make_target(), shape="balanced").propose(view, Budget(12, 8))
    assert depth_of(balanced, set(TEXT)) < spine


def test_a_reliable_match_makes_the_spine_longer(make_target: Any, round_view: Any) -> None:
    lengths = []
    for chance in (0.3, 0.6, 0.9):
        state = make_state(make_target(), spine=(chance,) * 4)
        tree = state.propose(round_view({0: TEXT}), Budget(12, 12))
        lengths.append(depth_of(tree, set(TEXT)))
    assert lengths[0] < lengths[1] < lengths[2]


def test_without_a_match_the_branches_are_the_tree(make_target: Any, round_view: Any) -> None:
    state = make_state(make_target())
    state.start(0, [1, 2, 3], {})
    state.stores.at(0).add((3,), (30,), 0.5)
    state.stores.at(0).add((30,), (31,), 0.5)
    tree = state.propose(round_view({0: [1, 2, 3]}), Budget(8, 4))
    assert tree.token_BN[0].tolist() == [30, 31]


def test_only_guesses_whose_parent_was_reached_are_tested(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target())
    view = round_view({0: TEXT})
    tree = state.propose(view, Budget(12, 8))
    before = rates_of(state)
    spine = [tree.token_BN[0].tolist().index(token) + 1 for token in (4, 5)]
    none = torch.zeros(1, 13, 8)
    outcome = Outcome(
        view,
        tree,
        torch.tensor([[0, *spine]]),
        (2,),
        torch.tensor([50]),
        ((4, 5, 50),),
        (None,),
        topk_BTC=none.long(),
        topk_logp_BTC=none,
    )
    state.observe(replace(outcome, finished=("eos",)))
    assert rates_of(state) == before
    state.propose(view, Budget(12, 8))
    state.observe(outcome)
    after = rates_of(state)
    assert after[2] > before[2]  # a match of three, right
    assert after[3] != before[3]  # longer ones: right once, then wrong
    assert all(a < b for a, b in zip(after[4:6], before[4:6], strict=True))  # beside the spine
    assert after[12:] == before[12:]  # off the spine nothing was reached


def rates_of(state: GooseState) -> list[float]:
    return [state.rates[0].chance(source) for source in range(20)]


def test_acceptance_is_learned_and_its_first_guess_fades() -> None:
    rates = Rates([0.5, 0.5])
    for _ in range(60):
        rates.record(0, True)
    assert rates.chance(0) > 0.9
    assert rates.chance(1) == 0.5


@pytest.mark.proof
def test_the_spine_tree_beats_the_balanced_one_and_each_source_alone(tiny_target: Any) -> None:
    """Code that the embedded target writes: some of it repeats, some does not. The text is the same
    for all, whatever drafts it; twelve nodes each."""
    sampling = Sampling(0.6, max_new_tokens=48, ignore_eos=True)
    requests = [Request(p.ids, sampling) for p in heldout_prompts(tiny_target, 16)]

    def tau(family: str, **options: Any) -> float:
        found = families()[family]
        drafter = found.build(found.options(**options), tiny_target.spec, None)
        policy = make_policy({"policy": "direct", "length": 8, "nodes": 12})
        done = Engine(tiny_target, drafter, policy, num_slots=16).run(requests)
        return sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done)

    fused = tau("goose")
    assert fused > tau("goose", shape="balanced")
    assert fused > tau("prompt-lookup")
    assert fused > tau("token-recycling")


def test_chances_must_be_chances() -> None:
    with pytest.raises(RecipeError, match="probability"):
        GooseOptions(spine=(0.5, 1.5))
    with pytest.raises(RecipeError, match="shape"):
        GooseOptions(shape="round")
