"""Controllers against the best arm in hindsight, on simulated arms and in the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.team import Team, TeamOptions
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.drafters.training_free.token_recycling import TokenRecycling, TokenRecyclingOptions
from specctl.runtime.controllers.bandit import Exp3, Ucb
from specctl.runtime.controllers.base import OFF, Arm, Controller, Prices, Score
from specctl.runtime.controllers.cascade import Cascade
from specctl.runtime.controllers.hedge import Hedge
from specctl.runtime.controllers.match import SUFFIXES, MatchIndex
from specctl.runtime.controllers.posterior import Posterior
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.switch import CONTROLLERS, Switch
from specctl.runtime.sampling.sampling import Sampling

LENGTHS = (2, 4, 8)
TABLE = CostTable(dict.fromkeys((0, 8), 0.0), {0: 1.0, 8: 1.8}, "", "", 1)  # a tenth per node
ARMS = (Arm(OFF), *(Arm(f"{m} {k}", m, Direct(k, k)) for m in (0, 1) for k in LENGTHS))


@dataclass
class World:
    """Two drafters of known acceptance; every draft is scored for whoever listens to scores."""

    alpha: tuple[float, float]
    seed: int = 0

    def __post_init__(self) -> None:
        self.coins = random.Random(self.seed)

    def rate(self, arm: Arm) -> float:
        """True tokens per second."""
        tokens = 1.0 if arm.member is None else expected_tau(self.alpha[arm.member], arm.length)
        return tokens / (1.0 + 0.1 * arm.length)

    @property
    def best(self) -> float:
        return max(self.rate(arm) for arm in ARMS)

    def matched(self, member: int) -> int:
        found = 0
        while found < 8 and self.coins.random() < self.alpha[member]:
            found += 1
        return found

    def play(self, controller: Controller, rounds: int) -> list[float]:
        """Regret of every round, in tokens per second."""
        lost = []
        for _ in range(rounds):
            index = controller.order([2])[0]
            arm = ARMS[index]
            found = [self.matched(0), self.matched(1)]
            tokens = 1 if arm.member is None else 1 + min(found[arm.member], arm.length)
            noise = 1.0 + 0.2 * (self.coins.random() - 0.5)
            controller.reward(index, tokens, (1.0 + 0.1 * arm.length) * noise)
            heard = (0, 1) if controller.looks() else ()
            for member in {*heard, *([] if arm.member is None else [arm.member])}:
                limit = arm.length if member == arm.member else 8
                hits = min(found[member], limit)
                score = Score(member, hits, min(hits + 1, limit), 2, limit)
                controller.scored(score)
            lost.append(self.best - self.rate(arm))
        return lost


def opened(controller: Controller, arms: Sequence[Arm] = ARMS) -> Controller:
    controller.open(arms, Prices(TABLE))
    return controller


LEARNING = (Ucb, Exp3, Posterior, Hedge)


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("alpha", [(0.85, 0.2), (0.2, 0.6), (0.02, 0.02)])
def test_regret_against_the_best_arm_in_hindsight_is_sublinear(
    kind: Any, alpha: tuple[float, float]
) -> None:
    lost = World(alpha).play(opened(kind()), 2400)
    early, late = sum(lost[:300]) / 300, sum(lost[1800:]) / 600
    assert late < 0.5 * early or late < 0.02 * World(alpha).best
    assert late < 0.12 * World(alpha).best


def always(index: int) -> list[float]:
    class Fixed(Controller):
        def order(self, contexts: Any) -> Any:
            return (index,)

    return World((0.85, 0.2)).play(opened(Fixed()), 200)


def test_a_controller_that_does_not_learn_has_linear_regret() -> None:
    assert min(sum(always(i)) for i in range(len(ARMS)) if i != 3) > 0.05 * 200
    assert sum(always(3)) == pytest.approx(0.0, abs=1e-9), "eight tokens of the good drafter"


@pytest.mark.parametrize(
    "controller", [Ucb(memory=0.98, explore=0.2), Exp3(slowest=0.06, share=1e-3), Hedge()]
)
def test_a_workload_that_turns_is_followed(controller: Controller) -> None:
    opened(controller)
    before, after = World((0.85, 0.02)), World((0.02, 0.85), seed=1)
    before.play(controller, 900)
    lost = after.play(controller, 1500)
    stubborn = after.best - after.rate(ARMS[3])
    assert sum(lost[900:]) / 600 < 0.35 * stubborn


def test_the_bonus_of_ucb_counts_each_arm_by_itself() -> None:
    """An arm that was hardly tried must come back; with one count for all it never would."""
    ucb = Ucb()
    opened(ucb)
    for i in range(len(ARMS)):
        for _ in range(2):
            ucb.reward(i, 0.95 if i == 5 else 1.0, 1.0)
    for _ in range(400):
        ucb.reward(0, 1.0, 1.0)
    plays = [ucb.order([])[0] for _ in range(1)]
    assert plays[0] != 0
    greedy = Ucb(explore=0.0)
    opened(greedy)
    greedy.speeds = ucb.speeds
    ucb.speeds[0].tokens += 1.0
    assert greedy.order([])[0] == 0


def test_hedge_learns_about_drafters_that_never_play() -> None:
    hedge = Hedge()
    opened(hedge)
    for _ in range(40):
        hedge.order([])
        hedge.reward(0, 1.0, 1.0)
        hedge.scored(Score(1, 8, 8))
    assert ARMS[hedge.order([])[0]].member == 1
    assert sum(hedge.weights()) == pytest.approx(1.0)
    for _ in range(120):
        hedge.scored(Score(1, 0, 1, depth=8))
    assert ARMS[hedge.order([])[0]].is_off


def test_the_cascade_goes_by_the_length_of_the_match() -> None:
    cascade = Cascade()
    opened(cascade)
    names = [[ARMS[i].name for i in cascade.order([context])] for context in range(5)]
    assert names[0] == ["1 2", OFF], "nothing repeats: the next member drafts"
    assert names[1] == names[0]
    assert names[2] == ["0 2", "1 2", OFF]
    assert names[3] == ["0 4", "1 2", OFF]
    assert names[4] == ["0 8", "1 2", OFF]


def test_in_a_cascade_what_copies_comes_first_whatever_the_order() -> None:
    cascade = Cascade()
    arms = [replace(arm, is_copy=arm.member == 1) for arm in ARMS]
    opened(cascade, arms)
    names = [[arms[i].name for i in cascade.order([context])] for context in (1, 2, 4)]
    assert names == [["0 2", OFF], ["1 2", "0 2", OFF], ["1 8", "0 2", OFF]]


def test_contexts_are_repeated_suffixes() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for repeat, context in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (8, 4)):
        whole = [*text, 50, *text[:repeat]]
        assert MatchIndex().context(whole) == context, repeat
        grown = MatchIndex()
        for end in range(1, len(whole) + 1):
            found = grown.context(whole[:end])
        assert found == context, "read one by one it must be the same"
    assert SUFFIXES == (1, 2, 4, 8)


def test_prices_come_from_the_table_and_else_from_rounds() -> None:
    assert Prices(TABLE).seconds(4) == pytest.approx(1.4)
    assert Prices(TABLE).seconds(16) == pytest.approx(3.6)
    found = Prices()
    assert found.seconds(4) > found.seconds(0)
    for _ in range(50):
        found.observe(0, 2.0)
        found.observe(4, 3.0)
    assert (found.seconds(0), found.seconds(4)) == pytest.approx((2.0, 3.0))
    chain, tree = Arm("a", 0, Direct(4, 8)), Arm("b", 1, Direct(4, 8))
    prices = Prices(TABLE, branching={1})
    assert prices.of(tree) == pytest.approx(1.8)
    assert (prices.of(chain), prices.of(chain, 2)) == pytest.approx((1.4, 1.2))


# -- in the engine --------------------------------------------------------------------------------

GREEDY = Sampling(max_new_tokens=40, ignore_eos=True)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 1], [11, 12, 11, 12, 11])


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(num_layers=2, vocab=48)


def mixed_team(target: Any) -> Team:
    torch.manual_seed(1)
    small = SmallLm(SmallLmOptions(layers=1, width=16), target.spec)
    lookup = PromptLookup(PromptLookupOptions(), target.spec)
    recycling = TokenRecycling(TokenRecyclingOptions(), target.spec)
    return Team.of([small, lookup, recycling])


@pytest.mark.parametrize("name", CONTROLLERS)
def test_whatever_a_controller_plays_the_text_is_the_targets(target: Any, name: str) -> None:
    plain = generate(target, PROMPTS, sampling=GREEDY)
    policy = Switch(controller=name, lengths=(2, 4))
    fast = generate(
        target, PROMPTS, drafter=mixed_team(target), sampling=GREEDY, policy=policy, batch=2
    )
    assert [o.token_ids for o in fast.outputs] == [o.token_ids for o in plain.outputs]
    report = fast.stats.to_json()["controller"]
    arms = report["arms"]
    assert sum(arm["tokens"] for arm in arms.values()) == fast.stats.tokens
    assert report["controller"] == name
    assert policy.counts == {}, "the policy that was handed in has learned nothing"


def test_a_sampled_arm_keeps_its_distribution_beside_deterministic_ones(make_target: Any) -> None:
    """Chains drawn from q (verified as such) and copies (which follow the target) in turn."""
    small = make_target(num_layers=2, vocab=6)
    torch.manual_seed(2)
    draft = SmallLm(SmallLmOptions(layers=1, width=16), small.spec)
    team = Team.of([draft, PromptLookup(PromptLookupOptions(), small.spec)])
    arms = (Arm("draft", 0, Chain(length=2)), Arm("copy", 1, Direct(2, 2)))
    policy = Switch(controller="exp3", arms=arms)
    count, prompt = 800, [1, 2, 3, 1, 2]
    sampling = Sampling(temperature=1.2, max_new_tokens=3, ignore_eos=True)
    made = generate(
        small, [prompt] * count, drafter=team, sampling=sampling, policy=policy, batch=200
    )
    seen = torch.zeros(6).index_add_(
        0, torch.tensor([o.token_ids[0] for o in made.outputs]), torch.ones(count)
    )
    ids = torch.tensor([prompt])
    masks = small.lm.document_masks(torch.zeros_like(ids))
    logits = small.lm.dense(ids, torch.arange(5)[None], masks).logits_BTV[0, -1]
    distribution = (logits / 1.2).softmax(-1)
    assert float((seen / count - distribution).abs().sum() / 2) < 0.06
    played = made.stats.to_json()["controller"]["arms"]
    assert {"draft", "copy"} <= set(played)


def test_an_unknown_controller_or_member_is_refused(target: Any) -> None:
    with pytest.raises(RecipeError, match="unknown controller"):
        Switch(controller="oracle")
    with pytest.raises(RecipeError, match="cannot be named"):
        Team(TeamOptions(("small-lm",)), target.spec)
    with pytest.raises(RecipeError, match="each of them once"):
        TeamOptions(("prompt-lookup", "prompt-lookup"))
