"""Where the time of a drafted round goes, in plain tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specctl.runtime.measure.round_cost import RoundCost, Spent
from specctl.runtime.measure.timed import Timed, joined

PLAIN = Spent(100, 100, 0, seconds=12.0, prefill=2.0, drafting=0.0, verifying=9.0)  # .1 s a token


def spent(verifying: float, drafting: float, tokens: int = 100) -> Spent:
    """50 rounds of four drafted tokens, one second of prompts and half a second of the rest."""
    whole = 1.0 + verifying + drafting + 0.5
    return Spent(50, tokens, 200, whole, 1.0, drafting, verifying)


def test_the_parts_are_in_plain_tokens_and_make_the_speedup() -> None:
    cost = RoundCost.of(spent(verifying=6.0, drafting=2.0), PLAIN)
    assert cost is not None
    assert (cost.verifying, cost.drafting, cost.rest) == pytest.approx((1.2, 0.4, 0.1))
    assert cost.speedup == pytest.approx((100 / 8.5) / (100 / 10))  # tokens/s behind the prompts
    assert cost.with_free_drafts == pytest.approx(2 / 1.3)
    assert cost.with_all_accepted == pytest.approx(5 / 1.7)
    assert "0.25 are" in cost.text()
    shown = cost.to_json()
    assert shown["verifying"] + shown["drafting"] + shown["rest"] == pytest.approx(shown["total"])
    assert RoundCost.of_json(shown) == cost
    assert [*cost.limits.values()] == pytest.approx([cost.speedup, 2 / 1.3, 2.0, 5 / 1.7])


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (spent(5.0, 0.5), "Acceptance holds it back"),
        (spent(5.0, 6.0), "Drafting holds it back"),
        (spent(14.0, 1.0), "The width of the pass holds it back"),
        (spent(6.0, 1.0, tokens=230), "Most of the cost beyond a plain token: the width"),
    ],
    ids=["acceptance", "drafting", "width", "pays"],
)
def test_what_holds_it_back_is_named(found: Spent, named: str) -> None:
    cost = RoundCost.of(found, PLAIN)
    assert cost is not None
    assert named in cost.text()


def test_nothing_is_said_where_parts_do_not_add_up() -> None:
    assert RoundCost.of(PLAIN, PLAIN) is None  # nothing was drafted
    assert RoundCost.of(None, PLAIN) is None
    in_parallel = Spent(50, 100, 200, seconds=5.0, prefill=1.0, drafting=3.0, verifying=3.0)
    assert RoundCost.of(in_parallel, PLAIN) is None


def test_a_tree_has_no_limit_of_all_its_tokens() -> None:
    """One path of it is accepted; a small share of its nodes is no sign of bad drafts."""
    cost = RoundCost.of(replace(spent(5.0, 0.5), in_chains=False), PLAIN)
    assert cost is not None
    assert cost.to_json()["speedup_if_all_were_accepted"] is None
    assert "if all were accepted" not in cost.text()
    assert "Acceptance" not in cost.text()


def test_runs_are_joined_part_by_part_or_not_at_all() -> None:
    one, other = spent(6.0, 2.0), spent(4.0, 1.0)
    runs = [Timed(each.tokens, each.seconds, (), spent=each) for each in (one, other)]
    whole = joined(runs).spent
    assert whole is not None
    assert (whole.rounds, whole.drafting, whole.verifying) == (100, 3.0, 10.0)
    assert joined([runs[0], Timed(3, 1.0, ())]).spent is None
