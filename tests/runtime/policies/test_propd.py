"""ProPD: what it learns, the size it chooses, and pruning half-way that changes no text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specctl.core.drafter import RoundSeconds
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.measure.stats import Stats
from specctl.runtime.policies.propd import Experience, Progressive, Regression
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.markov import alike
from specctl_testing.runtime.pairs import disturbed

TEXTS = ("def main():\n    ", "The capital of France is", "import os\nimport sys\n\n")


def test_the_regression_finds_the_price_of_a_node_and_follows_its_changes() -> None:
    prices = Regression()
    assert prices.seconds(4) is None
    prices.see(8, 0.018)
    assert prices.seconds(4) is None, "one size says nothing about others"
    for base, slope in ((0.01, 0.001), (0.03, 0.002)):
        for i in range(200):
            nodes = 4 + 12 * (i % 2)
            prices.see(nodes, base + slope * nodes)
        assert prices.seconds(10) == pytest.approx(base + 10 * slope, rel=0.02)


def test_it_learns_the_chances_of_ranks() -> None:
    pair = alike(2, spread=1.0, noise=1.0)
    order = np.argsort(-pair.q_VV[0].numpy())
    truth = pair.p_VV[0].numpy()[order]
    policy = Progressive(3, 20)
    engine_policy: list[Progressive] = []

    class Kept(Progressive):
        def grow(self, growth: Any) -> Any:
            engine_policy[:] = [self]
            return super().grow(growth)

    pair.run(Kept(3, 20), "target-only")
    learned = engine_policy[0].learned
    assert learned.rounds > 16
    assert learned.profile[0][:3] == pytest.approx(tuple(truth[:3]), abs=0.05)
    assert policy.learned.rounds == 0, "what one engine learns is its own"


def test_the_dearer_a_node_the_smaller_the_tree() -> None:
    sizes = []
    for slope in (0.0001, 0.001, 0.01):
        learned = Experience(5, 24)
        for nodes in (24, 12) * 4:
            learned.verify.see(nodes, 0.01 + slope * nodes)
            learned.draft.see(5, 0.002)
        learned.decide(24)
        sizes.append(learned.size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


@pytest.fixture(scope="module")
def twin(tiny_target: Target) -> SmallLm:
    """The embedded target as its own drafter: good guesses, so that trees matter."""
    return SmallLm.from_lm(tiny_target.lm, tiny_target.spec)


def written(target: Target, drafter: SmallLm, policy: Progressive) -> tuple[Stats, Any]:
    done = generate(
        target,
        TEXTS,
        drafter=drafter,
        policy=policy,
        sampling=Sampling(max_new_tokens=20, ignore_eos=True),
        batch=3,
    )
    return done.stats, [output.token_ids for output in done.outputs]


def test_pruning_half_way_keeps_the_text_and_spares_nodes(
    tiny_target: Target, twin: SmallLm
) -> None:
    fixed = {"length": 3, "nodes": 16, "refresh": 1000}
    whole, text = written(tiny_target, twin, Progressive(**fixed))
    pruned, same = written(tiny_target, twin, Progressive(**fixed, early_layer=6, early_top=8))
    assert same == text
    assert pruned.drafted / pruned.rounds < 0.65 * whole.drafted / whole.rounds
    assert pruned.tau > 0.65 * whole.tau
    early, same = written(tiny_target, twin, Progressive(**fixed, early_layer=1, early_top=8))
    assert same == text
    assert early.tau < 0.8 * pruned.tau, "a layer that knows nothing prunes as well"


def test_what_survives_reads_as_in_a_whole_forward(make_target: Any) -> None:
    """Sampled text of a random target under early pruning is the text of plain decoding."""
    shape = {"num_layers": 4, "vocab": 48}
    target = make_target(**shape)
    drafter = disturbed(make_target, target, **shape)
    sampling = Sampling(temperature=1.0, seed=3, max_new_tokens=16, ignore_eos=True)
    plain = generate(target, [[1, 2, 3], [7]], sampling=sampling, batch=2)
    policy = Progressive(3, 12, early_layer=2, early_top=12)
    pruned = generate(
        target, [[1, 2, 3], [7]], sampling=sampling, drafter=drafter, policy=policy, batch=2
    )
    assert [o.token_ids for o in pruned.outputs] == [o.token_ids for o in plain.outputs]
    assert pruned.stats.accepted > 0


def test_runs_with_the_same_times_learn_the_same(make_target: Any) -> None:
    """The tree follows the clock, but an engine may be given what its rounds took."""
    shape = {"num_layers": 2, "vocab": 48}
    target = make_target(**shape)
    steady = RoundSeconds(draft=0.1, verify=1.0, commit=0.0)

    def sums(seconds: RoundSeconds | None) -> Any:
        drafter = disturbed(make_target, target, **shape)
        engine = Engine(
            target, drafter, Progressive(3, 12, refresh=2), num_slots=1, assumed_seconds=seconds
        )
        engine.run([Request((1, 2, 3), Sampling(max_new_tokens=24, ignore_eos=True))])
        learned = engine.policy.learned
        return learned.verify.sums, learned.draft.sums, learned.size

    assert sums(steady) == sums(steady)
    assert sums(None)[:2] != sums(None)[:2], "a clock that stands still"


def test_targets_that_cannot_be_stopped_half_way_are_refused(make_target: Any) -> None:
    with pytest.raises(IncompatibleError, match="layer by layer"):
        Engine(make_target("gpt2"), None, Progressive(early_layer=2))
    with pytest.raises(RecipeError, match="layers below and above"):
        Engine(make_target(num_layers=2), None, Progressive(early_layer=2))
