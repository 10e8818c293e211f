"""No winner is named from noise."""

from __future__ import annotations

import pytest

from specctl.cli.commands.bench import _next
from specctl.cli.commands.quickstart_text import Pair, verdict
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.runtime.generate import Generated
from specctl.runtime.measure.bench import _rows
from specctl.runtime.measure.bench_report import BenchReport
from specctl.runtime.measure.doubt import counted_shares, doubts
from specctl.runtime.measure.stats import Stats
from specctl.runtime.measure.timed import Timed
from specctl.runtime.sampling.sampling import Sampling


def test_a_speed_up_above_tau_few_tokens_and_runs_on_both_sides_are_doubtful() -> None:
    assert doubts(1.5, 2.0, 1000, (1.4, 1.5, 1.6)) == ()
    assert doubts(1.0, 1.0, 1000, (0.98, 1.0, 1.03)) == ()  # no gain is a finding
    assert "more than 1.30 tokens a pass" in doubts(1.5, 1.3, 1000)[0]
    assert doubts(1.5, 2.0, 9) == ("only 9 tokens were timed",)
    assert doubts(1.5, 2.0, 1000, (0.7, 1.5, 1.9)) == ("single runs lie between 0.70 and 1.90",)
    assert doubts(1.5, None, 1000) == ()


def test_a_share_of_few_counts_is_written_with_its_count() -> None:
    assert counted_shares((30, 3), (40, 3)) == ["0.75", "1.00 (of 3)"]
    stats = Stats(20, 60, 33, 53, (30, 3), (40, 3), 1.0, 0.1, 0.1, 0.8, "lossless", 0.0)
    assert "accepted per position 0.75 1.00 (of 3)" in stats.lines()[0]
    assert stats.well_counted == (0.75,)


def report(*seconds: float, tokens: int = 512, tau: float = 2.0) -> BenchReport:
    """Plain runs of one second, and a drafter's runs of these."""
    ids = ((1,) * tokens,)
    runs = {
        "plain": [{"": Timed(tokens, 1.0, ids, 1.0)}] * len(seconds),
        "copy": [{"": Timed(tokens, one, ids, tau)} for one in seconds],
    }
    rows = tuple(_rows(runs, Sampling(), dict.fromkeys(runs)))
    return BenchReport(rows, "tiny", None, "float32", "cpu", 1, 1, 4, 64, len(seconds))


@pytest.mark.parametrize(
    ("found", "following"),
    [
        (report(0.5, 0.6, 0.7), "specctl generate --target tiny --draft copy"),
        (report(1.0, 1.0, 0.99), "specctl train-draft"),
        (report(1.4, 1.5, 1.3), "specctl train-draft"),
        (report(0.5, 0.6, 0.7, tokens=8), "--num-prompts 12 --max-new-tokens 64 --repeats 5"),
        (report(0.5, 0.6, 0.7, tau=1.2), "specctl bench --target tiny copy --num-prompts"),
        (report(0.5, 0.6, 1.9), "specctl bench --target tiny copy --num-prompts"),
    ],
    ids=["faster", "no gain", "slower", "few tokens", "above tau", "noise"],
)
def test_bench_names_a_winner_or_asks_for_more(found: BenchReport, following: str) -> None:
    line = _next(found, ["copy"], TargetChoice("tiny"), DraftingFlags())
    assert following in line
    is_doubtful = any("doubtful: copy" in note for note in found.table().notes)
    assert is_doubtful == ("bench" in line)
    assert [row["doubts"] != [] for row in found.to_json()["rows"]] == [False, is_doubtful]


def pair(speedup: float, tau: float = 2.0, tokens: int = 500) -> Pair:
    def run(seconds: float, rounds: int) -> Generated:
        stats = Stats(rounds, 0, 0, tokens, (), (), seconds, 0.0, 0.0, seconds, "lossless", 0.0)
        return Generated((), stats)

    return Pair("greedy", "tiny", run(1.0, tokens), run(1 / speedup, int(tokens / tau)), 0.0, True)


def test_the_verdict_of_the_quickstart_says_what_was_found() -> None:
    assert "1.6x faster, identical text" in verdict([pair(1.6)])
    assert "no gain (1.01x), drafting costs what it saves" in verdict([pair(1.01)])
    assert "slower (0.68x), drafting costs more than it saves" in verdict([pair(0.68)])
    assert "no finding yet" in verdict([pair(1.6, tau=1.1)])
    assert "no finding yet" in verdict([pair(1.6, tokens=12)])
