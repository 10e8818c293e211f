"""Threads of the compiled step: fewer where others keep the cores busy, all of them again later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from specctl.models.native import threads as native
from specctl.models.native.threads import Kind, Threads

STEP: Kind = (1, 8)
ALONE = 3e-4  # seconds of a step on all cores


@dataclass
class Machine:
    """Cores that `busy` processes share with ours. With more threads than cores a step takes four
    times as long, every 60th a tenth of a second, and threads are preempted; else one every so many
    steps, by the system itself."""

    cores: int = 2
    busy: int = 0
    system: int = 1000
    slower: float = 1.0
    kind: Kind = STEP
    tail: int = 0  # every so many steps one waits, whatever the threads
    preempted: int = 0
    clock: float = 0.0
    steps: int = 0
    fastest: dict[Kind, float] = field(default_factory=dict)

    def preemptions(self) -> int:
        return self.preempted

    def seconds(self, count: int) -> float:
        self.steps += 1
        alone = self.slower * ALONE * self.cores / count
        if self.tail and self.steps % self.tail == 0:
            self.preempted += 3
            return 0.02
        if count + self.busy <= self.cores:
            self.preempted += self.steps % self.system == 0
            return alone
        is_stuck = self.steps % 60 == 0
        self.preempted += 30 if is_stuck else self.steps % 3 == 0
        return 0.1 if is_stuck else 4.0 * alone

    def run(self, threads: Threads, seconds: float) -> list[int]:
        """The threads of every step."""
        return list(self._run(threads, self.clock + seconds))

    def _run(self, threads: Threads, until: float) -> Iterator[int]:
        while self.clock < until:
            count = threads.begin(self.clock)
            took = self.seconds(count)
            self.clock += took
            threads.end(self.kind, took, self.clock, self.fastest)
            yield count


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(native, "preemptions", made.preemptions)
    return made


def test_alone_all_threads_run_whatever_the_system_preempts(machine: Machine) -> None:
    machine.system = 10
    assert set(machine.run(Threads(2), 20.0)) == {2}


def test_now_and_then_a_step_that_waits_is_no_reason(machine: Machine) -> None:
    """Fewer threads are tried, and a window without such a step is no proof."""
    machine.tail, threads = 200, Threads(2)
    machine.run(threads, 5.0)
    found = machine.run(threads, 20.0)
    assert found.count(2) > 0.95 * len(found)


def test_beside_a_busy_process_one_runs_and_both_once_it_has_gone(machine: Machine) -> None:
    threads = Threads(2)
    machine.run(threads, 2.0)
    machine.busy = 1
    machine.run(threads, 1.0)
    began = machine.clock
    busy = machine.run(threads, 20.0)
    assert busy.count(1) > 0.98 * len(busy)
    # what trying two costs; a step of one takes twice as long as one of two that are alone
    assert (machine.clock - began) / len(busy) < 1.12 * 2.0 * ALONE
    machine.busy = 0
    machine.run(threads, 2.5)
    assert set(machine.run(threads, 20.0)) == {2}


def test_work_that_is_new_beside_a_busy_process_does_not_hide_that_it_has_gone(
    machine: Machine,
) -> None:
    """What such steps take on two threads is not known then."""
    threads = Threads(2)
    machine.run(threads, 1.0)
    machine.busy = 1
    machine.run(threads, 3.0)
    machine.kind = (5, 8)
    machine.run(threads, 3.0)
    machine.busy = 0
    machine.run(threads, 2.5)
    assert set(machine.run(threads, 5.0)) == {2}


def test_after_a_long_pause_more_threads_are_tried_at_once(machine: Machine) -> None:
    threads = Threads(2)
    machine.run(threads, 1.0)
    machine.busy = 1
    machine.run(threads, 60.0)
    assert threads.chosen == 1
    machine.busy = 0
    machine.clock += 600.0
    machine.preempted += 10_000  # by others of this process
    machine.run(threads, 0.15)
    assert set(machine.run(threads, 5.0)) == {2}


@pytest.mark.parametrize(("busy", "best"), [(1, 15), (3, 12), (8, 8), (13, 2), (15, 1)])
def test_of_many_cores_those_that_are_free_are_used(machine: Machine, busy: int, best: int) -> None:
    machine.cores, threads = 16, Threads(16)
    machine.run(threads, 2.0)
    machine.busy = busy
    machine.run(threads, 6.0)
    found = machine.run(threads, 20.0)
    assert found.count(best) > 0.95 * len(found)


@pytest.mark.parametrize("system", [3, 1000])
def test_what_fewer_threads_do_not_mend_is_left_alone(machine: Machine, system: int) -> None:
    """Everything is slower: that is not tried where nobody was sent off, and seldom elsewhere."""
    threads = Threads(2)
    machine.run(threads, 1.0)
    machine.slower, machine.system = 3.0, system
    machine.run(threads, 2.0)
    found = machine.run(threads, 20.0)
    assert found.count(1) < 0.02 * len(found)
    assert (1 in found) == (system == 3)


def test_a_single_thread_and_a_system_that_counts_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.busy = 3
    assert set(machine.run(Threads(1), 5.0)) == {1}
    monkeypatch.undo()
    monkeypatch.setattr(native, "resource", None)
    assert native.preemptions() == 0
    assert set(machine.run(Threads(2), 5.0)) == {2}


def test_numbers_of_threads_fall_faster_and_faster() -> None:
    assert [Threads(n).sizes for n in (1, 2, 3, 4, 16)] == [
        (1,), (2, 1), (3, 2, 1), (4, 3, 2, 1), (16, 15, 14, 12, 8, 4, 2, 1)
    ]  # fmt: skip
