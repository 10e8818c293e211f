"""RSD-S, DySpec and multi-candidate trees: each idea against its ablation, on known
distributions."""

from __future__ import annotations

import pytest
import torch

from specctl.runtime.policies import make_policy
from specctl.runtime.policies.dyspec import DySpec
from specctl.runtime.policies.mcsd import Candidates
from specctl.runtime.policies.rsd import StochasticBeam, conditioned
from specctl.runtime.policies.sequoia import Sequoia
from specctl.runtime.policies.static_tree import StaticTree
from specctl_testing.runtime.markov import Pair, alike, humble, mixed, sibling_acceptance


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mixed(1, noise=0.8)


@pytest.fixture(scope="module")
def unsure() -> Pair:
    return humble(3)


def test_noisy_scores_of_children_have_their_parents_as_maximum() -> None:
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64)
    noisy = (phi - torch.log(-torch.log(torch.rand(3, 2, 6, generator=generator)))).sort(
        descending=True
    )[0]
    parent = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    found = conditioned(noisy, parent)
    inner = (-parent[:, :, None]).exp() - (-noisy[:, :, :1]).exp() + (-noisy).exp()
    torch.testing.assert_close(found, -inner.log())
    torch.testing.assert_close(found[:, :, 0], parent)
    assert bool((found.diff(dim=-1) < 0).all())


def test_children_that_cannot_be_drawn_stay_impossible() -> None:
    noisy = torch.tensor([[[1.0, -torch.inf], [-torch.inf, -torch.inf]]])
    found = conditioned(noisy, torch.tensor([[0.5, 0.2]]))
    assert found[0, 0, 0] == 0.5
    assert found.isinf().sum() == 3


@pytest.mark.proof
def test_siblings_without_replacement_beat_independent_ones(pair: Pair) -> None:
    """At one budget; duplicates are wasted the more, the surer the drafter is."""
    for temperature in (1.0, 0.6):
        apart = pair.run(StaticTree((3, 2, 1)), "recursive", temperature=temperature)
        beam = pair.run(StochasticBeam(3, 5), "recursive", temperature=temperature)
        twins = pair.run(Candidates((3, 2, 1)), "multi-round", temperature=temperature)
        chain = pair.run(make_policy({"policy": "chain", "length": 15}), temperature=temperature)
        assert beam.mean_nodes <= apart.mean_nodes == twins.mean_nodes
        assert apart.mean > twins.mean + 3 * (apart.error + twins.error)
        assert beam.mean > twins.mean + 3 * (beam.error + twins.error)
        assert chain.calls > 3 * beam.calls


@pytest.mark.proof
def test_a_dynamic_tree_beats_the_best_fixed_one_where_states_differ(unsure: Pair) -> None:
    fixed = [
        unsure.run(Sequoia(8, 8, acceptance), "recursive", tokens=48)
        for acceptance in ((0.6, 0.2, 0.1), (0.8, 0.1), (0.45, 0.25, 0.15, 0.05))
    ]
    best = max(fixed, key=lambda one: one.mean)
    for limit in (0.0, 0.05):
        grown = unsure.run(DySpec(8, 8, threshold=limit), "recursive", tokens=48)
        assert max(grown.mean_nodes, best.mean_nodes) <= 8
        assert grown.mean > best.mean + 3 * (grown.error + best.error)


@pytest.mark.proof
def test_the_threshold_leaves_unlikely_nodes_out(unsure: Pair) -> None:
    whole, cut = (
        unsure.run(DySpec(8, 12, threshold=limit), "recursive", tokens=48) for limit in (0.0, 0.3)
    )
    assert cut.mean_nodes < 0.7 * whole.mean_nodes
    assert cut.mean > 0.7 * whole.mean


@pytest.mark.proof
def test_layers_spare_draft_calls(unsure: Pair) -> None:
    greedy, layered = (
        unsure.run(DySpec(6, 12, threshold=limit), rows=8, tokens=48) for limit in (0.0, 0.05)
    )
    assert layered.calls < 0.7 * greedy.calls
    assert layered.calls < 8
    assert layered.mean > 0.8 * greedy.mean


def test_a_wider_candidate_is_accepted_as_the_rule_says() -> None:
    """One level, state-independent distributions: multi-round acceptance by hand, r := norm([r -
    q]+)."""
    one = alike(5)
    r_V, q_V, missed = one.p_VV[0].double(), one.q_VV[0].double(), 1.0
    for _ in range(3):
        missed *= 1.0 - float(torch.minimum(r_V, q_V).sum())
        r_V = (r_V - q_V).clamp(min=0)
        r_V = r_V / r_V.sum()
    done = one.run(Candidates((3,)), "multi-round")
    assert abs(done.mean - (1.0 - missed)) < 4.5 * done.error
    apart = one.run(StaticTree((3,)), "recursive")
    expected = sum(sibling_acceptance(one.p_VV[0].numpy(), one.q_VV[0].numpy(), 3))
    assert abs(apart.mean - expected) < 4.5 * apart.error


def test_the_decision_spares_draft_calls_where_the_drafter_is_unsure() -> None:
    one = humble(1, 16)
    always = one.run(Candidates((2, 1, 1, 1, 1)), rows=1, tokens=300)
    decided = one.run(Candidates((2, 1, 1, 1, 1), 0.5), rows=1, tokens=300)
    assert decided.calls < 0.8 * always.calls
    assert decided.mean / decided.calls > 1.1 * always.mean / always.calls
