"""Measures and cuts: every word has one definition."""

from __future__ import annotations

import pytest

from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.stats import (
    RowStats,
    add_counts,
    expected_tau,
    memory_bound_speedup,
    repetition_rate,
    shares,
)


def test_a_round_counts_accepted_without_the_bonus():
    stats = RowStats()
    stats.count(drafted=4, accepted=2, emitted=3, is_rejected=True)
    stats.count(drafted=4, accepted=4, emitted=5, is_rejected=False)
    stats.count(drafted=0, accepted=0, emitted=1, is_rejected=False)
    assert (stats.rounds, stats.accepted, stats.tokens) == (3, 6, 9)
    assert stats.accepted_at == [2, 2, 1, 1]
    assert stats.tested_at == [2, 2, 2, 1]
    assert shares(stats.accepted_at, stats.tested_at) == (1.0, 1.0, 0.5, 1.0)


def test_counts_of_different_lengths_add_up():
    assert add_counts([[1, 2], [3], [0, 0, 5]]) == (4, 2, 5)


def test_repetition_rate_is_zero_for_fresh_text_and_high_for_a_loop():
    assert repetition_rate([list(range(40))]) == 0.0
    assert repetition_rate([[1, 2] * 20]) > 0.9


@pytest.mark.parametrize(("alpha", "length", "tau"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5)])
def test_expected_tau_follows_the_closed_form(alpha, length, tau):
    assert expected_tau(alpha, length) == pytest.approx(tau)


def test_mbsu_tends_to_tau_for_a_free_drafter():
    assert memory_bound_speedup(3.0, 5, 0.0) == 3.0
    assert memory_bound_speedup(3.0, 5, 0.1) == pytest.approx(2.0)


def test_the_best_length_is_zero_where_drafting_never_pays():
    table = CostTable({0: 0.0, 2: 2.0}, {0: 1.0, 2: 2.0}, "cpu", "float32", 1)
    assert table.best_length(0.9) == 0
    cheap = CostTable({0: 0.0, 2: 0.1}, {0: 1.0, 2: 1.0}, "cpu", "float32", 1)
    assert cheap.best_length(0.9) == 2
    assert cheap.speedup(1.0, 2) == pytest.approx(3 / 1.1)
