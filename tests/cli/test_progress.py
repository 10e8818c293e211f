"""Progress: sparse lines where there is no terminal, bars with rate and ETA where there is one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as RichConsole

from specctl.cli.app.console import Console
from specctl.cli.app.progress import PlainProgress, RichProgress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_seldom_and_tell_rate_and_eta() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    with progress.task("train", 100, "steps") as advance:
        for step in range(60):
            clock.now += 0.5
            advance(1, f"loss {step}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "train: 30/100 steps | 2 steps/s | eta 35s | loss 29"
    assert lines[-1] == "train: 60 steps in 30s | loss 59"


def test_a_quick_task_says_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, clock).task("load", 2, "files") as advance:
        clock.now += 0.5
        advance(2)
    assert stream.getvalue() == ""


def test_what_an_earlier_run_did_is_no_speed() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, clock).task("train", 1000, "steps") as advance:
        advance(900)
        for _ in range(20):
            clock.now += 1.0
            advance(1)
    assert "1 steps/s | eta 1m25s" in stream.getvalue().splitlines()[0]


def test_the_estimate_is_of_the_recent_pace_and_none_comes_before_there_is_one() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, clock).task("write", 480, "prompt") as advance:
        clock.now += 18.0  # compiles, loads
        advance(1, "5 tok/s")
        for _ in range(15):
            clock.now += 1.0
            advance(10)
        for _ in range(90):
            clock.now += 1.0
            advance(1)
        clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "write: 1/480 prompts | 5 tok/s"
    assert lines[1].startswith("write: 151/480 prompts | 10 prompts/s | eta 33s")
    assert lines[-2].startswith("write: 241/480 prompts | 1 prompts/s | eta 3m59s")
    assert lines[-1].startswith("write: 241 prompts in 2m04s")


def test_one_of_a_kind_is_no_plural() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, clock).task("compare", 1, "runs") as advance:
        clock.now += 3.0
        advance(1)
    assert stream.getvalue() == "compare: 1 run in 3s\n"


def test_bars_show_rate_eta_and_note_on_a_terminal() -> None:
    stream = io.StringIO()
    progress = RichProgress(RichConsole(file=stream, force_terminal=True, width=120))
    with progress.task("train", 10, "steps") as advance:
        advance(5, "tau 2.31")
        progress.print("[bold] is not markup")
        with progress.task("decode", 4, "prompts") as inner:
            inner(1)
    shown = stream.getvalue()
    for part in ("train", "decode", "5/10", "eta", "tau 2.31", "[bold] is not markup"):
        assert part in shown


def test_no_bars_without_a_terminal_or_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(Console(stderr=io.StringIO())._bars(), PlainProgress)
    assert isinstance(Console(stderr=Terminal())._bars(), RichProgress)
    monkeypatch.setenv("NO_COLOR", "1")
    assert isinstance(Console(stderr=Terminal())._bars(), PlainProgress)


def test_a_quiet_console_has_no_progress() -> None:
    stream = io.StringIO()
    console = Console(io.StringIO(), stream)
    console.configure(quiet=True)
    with console.task("train", 10, "steps") as advance:
        advance(10)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.2, "3s"),
        (75, "1m15s"),
        (3720, "1h02m"),
        (86_399, "23h59m"),
        (100_000, "1d03h"),
        (10_000_000, "115 days"),
        (52_235 * 3600, "2,176 days"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
