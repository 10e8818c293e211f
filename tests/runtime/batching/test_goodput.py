"""Goodput against a simulated server: as good as the best fixed length, and honest about it."""

import numpy as np
import pytest

from specctl.core.drafter import RoundSeconds
from specctl.runtime.batching import RowView
from specctl.runtime.batching.fixed import Fixed
from specctl.runtime.batching.goodput import Goodput
from specctl_testing.runtime.loads import LONGEST, SIZES, Load, costs_of, outcome_of, seconds_of


def test_rows_that_have_missed_much_are_not_expected_to_draft():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    found = [goodput.would_draft([RowView(0, 40, True, missed)]) for missed in (0, 10, 100_000)]
    assert found == [True, True, False]


# Every number of users with two kinds of drafts, and every kind with two numbers; the others are
# proofs.
LOADS = [
    pytest.param(Load(users, alphas), marks=[pytest.mark.proof] if (i + j) % 2 else [])
    for i, users in enumerate((1, 4, 16, 40))
    for j, alphas in enumerate(((0.9,), (0.5,), (0.15,), (0.95, 0.3)))
]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.users}-{load.alphas}")
def test_goodput_is_as_good_as_the_best_fixed_length_under_every_load(load):
    rounds = max(500, 2500 // load.users)  # few rows are noisy
    best = max(load.run(Fixed(k), rounds)[0] for k in range(LONGEST + 1))
    found, _ = load.run(Goodput(costs_of(SIZES), LONGEST), rounds)
    assert found >= 0.98 * best


def test_goodput_drafts_less_the_more_rows_there_are_and_ends_at_none():
    means = []
    for users in (1, 8, 16, 64):
        _, asked = Load(users, (0.6,)).run(Goodput(costs_of(SIZES), LONGEST), rounds=400)
        means.append(np.mean([max(lengths) for lengths in asked[100:]]))
    assert means == sorted(means, reverse=True)
    assert means[0] > 2
    assert means[-1] < 0.05


def test_speculation_comes_back_when_acceptance_does():
    goodput = Goodput(costs_of(SIZES), LONGEST, probe_last=32)
    _, asked = Load(24, (0.05,), text=10_000).run(goodput, rounds=400)
    assert np.mean([max(lengths) == 0 for lengths in asked[100:]]) > 0.9
    _, asked = Load(24, (0.9,), text=10_000).run(goodput, rounds=600)
    assert np.mean([max(lengths) > 0 for lengths in asked[400:]]) > 0.95


def test_a_falling_load_is_noticed_at_once():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    Load(64, (0.8,), text=10_000).run(goodput, rounds=50)
    assert max(goodput.lengths([RowView(i, 100) for i in range(64)])) == 0
    assert max(goodput.lengths([RowView(i, 100) for i in range(2)])) > 2


def test_what_a_drafter_must_read_first_is_weighed_against_what_it_will_bring():
    costs, few = costs_of(SIZES), [RowView(i, 100) for i in range(2)]

    def depth(missed, seconds_each, room=100):
        goodput = Goodput(costs, LONGEST)
        goodput.lengths([RowView(9, 100, missed=10)])
        goodput.observe(outcome_of([1]), RoundSeconds(0.0, 1.0, 0.0, wake=10 * seconds_each))
        return max(goodput.lengths([RowView(i, room, missed=missed) for i in range(2)]))

    awake = max(Goodput(costs, LONGEST).lengths(few))
    assert depth(500, 1e-6) == awake > 0
    assert depth(500, 1.0) == 0
    assert depth(500, 0.05) > depth(500, 0.05, room=1), "it is paid for in the rounds that are left"


def test_a_probe_wakes_those_who_have_missed_least():
    goodput = Goodput(costs_of(SIZES), LONGEST, probe_first=4)
    rows = [RowView(i, 100, missed=10 * i + 1) for i in range(64)]
    asked = [goodput.lengths(rows) for _ in range(4)]
    assert [sum(lengths) for lengths in asked[:3]] == [0, 0, 0]
    awake = sum(asked[3])
    assert 4 <= awake < 16
    assert asked[3] == (1,) * awake + (0,) * (64 - awake)


def test_a_policy_says_what_goodput_it_expected_and_what_came():
    """On the device that its table was measured on, with the acceptance that it has learned."""
    goodput = Goodput(costs_of(SIZES), LONGEST)
    assert goodput.to_json()["goodput"] is None
    rate, _ = Load(8, (0.7,)).run(goodput, rounds=600, told=1.0)
    assert goodput.to_json()["goodput"]["predicted"] == pytest.approx(rate, rel=0.05)
    assert goodput.to_json()["time_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("slower", [0.5, 1.5, 4.0])
def test_a_device_that_others_use_is_slower_than_its_table_and_that_is_learned(slower):
    goodput = Goodput(costs_of(SIZES), LONGEST)
    rate, asked = Load(8, (0.7,)).run(goodput, rounds=600, told=slower)
    found = goodput.to_json()["goodput"]
    assert found["predicted"] == pytest.approx(rate / slower, rel=0.05)
    assert found["measured_over_predicted"] == pytest.approx(1.0, rel=0.05)
    assert goodput.to_json()["time_ratio"] == pytest.approx(slower)
    same = Load(8, (0.7,)).run(Goodput(costs_of(SIZES), LONGEST), rounds=600, told=1.0)[1]
    assert asked == same, "what slows every round alike changes no length"


def test_rows_draft_no_deeper_than_is_of_use_to_them():
    goodput = Goodput(costs_of(SIZES), LONGEST)
    Load(2, (0.95, 0.1), text=10_000).run(goodput, rounds=200)
    good, bad = goodput.lengths([RowView(0, 100), RowView(1, 100)])
    assert good > 4
    assert bad <= 2
    lengths = goodput.lengths([RowView(0, 1), RowView(1, 100, speculates=False)])
    assert lengths == (1, 0)


def test_the_report_says_how_far_measured_times_are_from_predicted_ones():
    goodput = Goodput(costs_of((1, 4)), LONGEST)
    for _ in range(200):
        rows = [RowView(0, 100), RowView(1, 100)]
        length = max(goodput.lengths(rows))
        spent = 1.25 * seconds_of(2, length)
        goodput.observe(outcome_of((1, 1)), RoundSeconds(0.25 * spent, 0.75 * spent, 0.0))
    assert goodput.to_json()["time_ratio"] == pytest.approx(1.25, abs=0.01)
