"""A cost table of a quiet machine, and then neighbours: what chooses by it falls back on what it
measures, so that drafting is never much slower than plain decoding. Clocks are simulated."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specctl.core.drafter import Outcome, RoundSeconds, RoundView
from specctl.core.tree import NodeKind, chain_tree, empty_tree
from specctl.runtime.batching import RowView
from specctl.runtime.batching.goodput import Goodput
from specctl.runtime.controllers.auto import Auto
from specctl.runtime.controllers.base import OFF, Arm, Prices, Score
from specctl.runtime.measure.cost_table import BatchCosts, CostTable
from specctl.runtime.measure.live_costs import Ratios
from specctl.runtime.policies.direct import Direct
from specctl.runtime.policies.length import LengthChooser

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
LEAST, ROUNDS = 0.97, 2500
NONE_B = torch.zeros(0, dtype=torch.long)
VIEW = RoundView((0,), NONE_B, NONE_B, NONE_B, ([],))
TREES = {0: empty_tree(1, torch.device("cpu"))} | {
    k: chain_tree(
        torch.zeros(1, k, dtype=torch.long), torch.ones(1, k, dtype=torch.bool), NodeKind.POINT
    )
    for k in range(1, LENGTHS[-1] + 1)
}


def outcome(depth: int, accepted: int) -> Outcome:
    return Outcome(
        VIEW, TREES[depth], NONE_B, (accepted,), NONE_B, ((0,) * (accepted + 1),), (None,)
    )


@dataclass(frozen=True)
class Load:
    """How many times longer than in the table plain rounds, drafting and wide forwards take."""

    plain: float = 1.0
    draft: float = 1.0
    wide: float = 1.0


QUIET = Load()
LOADS = {
    "quiet": (QUIET,),
    "slower throughout": (Load(2.0, 2.0, 2.0),),
    "dear drafter": (QUIET, Load(1.1, 3.0, 1.0)),
    "dear wide forwards": (QUIET, Load(1.0, 1.0, 3.0)),
    "both": (Load(1.2, 1.5, 2.0), Load(1.2, 3.0, 3.0)),
    "comes and goes": (QUIET, Load(1.3, 3.0, 2.5), QUIET, Load(1.1, 2.0, 1.5)),
    "table of a busy minute": (Load(0.5, 1.0, 1.0),),
}


@dataclass
class Machine:
    """Seconds of rounds under loads that change every `period` seconds, with jitter and, in one
    round of a hundred, a stall. A drafted token costs `step`, a fed one 0.04."""

    loads: tuple[Load, ...]
    step: float = 0.15
    period: float = 400.0
    jitter: float = 0.15
    seed: int = 0
    clock: float = 0.0
    plain_seconds: float = 1.0  # that a plain round would have taken instead of the newest one
    coins: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.coins = random.Random(self.seed)

    def table(self) -> CostTable:
        draft = {k: self.step * k for k in LENGTHS}
        return CostTable(draft, {k: 1.0 + 0.04 * k for k in LENGTHS}, "cpu", "float32", 1)

    @property
    def load(self) -> Load:
        return self.loads[int(self.clock / self.period) % len(self.loads)]

    def round(self, length: int) -> RoundSeconds:
        load, noise = self.load, self.coins.lognormvariate(0.0, self.jitter)
        noise *= 8.0 if self.coins.random() < 0.01 else 1.0
        self.plain_seconds = load.plain * noise
        verify = load.plain if length == 0 else load.wide * (1.0 + 0.04 * length)
        spent = RoundSeconds(load.draft * self.step * length * noise, verify * noise, 0.0)
        self.clock += spent.draft + spent.verify
        return spent


def accepted(coins: random.Random, alpha: float, length: int) -> int:
    found = 0
    while found < length and coins.random() < alpha:
        found += 1
    return found


def run(machine: Machine, chooser: Any, alphas: tuple[float, ...], rounds: int) -> float:
    """Speed over plain decoding on the same machine at the same times; `alphas` in turn."""
    coins, plain, began = random.Random(machine.seed + 1), 0.0, machine.clock
    for at in range(rounds):
        length = chooser.length(1)
        alpha = alphas[at * len(alphas) // rounds]
        found = accepted(coins, alpha, length)
        chooser.observe(outcome(length, found), machine.round(length))
        plain += (found + 1) * machine.plain_seconds
    return plain / (machine.clock - began)


QUALITIES = {"bad": (0.05,), "poor": (0.35,), "fair": (0.6,), "good": (0.85,), "mixed": (0.8, 0.1)}


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("load", LOADS)
def test_a_length_chooser_is_never_slower_than_097_of_plain(load: str, quality: str) -> None:
    machine = Machine(LOADS[load])
    speed = run(machine, LengthChooser(machine.table()), QUALITIES[quality], ROUNDS)
    assert speed >= LEAST


class InBatch:
    """Goodput asked as a length chooser is, for one row."""

    def __init__(self, costs: CostTable) -> None:
        self.goodput = Goodput(BatchCosts({1: costs}), LENGTHS[-1])

    def length(self, batch: int) -> int:
        return max(self.goodput.lengths([RowView(0, 100)]))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.goodput.observe(outcome, seconds)


@pytest.mark.parametrize(
    ("load", "quality"),
    [  # every load with two or three qualities of drafts, and the reverse; the others are proofs
        pytest.param(load, quality, marks=[pytest.mark.proof] if (i + j) % 2 else [])
        for i, load in enumerate(LOADS)
        for j, quality in enumerate(QUALITIES)
    ],
)
def test_goodput_is_never_slower_than_097_of_plain(load: str, quality: str) -> None:
    machine = Machine(LOADS[load])
    speed = run(machine, InBatch(machine.table()), QUALITIES[quality], ROUNDS)
    assert speed >= LEAST


ARMS = (Arm(OFF), *(Arm(f"copy {k}", 0, Direct(k, k)) for k in (1, 2, 4, 8)))


def run_auto(machine: Machine, alphas: tuple[float, ...], look: float) -> float:
    """The controller as the policy asks it; a look or a draft costs `look` seconds of a quiet
    machine, every fourth context is a repeated suffix, and drafts are as good as `alphas` say."""
    auto, prices = Auto(), Prices(machine.table())
    auto.open(ARMS, prices)
    coins, plain, began = random.Random(machine.seed + 1), 0.0, machine.clock
    for at in range(ROUNDS):
        context = 3 if at % 4 == 0 else 0
        alpha = alphas[at * len(alphas) // ROUNDS] * (1.0 if context else 0.2)
        index = auto.order([context])[0]
        length = ARMS[index].length
        found = accepted(coins, alpha, max(length, 8))
        would_be, found = found, min(found, length)
        if auto.looks() and index == auto.off:
            machine.clock += (spent := look * machine.load.draft)
            auto.lost(spent)
            auto.scored(Score(0, would_be, min(would_be + 1, 8), context, 8))
        seconds = machine.round(length)
        plain += (found + 1) * machine.plain_seconds
        prices.observe(length, seconds.draft + seconds.verify)
        auto.reward(index, found + 1, seconds.draft + seconds.verify)
        if length:
            auto.scored(Score(0, found, min(found + 1, length), context, length))
    return plain / (machine.clock - began)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("load", LOADS)
def test_auto_is_never_slower_than_097_of_plain(load: str, quality: str) -> None:
    machine = Machine(LOADS[load], step=0.01)
    assert run_auto(machine, QUALITIES[quality], look=0.1) >= LEAST


def test_what_pays_is_still_drafted_on_a_busy_machine() -> None:
    """Nobody is safe by never drafting: near the best fixed length of each."""
    for load, least in (("quiet", 1.9), ("dear drafter", 1.5), ("comes and goes", 1.3)):
        machine = Machine(LOADS[load])
        assert run(machine, LengthChooser(machine.table()), (0.85,), ROUNDS) > least, load


def test_a_drafter_that_became_good_is_drafted_again() -> None:
    machine = Machine((QUIET,))
    chooser = LengthChooser(machine.table())
    assert run(machine, chooser, (0.02,), 2000) >= LEAST
    assert run(machine, chooser, (0.9,), 2000) > 1.5


def test_plain_rounds_are_measured_seldom_and_at_once_when_drafts_change_their_price() -> None:
    ratios, plain = Ratios(), []
    for at in range(1200):
        if ratios.wants_plain(is_safe=True):
            plain.append(at)
            ratios.observe(0, 1.0)
        else:
            ratios.observe(4, 1.0 if at < 1000 else 2.0)
    assert len(plain) < 40
    assert any(1000 < at < 1010 for at in plain)
    assert ratios.of(4) == 2.0
    assert ratios.of(0) == 1.0
    assert Ratios().of(3) == 1.0, "nothing is known yet but the table"


def test_what_must_be_read_first_is_part_of_a_trial() -> None:
    costs = CostTable({0: 0.0, 4: 0.2}, {0: 1.0, 4: 1.0}, "cpu", "float32", 1, read=0.1)
    chooser = LengthChooser(costs)
    chooser.missed = 100
    assert chooser.length(1) == 0, "ten plain rounds for a first draft"
    chooser.missed = 1
    assert chooser.length(1) == 4


def test_a_rejected_draft_is_no_gain_on_however_slow_a_machine() -> None:
    machine = Machine((QUIET,))
    chooser = LengthChooser(machine.table())
    for _ in range(4):
        chooser.length(1)
        chooser.observe(outcome(0, 0), RoundSeconds(0.0, 5.0, 0.0))  # plain rounds of a slow moment
    before = chooser.account.balance
    chooser._asked = 4
    chooser.observe(outcome(4, 0), RoundSeconds(0.2, 1.0, 0.0))
    assert chooser.account.balance <= before


def test_a_round_whose_root_came_with_the_prompt_is_no_price() -> None:
    chooser = LengthChooser(Machine((QUIET,)).table())
    chooser.observe(outcome(0, 0), RoundSeconds(0.0, 1e-6, 0.0, is_free=True))
    assert 0 not in chooser.ratios.seen
