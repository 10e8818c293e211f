"""Training runs on fewer threads where other work makes more of them slower, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specctl.models.native import threads as native_threads
from specctl.models.torch_threads import CHOSEN
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.distributed.ranks import Ranks
from specctl.train.step.step_threads import StepThreads

ALONE = Ranks()


class Machine:
    """Two cores. A step takes 1.3 s on one thread; on two .8 s alone, 2.6 s beside a process that
    puts them off their cores hundreds of times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_busy: bool) -> None:
        self.now, self.preempted, self.is_busy, self.threads = 0.0, 0, is_busy, 2
        for name in CHOSEN:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self.set)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(native_threads, "preemptions", lambda: self.preempted)

    def set(self, count: int) -> None:
        self.threads = count

    def steps(self, steps: StepThreads, count: int) -> list[int]:
        """On how many threads each ran."""
        ran = []
        for _ in range(count):
            with steps.step():
                ran.append(self.threads)
                seconds = 1.3 if self.threads == 1 else 2.6 if self.is_busy else 0.8
                self.now += seconds
                self.preempted += round(300 * seconds) if self.is_busy else 1
            assert self.threads == 2
        return ran


class Lines(SilentReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_beside_a_busy_process_most_steps_run_on_one_thread_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, lines = Machine(monkeypatch, is_busy=True), Lines()
    steps = StepThreads.of(ALONE, lines)
    ran = machine.steps(steps, 100)
    assert ran.count(1) > 85
    assert len(lines.lines) == 1
    assert "1 of 2 threads" in lines.lines[0]
    machine.is_busy = False
    assert set(machine.steps(steps, 200)[-50:]) == {2}


def test_alone_every_step_runs_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lines = Machine(monkeypatch, is_busy=False), Lines()
    assert set(machine.steps(StepThreads.of(ALONE, lines), 100)) == {2}
    assert not lines.lines


@pytest.mark.parametrize("name", CHOSEN)
def test_a_number_that_the_user_gives_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, is_busy=True)
    monkeypatch.setenv(name, "2")
    assert set(machine.steps(StepThreads.of(ALONE, Lines()), 30)) == {2}


def test_several_processes_keep_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree once, for each number, on who multiplies: none may have a number of its own."""
    machine = Machine(monkeypatch, is_busy=True)
    steps = StepThreads.of(replace(ALONE, size=2), Lines())
    assert set(machine.steps(steps, 30)) == {2}
