"""Batch policies: tables, common lengths, measured costs, and what all have in common."""

from itertools import product

import numpy as np
import pytest

from specctl.core.drafter import RoundSeconds
from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.batching import Batching, RowView, make_batching
from specctl.runtime.batching.fixed import Bass, Fixed
from specctl.runtime.batching.goodput import Goodput
from specctl.runtime.batching.history import History
from specctl.runtime.batching.table import BySize
from specctl.runtime.batching.tetris import Tetris
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost import measure_batch_costs
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.loads import LONGEST, SIZES, costs_of, outcome_of, seconds_of
from specctl_testing.runtime.pairs import disturbed

DIRECT = {"policy": "direct", "length": 3}


@pytest.mark.parametrize("users", SIZES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Goodput(costs_of(SIZES), LONGEST),
        lambda: BySize({1: 4, 8: 0}),
        lambda: Tetris(32),
        lambda: Bass(),
        lambda: Fixed(0),
        lambda: Fixed(3),
    ],
)
def test_whether_rows_would_draft_is_told_without_changing_anything(make, users):
    asked, silent = make(), make()
    rows = [RowView(index, 40) for index in range(users)]
    told = [asked.would_draft(rows) for _ in range(40)]
    assert asked.lengths(rows) == silent.lengths(rows), "forty questions left no trace"
    assert told == [any(silent.lengths(rows))] * 40


def test_predicted_times_are_those_of_a_linear_device():
    def linear(rows, length):
        return 3.0 + 0.2 * rows + 0.5 * length + 0.05 * rows * length

    costs = costs_of((1, 4, 16, 64), (0, 2, 8), linear)
    for rows, length in product((1, 2, 8, 16, 40, 100), range(11)):
        assert costs.seconds(rows, length) == pytest.approx(linear(rows, length))


@pytest.mark.parametrize("name", ["small-lm", "prompt-lookup"])
def test_a_pair_is_measured_at_every_size_up_to_the_most_rows(make_target, name):
    target = make_target(num_layers=2)
    if name == "small-lm":
        drafter, policy = SmallLm.from_lm(target.lm, target.spec), make_policy({"length": 3})
    else:
        one = family(name)
        drafter, policy = one.build(one.options(), target.spec, None), make_policy(DIRECT)
    costs = measure_batch_costs(target, drafter, policy, 3, rounds=8)
    assert sorted(costs.tables) == [1, 2, 3]
    assert all({0, 1, 2, 3} == set(table.verify) for table in costs.tables.values())
    assert all(0 < costs.seconds(rows, k) < 60 for rows in (1, 2, 3, 5) for k in range(4))


def test_bass_rises_after_a_whole_draft_and_falls_faster_and_faster():
    bass, rows = Bass(most=32), [RowView(0, 100), RowView(1, 100)]
    seen = []
    for share in (1.0, 1.0, 0.0, 0.0, 0.0, 1.0):
        length = bass.lengths(rows)[0]
        seen.append(length)
        bass.observe(outcome_of((0, int(share * length))), RoundSeconds(0.0, 1.0, 0.0))
    assert seen == [7, 9, 11, 9, 7, 5]
    assert bass.length == 7


def test_bass_never_falls_below_what_the_best_row_accepted():
    bass, rows = Bass(), [RowView(0, 100), RowView(1, 100)]
    bass.lengths(rows)
    bass.observe(outcome_of((6, 0)), RoundSeconds(0.0, 1.0, 0.0))
    assert bass.length == 6


def test_a_table_is_read_by_batch_size():
    table = BySize({1: 6, 8: 3, 32: 0})
    found = [max(table.lengths([RowView(i, 100) for i in range(n)])) for n in (1, 7, 8, 31, 32, 64)]
    assert found == [6, 6, 3, 3, 0, 0]


def test_a_measured_table_holds_the_best_length_of_each_size():
    found = BySize.measured(costs_of(SIZES), 0.7, LONGEST).table
    for rows, length in found.items():
        rates = [expected_tau(0.7, k) / seconds_of(rows, k) for k in range(LONGEST + 1)]
        assert length == int(np.argmax(rates))
    assert found[1] > found[64] == 0


def test_a_new_row_is_taken_for_one_like_the_others_and_a_gone_one_is_forgotten():
    history, rows = History(first=0.5), [RowView(0, 9), RowView(1, 9)]
    assert history.alpha(7) == pytest.approx(0.5)
    for _ in range(200):
        history.ask(rows, (4, 4))
        history.observe(outcome_of((4, 3)))
    assert history.alpha(0) > 0.97 > history.alpha(1) > 0.7
    assert history.alpha(1) < history.alpha(2) < history.alpha(0)
    history.ask([RowView(1, 9)], (4,))
    history.observe(outcome_of((0,)))
    assert history.alpha(0) == pytest.approx(history.alpha(2))


def test_a_cut_round_and_a_silent_one_are_told_apart():
    history, rows = History(), [RowView(0, 9)]
    before = history.alpha(0)
    history.ask(rows, (4,))
    history.observe(outcome_of((0,), ("eos",)))
    assert history.alpha(0) == before
    history.ask(rows, (4,))
    history.observe(outcome_of((0,)))
    assert history.alpha(0) < before


@pytest.mark.parametrize("name", ["fixed", "goodput", "tetris", "table", "bass"])
def test_every_policy_keeps_to_room_and_depth_and_reports_itself(name):
    batching = make_batching(name, 5, costs_of((1, 4, 16)))
    assert isinstance(batching, Batching)
    for _ in range(40):
        rows = [RowView(0, 0), RowView(1, 2), RowView(2, 50), RowView(3, 50, speculates=False)]
        lengths = batching.lengths(rows)
        assert lengths[0] == lengths[3] == 0
        assert 0 <= lengths[1] <= 2
        assert 0 <= lengths[2] <= 5
        batching.observe(outcome_of(lengths), RoundSeconds(0.1, 1.0, 0.0))
    assert batching.lengths([]) == ()
    assert batching.to_json()["batching"] == name


def test_settings_that_would_be_ignored_are_refused():
    with pytest.raises(RecipeError, match="no capacity"):
        make_batching("fixed", 5, capacity=3)
    with pytest.raises(RecipeError, match="goodput"):
        make_batching("godput", 5)
    with pytest.raises(RecipeError, match="measured costs"):
        make_batching("goodput", 5)
    with pytest.raises(RecipeError, match="batch sizes"):
        make_batching("table", 5, table={0: 3})
    assert make_batching("table", 5, table={1: 9}).to_json()["table"] == {1: 5}


@pytest.mark.parametrize("name", ["goodput", "tetris", "table", "bass"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_batch_policy_changes_a_text(make_target, name, temperature):
    """Rows join and leave, and lengths differ; a seeded text is that of plain decoding."""
    target = make_target(num_layers=2)
    drafter, policy = disturbed(make_target, target, num_layers=2), make_policy({"length": 5})
    requests = [
        Request((3 + i, 1, 4), Sampling(temperature, seed=i, max_new_tokens=9 + 5 * i))
        for i in range(6)
    ]
    batching = make_batching(name, 5, costs_of((1, 2, 4)))
    engine = Engine(target, drafter, policy, "target-only", num_slots=3, batching=batching)
    found = engine.run(requests)
    assert sum(one.stats.accepted for one in found) > 0
    plain = Engine(target, rule="target-only", num_slots=3).run(requests)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
