"""Exits that are chosen while serving, and drafts that need fewer layers the further ahead."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.drafters.self_speculation.del_exit import (
    Del,
    DelOptions,
    DelState,
    ExitChoice,
    best_choice,
)
from specctl.drafters.self_speculation.depth_decay import DepthDecay, DepthDecayOptions
from specctl.drafters.self_speculation.layer_skip import LayerSkip, LayerSkipOptions
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode


def test_the_choice_is_the_best_of_all_pairs() -> None:
    alpha, count = {2: 0.3, 4: 0.75, 6: 0.85}, 8

    def rate(layers: int, length: int) -> float:
        chance = alpha[layers]
        tokens = (1 - chance ** (length + 1)) / (1 - chance)
        return tokens / (length * layers + count)

    pairs = [(layers, length) for layers in alpha for length in range(1, 9)]
    best = max(pairs, key=lambda pair: rate(*pair))
    assert best_choice(alpha, count, 8) == ExitChoice(*best)
    assert rate(*best) > 1 / count
    assert best_choice({4: 0.2, 6: 0.4}, count, 8).length == 0  # plain decoding


def settled_target(make_model: Any, layers: int) -> Target:
    """Six layers, of which those above the first `layers` add nothing."""
    model = make_model("llama", num_layers=6)
    with torch.no_grad():
        for layer in model.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Target.from_model(model)


@pytest.mark.parametrize("settled", [2, 4])
def test_del_finds_the_layer_after_which_nothing_changes(make_model: Any, settled: int) -> None:
    target = settled_target(make_model, settled)
    drafter = Del(DelOptions(), target.spec, None)
    ran = decode(target, drafter, tokens=48, policy="chain", length=8, slots=2)
    assert ran.answers == decode(target, None, tokens=48).answers
    assert isinstance(ran.state, DelState)
    assert {choice.layers for choice in ran.state.choice} == {settled}
    assert min(choice.length for choice in ran.state.choice) >= 4
    alpha = ran.state.alpha(0)
    assert alpha[settled] > 0.9 > alpha[settled - 1]


EASY, HARD = (3, 1, 4, 1, 5), (40, 33, 47, 50)  # texts that go on with tokens of their own half


def parted_target(make_model: Any, seed: int) -> Target:
    """Eight layers. Behind tokens of the lower half of the vocabulary, those above the second add
    nothing: the first number of a state, which no layer changes, closes their gates. A text stays
    in its half."""
    model = make_model("llama", num_layers=8, hidden=64, vocab=64, seed=seed)
    half_V = torch.where(torch.arange(64) < 32, 1.0, -1.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 5.0 * half_V
        model.lm_head.weight[:, 0] = 20.0 * half_V
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
            if index >= 2:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.gate_proj.weight.zero_()
                layer.mlp.gate_proj.weight[:, 0] = -20.0
    return Target.from_model(model)


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1])
def test_del_is_worth_more_than_any_exit_and_length_where_texts_differ(
    make_model: Any, layers_read: list[int], seed: int
) -> None:
    target, prompts = parted_target(make_model, seed), (EASY, HARD)

    def worth(drafter: Drafter, length: int) -> float:
        """Tokens for the cost of a forward pass."""
        layers_read.clear()
        ran = decode(target, drafter, prompts, tokens=48, policy="chain", length=length)
        rounds = sum(completion.stats.rounds for completion in ran.completions)
        return 96 / (rounds + sum(layers_read) / 8)

    fixed = [
        worth(LayerSkip(LayerSkipOptions(layers), target.spec), length)
        for layers in range(1, 8)
        for length in (1, 2, 4, 8)
    ]
    assert worth(Del(DelOptions(), target.spec), 8) > 1.05 * max(fixed) > 1.05


def test_del_reads_nothing_that_it_does_not_draft(make_model: Any, layers_read: list[int]) -> None:
    """Neither behind the last token of a draft nor in a round without one."""
    target = parted_target(make_model, 0)
    ran = decode(target, Del(DelOptions(), target.spec), (EASY, HARD), tokens=48, policy="chain")
    assert len(layers_read) == ran.drafted
    assert 0 in [outcome.tree.num_nodes for outcome in ran.outcomes]


@pytest.fixture
def layers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every token that was read for a draft: the layers that ran."""
    found: list[int] = []
    nodes = BorrowedState._nodes

    def noted(self: BorrowedState, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        first = self.growth.num_nodes
        found.extend(len(self.parts_of(slot, first).mlp) for slot in self.growth.view.slots)
        return nodes(self, token_BM, parent_BM)

    monkeypatch.setattr(BorrowedState, "_nodes", noted)
    monkeypatch.setattr(BorrowedState, "whole_chain", lambda *_: None)  # several in one call
    return found


def test_del_drafts_nothing_where_no_exit_is_right(make_target: Any) -> None:
    """Of a random model little is known before its last layer."""
    target = make_target(num_layers=8)
    drafter = Del(DelOptions(exits=(1, 2)), target.spec, None)
    ran = decode(target, drafter, tokens=48, policy="chain", length=8, temperature=1.5)
    assert [o.tree.num_nodes for o in ran.outcomes[-4:]] == [0] * 4


@pytest.mark.parametrize("schedule", ["skip-decode", "d3"])
def test_a_layer_has_run_for_every_token_before(schedule: str) -> None:
    """So that no key is missing, and the number of layers never grows."""
    options = DepthDecayOptions(schedule=schedule, warm_up=2, alpha=0.8, least=0.25)
    parts = [set(options.parts(index, 16).attention) for index in range(8)]
    for before, after in pairwise(parts):
        assert after <= before
    assert len(parts[0]) == 12
    assert len(parts[-1]) == 4
    assert {0, 1, 15} <= parts[-1]


def test_with_all_layers_it_is_the_target(make_target: Any) -> None:
    target = make_target()
    options = DepthDecayOptions(most=1.0, least=1.0)
    drafter = DepthDecay(options, target.spec, None)
    assert decode(target, drafter, policy="chain", length=3, tokens=24).tau == 4


def test_settings_out_of_range_are_refused(make_target: Any) -> None:
    with pytest.raises(RecipeError, match="out of range"):
        DepthDecayOptions(most=0.2)
    with pytest.raises(RecipeError, match="exits"):
        Del(DelOptions(exits=(9,)), make_target().spec, None)


def test_speculative_jacobi_is_jacobi_when_greedy(make_target: Any) -> None:
    """The same guesses, round by round, once both have begun."""
    target = make_target(vocab=24)
    runs = {}
    for name, policy in (("jacobi", "direct"), ("speculative-jacobi", "chain")):
        method = family(name)
        options = {"schedule": "jacobi"} if name == "jacobi" else {"fill": "uniform"}
        drafter = method.build(method.options(**options), target.spec, None)
        runs[name] = decode(target, drafter, policy=policy, length=4, nodes=None, tokens=48)
    assert runs["speculative-jacobi"].answers == runs["jacobi"].answers
    assert runs["speculative-jacobi"].tau == pytest.approx(runs["jacobi"].tau, rel=0.15)
    assert runs["speculative-jacobi"].tau > 1.02


def test_flat_distributions_suit_speculative_jacobi(make_model: Any) -> None:
    """The more tokens are possible, the less a distribution changes with what stands before it."""
    taus = []
    for heat in (0.5, 3.0):
        target = Target.from_model(make_model("llama", vocab=24))
        method = family("speculative-jacobi")
        drafter = method.build(method.options(), target.spec, None)
        ran = decode(
            target, drafter, policy="chain", length=4, tokens=100, slots=2, temperature=heat
        )
        taus.append(ran.tau)
    assert taus[1] > taus[0] + 0.3
