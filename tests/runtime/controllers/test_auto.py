"""Auto speculates where text repeats and is off where it does not."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from specctl.core.drafter import RoundView, Space
from specctl.core.tree import NodeKind, chain_tree
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.team import Team, TeamOptions
from specctl.drafters.training_free.token_recycling import TokenRecyclingState
from specctl.runtime.controllers.auto import GLANCE, SELDOM, Auto, Survival
from specctl.runtime.controllers.base import OFF, Arm, Prices, Score
from specctl.runtime.controllers.cascade import Cascade
from specctl.runtime.controllers.match import Matches, Repeat
from specctl.runtime.controllers.shadow import Shadows
from specctl.runtime.engine import commit, lazy_drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.engine.round_drafter import PolicyDrafter
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import equip, measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies.chain import Chain
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling

DEAR = CostTable(dict.fromkeys((0, 16), 0.0), {0: 1.0, 16: 2.6}, "", "", 1)  # a tenth per node
MEMBERS = TeamOptions(("prompt-lookup", "token-recycling"))
ARMS = (Arm(OFF), *(Arm(f"copy {k}", 0, Direct(k, k), is_copy=True) for k in (1, 2, 4, 8)))


def opened() -> Auto:
    auto = Auto()
    auto.open(ARMS, Prices(DEAR))
    return auto


@pytest.fixture(scope="module")
def target(make_target: Any) -> Any:
    return make_target(num_layers=2, vocab=96)


def run(target: Any, prompts: Any, sampling: Sampling) -> Any:
    policy = equip(Switch(controller="auto", lengths=(1, 2, 4, 8), nodes=12), DEAR).policy
    return generate(
        target, prompts, drafter=Team(MEMBERS, target.spec), sampling=sampling, policy=policy
    )


def test_random_text_switches_speculation_off(target: Any) -> None:
    coins = random.Random(0)
    prompts = [[coins.randrange(96) for _ in range(24)] for _ in range(2)]
    sampling = Sampling(temperature=4.0, max_new_tokens=150, ignore_eos=True)
    made = run(target, prompts, sampling)
    report = made.stats.to_json()["controller"]
    assert report["arms"][OFF]["rounds"] > 0.93 * made.stats.rounds
    assert report["rested"] > 0.6 * report["rounds"]
    plain = generate(target, prompts, sampling=sampling)
    assert [o.token_ids for o in made.outputs] == [o.token_ids for o in plain.outputs], (
        "drafts that follow the target's own draws change nothing, under sampling either"
    )


def test_text_that_repeats_itself_is_copied(tiny_target: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # other work is no price
    prompt = tiny_target.encode("import os\n" * 4)
    made = run(tiny_target, [prompt], Sampling(max_new_tokens=60, ignore_eos=True))
    assert made.stats.repetition_rate > 0.5, "the target goes on as it was asked to"
    assert made.stats.tau > 2.0


def test_a_long_match_ends_a_rest_at_once() -> None:
    auto = opened()
    for _ in range(400):
        assert ARMS[auto.order([0])[0]].is_off
    assert auto.is_resting
    assert not auto.looks()
    assert not auto.is_listening
    while not auto.needs_contexts:
        auto.order([])
    played = [ARMS[i] for i in auto.order([4])]
    assert not played[0].is_off
    assert played[-1].is_off, "nothing to draft falls back to plain decoding"


def test_looking_is_rare_where_nothing_pays() -> None:
    auto = opened()
    looks = 0
    for _ in range(2000):
        auto.order([0])
        looks += auto.looks()
    assert looks < 0.15 * 2000
    late = 0
    for _ in range(2000):
        auto.order([0])
        late += auto.looks()
    assert 0 < late < looks, "it looks again, ever more rarely"


def test_a_context_that_failed_is_left_alone_and_others_are_not() -> None:
    auto = opened()
    for _ in range(40):
        auto.scored(Score(0, 0, 1, 4))
        auto.scored(Score(0, 8, 8, 2))
    assert [ARMS[i].length for i in auto.order([2])] == [8, 4, 2, 1, 0]
    auto.reward(4, 9.0, 1.8)
    assert ARMS[auto.order([4])[0]].is_off
    assert ARMS[auto.order([2])[0]].name == "copy 8"


def test_losses_are_bounded_whatever_is_expected() -> None:
    """Drafts that are scored well and played badly: the account ends it, not the estimate."""
    auto, lost = opened(), 0.0
    for round_ in range(300):
        for _ in range(3):
            auto.scored(Score(0, 8, 8, 3))
        played = ARMS[auto.order([3])[0]]
        spent = 1.0 + 0.1 * played.length
        auto.prices.observe(played.length, spent)
        auto.reward(ARMS.index(played), 1.0, spent)
        lost += 0.1 * played.length
        assert lost <= 1.0 + 0.005 * (round_ + 1) + 1e-9
    assert lost > 2.0, "it tries now and then"


def test_the_text_itself_tells_what_copying_is_worth() -> None:
    """Nothing was drafted; what the prompt repeats is told apart from what was generated."""
    auto = opened()
    assert ARMS[auto.order([1])[0]].is_off
    for _ in range(10):
        auto.repeated(Repeat(1, 8, 8, is_prompt=True))
    assert ARMS[auto.order([1])[0]].length == 8
    assert auto.foretold.balance == 0.0, "a prompt that repeats itself is no credit"
    assert ARMS[auto.order([0])[0]].is_off
    for _ in range(100):
        auto.repeated(Repeat(1, 0, 1))
    assert ARMS[auto.order([1])[0]].is_off


def test_text_that_goes_on_as_before_is_credit_after_a_loss() -> None:
    def lost() -> Auto:
        auto = opened()
        auto.order([4])
        auto.reward(4, 1.0, 2.0)
        assert ARMS[auto.order([4])[0]].is_off, "it has lost what it may lose"
        return auto

    right, wrong = lost(), lost()
    for _ in range(5):
        right.repeated(Repeat(4, 8, 8))
        wrong.repeated(Repeat(4, 0, 1))
    assert not ARMS[right.order([4])[0]].is_off
    assert ARMS[wrong.order([4])[0]].is_off
    for _ in range(100):
        right.repeated(Repeat(4, 8, 8))
    assert right.foretold.balance <= right.most_foretold


def test_a_member_that_ranks_candidates_costs_a_whole_tree_until_its_shape_was_seen() -> None:
    prices, arm = Prices(DEAR), Arm("tree 2", 1, Direct(2, 12), is_listener=True)
    assert prices.of(arm) == prices.seconds(12)
    prices.chains.add(1)
    assert prices.of(arm) == prices.seconds(2)


def test_the_text_is_no_credit_for_a_member_that_reads_more_than_text(target: Any) -> None:
    policy = Switch(controller="auto", lengths=(2,), nodes=4)
    state = Team(MEMBERS, target.spec).open(Space(1, 16, 8, torch.device("cpu"), torch.float32))
    policy.rests(state, RoundView((0,), *[torch.zeros(1)] * 3, ([1, 2],)))
    kinds = {arm.name: (arm.is_copy, arm.is_listener) for arm in policy.arms}
    assert kinds == {
        OFF: (False, False),
        "prompt-lookup 2": (True, False),
        "token-recycling 2": (False, True),
    }
    assert {arm.member for arm in policy.control.copies} == {0}


STEPWISE = (Arm(OFF), *(Arm(f"model {k}", 0, Chain(length=k), True) for k in (2, 4)))


def played(auto: Auto, rounds: int, matched: int, draft: float = 0.0) -> tuple[float, float]:
    """The share of rounds in which a stepwise member drafted, and what it lost in plain rounds; it
    is right `matched` times, at `draft` plain rounds a token."""
    drafted, lost = 0, 0.0
    for _ in range(rounds):
        index = auto.order([0])[0]
        arm = STEPWISE[index]
        hits, verify = min(matched, arm.length), 1.0 + 0.1 * arm.length
        auto.prices.observe(arm.length, verify)
        if arm.member is not None:
            auto.prices.drafted(0, arm.length, draft * arm.length)
            auto.scored(Score(0, hits, min(hits + 1, arm.length), 0, arm.length))
        auto.reward(index, hits + 1.0, verify + draft * arm.length)
        drafted += arm.member is not None
        lost += verify + draft * arm.length - (hits + 1.0)
    return drafted / rounds, lost


def of_a_model() -> Auto:
    auto = Auto()
    auto.open(STEPWISE, Prices(DEAR))
    return auto


def test_a_member_that_drafts_step_by_step_is_judged_by_what_it_plays() -> None:
    assert played(of_a_model(), 200, matched=3)[0] > 0.9, "nothing else would tell that it is good"
    share, lost = played(of_a_model(), 1000, matched=0)
    assert 0.0 < share < 0.1
    assert lost < 2.0 + 0.01 * 1000 + 1.0
    dear = played(of_a_model(), 200, matched=1, draft=0.5)
    cheap = played(of_a_model(), 200, matched=1, draft=0.05)
    assert dear[0] < 0.1 < 0.9 < cheap[0], "what its drafts cost is a part of the price"


def test_a_model_that_was_wrong_is_tried_again() -> None:
    auto = of_a_model()
    played(auto, 600, matched=0)
    assert played(auto, 600, matched=3)[0] > 0.3


def test_survival_counts_only_depths_that_were_tested() -> None:
    kept = Survival(prior=0.5, weight=0.0, memory=1.0)
    for matched, known in ((2, 3), (0, 1), (1, 2), (3, 3)):
        kept.add(matched, known)
    assert kept.tested == [4.0, 3.0, 2.0]
    assert kept.survived == [3.0, 2.0, 1.0]
    assert kept.expected_up_to(3)[3] == pytest.approx(3 / 4 + 2 / 4 + 1 / 4)


def test_the_expected_length_is_right_for_a_coin_of_known_bias() -> None:
    coins, kept = random.Random(1), Survival(prior=0.1, memory=1.0)
    for _ in range(4000):
        matched = 0
        while matched < 6 and coins.random() < 0.7:
            matched += 1
        kept.add(matched, min(matched + 1, 6))
    assert kept.expected_up_to(4)[4] == pytest.approx(sum(0.7**d for d in range(1, 5)), abs=0.06)


def test_shadows_are_scored_as_the_text_grows() -> None:
    text = [1, 2, 3]
    shadows = Shadows()
    tree = chain_tree(torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool), NodeKind.POINT)
    for _ in range(2):
        shadows.add(0, tree, [text], [3])
    assert list(shadows.ripe()) == []
    text += [4, 5]
    assert list(shadows.ripe()) == [], "agrees so far, not decided"
    text.append(9)
    assert list(shadows.ripe()) == [Score(0, 2, 3, 3, 3)] * 2
    assert shadows.waiting == []
    shadows.add(1, tree, [text], [0])
    text += [4, 5, 6]
    assert list(shadows.ripe()) == [Score(1, 3, 3, 0, 3)], "all agreed: censored"


def test_costs_of_a_team_are_those_of_verification(target: Any) -> None:
    policy = Switch(controller="auto", length=4, nodes=6)
    costs = measure_costs(target, Team(MEMBERS, target.spec), policy, [[1, 2, 3]], rounds=8)
    assert {0, 1, 2, 4, 6} <= set(costs.verify)
    assert all(0 < costs.round_seconds(k) < 10 for k in costs.verify)


def test_being_off_costs_little_host_work_per_round() -> None:
    """Thread time of choosing and of the look at the newest token, resting: tens of microseconds at
    the very most, where a forward of the smallest target takes milliseconds."""
    auto, matches = opened(), Matches()
    coins, text = random.Random(0), [0]
    for _ in range(200):
        text.append(coins.randrange(5000))
        auto.order(matches.contexts([0], [text]))
    auto.listened, auto.deaf = 0, 10**6
    began = time.thread_time()
    for _ in range(2000):
        text.append(coins.randrange(5000))
        auto.order(matches.contexts([0], [text]))
    assert (time.thread_time() - began) / 2000 < 50e-6


def test_repeats_are_compared_in_every_context() -> None:
    text = [*range(10, 22), 5]
    matches = Matches()
    assert matches.contexts([0], [text]) == [0]
    for token in (10, 11, 12, 13, 99):
        text.append(token)
        matches.contexts([0], [text])
    assert list(matches.repeats()) == [Repeat(1, 3, 4), Repeat(2, 2, 3), Repeat(3, 0, 1)]
    assert list(matches.repeats()) == []
    for token in (*range(10, 22), 6, *range(10, 22)):
        text.append(token)
        matches.contexts([0], [text])
    assert Repeat(1, 8, 8) in list(matches.repeats()), "at most eight tokens are compared"
    matches = Matches()
    matches.contexts([0], [[1, 2, 1, 3]])
    assert list(matches.repeats()) == [Repeat(1, 0, 1, is_prompt=True)]


def test_views_of_other_texts_in_the_same_slot_begin_anew() -> None:
    matches = Matches()
    view = RoundView((0,), torch.zeros(1), torch.zeros(1), torch.zeros(1), ([1, 2, 1, 2],))
    assert matches.contexts(view.slots, view.tokens) == [2]
    assert matches.contexts((0,), ([1, 2],)) == [0]


def test_what_rests_costs_its_drafter_nothing(target: Any, monkeypatch: Any) -> None:
    """Neither the target's top-k nor a call of a member; what was missed is read before a draft."""
    calls = {"told": 0, "ranked": 0, "grown": 0}

    def counting(name: str, inner: Any, size: Any = lambda given: 1) -> Any:
        def counted(*given: Any) -> Any:
            calls[name] += size(given)
            return inner(*given)

        return counted

    told = counting("told", TokenRecyclingState.observe, lambda given: len(given[1].emitted[0]))
    monkeypatch.setattr(TokenRecyclingState, "observe", told)
    monkeypatch.setattr(Switch, "grow", counting("grown", Switch.grow))
    for module in (lazy_drafter, commit):
        monkeypatch.setattr(module, "ranked", counting("ranked", lazy_drafter.ranked))
    coins = random.Random(0)
    prompts = [[coins.randrange(96) for _ in range(24)] for _ in range(2)]
    made = run(target, prompts, Sampling(temperature=4.0, max_new_tokens=150, ignore_eos=True))
    assert made.stats.rounds > 250
    assert calls["grown"] < 0.15 * made.stats.rounds
    assert calls["told"] < 0.4 * made.stats.tokens
    assert calls["ranked"] < 0.15 * made.stats.rounds


def test_who_cannot_afford_a_look_rests() -> None:
    auto = opened()
    auto.order([0])
    assert auto.looks()
    auto.lost(1.0)  # as dear as a plain round
    auto.order([0])
    assert not auto.looks()
    assert auto.is_resting
    assert not auto.is_listening


FAST = CostTable(dict.fromkeys((0, 16), 0.0), {0: 1e-3, 16: 2.6e-3}, "", "", 1)


def test_nobody_listens_before_a_look_can_be_afforded() -> None:
    """A look takes half a plain round there, of which the account gains 1 / 400 a round."""
    auto, listened, rounds = Auto(), [], 0
    auto.open(ARMS, Prices(FAST))
    while rounds < 210:
        auto.order([0])
        rounds += 1
        listened += [rounds] if auto.is_listening else []
        if auto.off_for:
            auto.rested(auto.off_for)
            rounds += auto.off_for
    assert min(listened) in range(199, 203)


def test_a_rest_ends_where_an_arm_is_worth_its_price_and_no_sooner() -> None:
    auto = opened()
    auto.deaf = 60
    assert ARMS[auto.order([0])[0]].is_off
    assert auto.off_for > 40
    assert not auto.wakes([0])
    assert not auto.wakes([1]), "may be right, and is not worth it"
    assert auto.wakes([4])
    for _ in range(3):
        auto.repeated(Repeat(1, 8, 8))
    assert auto.wakes([1]), "the text has gone on as it had before"


def test_the_text_is_looked_at_more_often_once_copying_would_have_gained() -> None:
    auto = opened()
    assert ARMS[auto.order([0])[0]].is_off
    assert auto.glance == SELDOM * GLANCE
    for _ in range(3):
        auto.repeated(Repeat(4, 8, 8))
    assert ARMS[auto.order([0])[0]].is_off
    assert auto.glance == GLANCE


def test_reading_what_was_missed_is_a_part_of_the_price() -> None:
    auto = opened()
    auto.deaf = 60
    assert not ARMS[auto.order([4])[0]].is_off
    auto.prices.read, auto.prices.missed = 0.05, 100  # five plain rounds
    assert ARMS[auto.order([4])[0]].is_off, "the account cannot bear it"
    auto.account.balance = 6.0
    assert not ARMS[auto.order([4])[0]].is_off, "it pays in the rounds to come"
    auto.prices.woke(2.0)
    assert auto.prices.read == pytest.approx(0.5 * (0.05 + 0.02))


def test_a_model_is_tried_though_it_has_a_prompt_to_read() -> None:
    """What it reads serves every round to come; the rounds played tell what it is worth."""
    auto = Auto()
    auto.open(STEPWISE, Prices(DEAR, read=0.05, missed=400))
    assert STEPWISE[auto.order([0])[0]].is_stepwise
    copy = opened()
    copy.prices.read, copy.prices.missed = 0.05, 400
    assert ARMS[copy.order([4])[0]].is_off


COPIES = [5, 6, 7, 8, 9, 10, 5, 6, 7, 8]
OTHER = [3, 3, 4, 3, 3, 4, 3]


@pytest.mark.parametrize("prompts", [[COPIES], [COPIES, OTHER]])
def test_what_was_missed_is_what_would_have_to_be_read(target: Any, prompts: Any) -> None:
    """In every round that is asked, after drafts, looks and rests."""
    told, true, engines = [], [], []
    rests, init = Switch.rests, Engine.__init__

    def told_rests(self: Switch, state: Any, view: RoundView) -> bool:
        told.append(view.missed)
        true.append(sum(map(engines[-1].drafting.backlog, engines[-1].rows)))
        return rests(self, state, view)

    def kept_init(self: Engine, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        engines.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Switch, "rests", told_rests)
        patch.setattr(Engine, "__init__", kept_init)
        sampling, drafted = Sampling(max_new_tokens=60, ignore_eos=True), 0
        for _ in range(5):  # whether it drafts at all, measured times decide
            for each in (told, true, engines):
                each.clear()
            policy = equip(Switch(controller="auto", lengths=(1, 2, 4), nodes=6), DEAR).policy
            team = Team(MEMBERS, target.spec)
            made = generate(
                target, prompts, drafter=team, sampling=sampling, policy=policy, batch=len(prompts)
            )
            drafted = made.stats.drafted
            if drafted:
                break
    assert drafted > 0
    assert told == true
    assert told[0] == sum(map(len, prompts)), "nothing is read before the first draft"
    assert min(told) == 0


def test_rows_without_room_are_nobodys_draft(target: Any) -> None:
    """A request of one token, and one that wants no drafts, behind rounds that drafted."""
    policy = equip(Switch(controller="auto", lengths=(1, 2, 4), nodes=6), DEAR).policy
    engine = Engine(target, Team(MEMBERS, target.spec), policy, num_slots=2, prefill_chunk=4)
    engine.open(80)
    long, short = Sampling(max_new_tokens=40, ignore_eos=True), Sampling(max_new_tokens=1)
    for index, request in enumerate(
        [
            Request(tuple(COPIES), long, conversation="a"),
            Request((1, 2, 3, 4), short),
            Request((1, 2, 3, 4), long, drafts=False),
        ]
    ):
        engine.submit(index, request)
        while engine.is_busy:
            engine.step()
    arms = engine.policy.to_json()["arms"]  # type: ignore[attr-defined]
    assert sum(arm["rounds"] for name, arm in arms.items() if name != OFF) > 0
    assert arms[OFF]["rounds"] >= 40


@pytest.mark.parametrize("is_known_first", [True, False])
def test_members_of_the_text_alone_are_shown_what_was_heard_and_nothing_else(
    target: Any, is_known_first: bool
) -> None:
    """They read the text themselves; who lives on the top-k learns nothing of other rounds."""
    shown: list[int] = []
    original = PolicyDrafter.catch_up

    def catch_up(self: PolicyDrafter, missed: Any) -> None:
        assert missed.topk_BTC is not None
        shown.append(sum(map(len, missed.emitted)))
        original(self, missed)

    class Late(Cascade):
        """Listens, or not, for ten rounds, then the opposite for ten, then drafts."""

        count = 0

        def order(self, contexts: Any) -> Any:
            self.count += 1
            self.is_listening = is_known_first == (self.count <= 10)
            return [self.off] if self.count <= 20 else super().order(contexts)

    team, sampling = Team(MEMBERS, target.spec), Sampling(max_new_tokens=40, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyDrafter, "catch_up", catch_up)
        patch.setattr("specctl.runtime.policies.switch.CONTROLLERS", {"cascade": Late})
        policy = Switch(controller="cascade", lengths=(2,), nodes=4)
        prompts = [COPIES, OTHER]
        generate(target, prompts, drafter=team, sampling=sampling, policy=policy, batch=2)
    assert sum(shown) in range(20, 25), "ten rounds of two rows, and the first of a text"
    space = Space(1, 64, 8, target.device, target.dtype)
    assert Team(MEMBERS, target.spec).open(space).ignores_text
    own = Team.of([SmallLm(SmallLmOptions(layers=1, width=16), target.spec)])
    assert not own.open(space).ignores_text


@pytest.mark.parametrize("prompt", [[1, 2, 3], [i % 90 for i in range(60)]])
def test_the_prices_of_a_team_say_what_reading_costs_it(
    target: Any, monkeypatch: Any, prompt: list[int]
) -> None:
    """By the team's own members, and not by the drafter that times verification; a position of a
    short prompt is no dearer."""
    original, slow, heard = TokenRecyclingState.start, 0.05, []

    def start(self: TokenRecyclingState, *given: Any) -> None:
        time.sleep(slow)
        original(self, *given)

    monkeypatch.setattr(TokenRecyclingState, "start", start)
    monkeypatch.setattr(TokenRecyclingState, "observe", heard.append)
    policy, length = Switch(controller="auto"), min(64, target.spec.max_positions // 2)
    costs = measure_costs(target, Team(MEMBERS, target.spec), policy, [prompt], rounds=8)
    assert costs.read == pytest.approx(slow / length, rel=0.2)
    assert not heard, "auto drafts before it has listened"


def test_reading_a_little_says_little_of_reading_much() -> None:
    prices = Prices(DEAR, read=1e-4, missed=2)
    prices.woke(3.2e-3)
    assert prices.read == pytest.approx(1e-4), "as long as 32 positions take"
    assert prices.wake == pytest.approx(2e-4)
