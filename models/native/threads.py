"""How many threads the compiled step runs on, beside the other work of the machine.

Threads that wait for each other many times a step are as slow as the one that another process has
sent off its core: beside one busy process, two threads on two cores decode at a third of the speed
of a single one (benchmarks/neighbours.py). So where the system takes threads of this process off
their cores, fewer are tried, and kept where that is faster; now and then more are tried again. What
is computed does not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

try:
    import resource
except ImportError:  # Windows does not tell: all threads, always
    resource = None  # type: ignore[assignment]

WINDOW, FEWEST = 0.02, 4  # seconds in steps, and steps, that a number of threads is judged by
SLOW, DISTURBED = 1.3, 20.0  # of what steps took at best, and threads sent off in a second
FASTER = 0.95  # of the time, at most: another number is kept
KEPT = 0.9  # of the usual, a window
WINS = 2  # windows in which another number must be faster
FEWER_WAIT, MORE_WAIT = 4, 25  # windows until what was not faster is tried again, at first,
LAST_WAIT = 100  # and at most
Kind = tuple[int, int, int, int]  # of a step: rows, layers, tokens drafted, bits of positions


def sent_off() -> int:
    """How often threads of this process lost their core to others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


@dataclass(slots=True)
class Steps:
    """Steps on one number of threads: their seconds, what such steps took at best, and how often a
    thread was sent off meanwhile."""

    seconds: float = 0.0
    fastest: float = 0.0
    sent_off: float = 0.0
    count: int = 0

    def add(self, window: Steps) -> None:
        """What was before fades: now and then a step waits for a tenth of a second."""
        self.seconds = KEPT * self.seconds + window.seconds
        self.fastest = KEPT * self.fastest + window.fastest
        self.sent_off = KEPT * self.sent_off + window.sent_off

    @property
    def slowness(self) -> float:
        return self.seconds / self.fastest


@dataclass(slots=True)
class Wait:
    """Windows until a trial, since the last one that was for nothing."""

    windows: int
    since: int = LAST_WAIT

    @property
    def is_over(self) -> bool:
        return self.since >= self.windows

    def again(self) -> None:
        """The trial was for nothing."""
        self.windows, self.since = min(2 * self.windows, LAST_WAIT), 0


@dataclass(slots=True)
class Threads:
    """The threads of the compiled steps of a process. Where threads of Python step at once, their
    times mix: that makes worse choices, and no other harm."""

    most: int
    sizes: tuple[int, ...] = field(init=False)  # falling
    at: int = 0  # of `sizes`: the choice
    trial: int | None = None  # played instead
    won: int = 0  # windows of the trial that were faster
    usual: Steps = field(default_factory=Steps)  # by the choice
    window: Steps = field(default_factory=Steps)
    counted: int = field(default_factory=sent_off)  # when the window began
    fewer: Wait = field(default_factory=lambda: Wait(FEWER_WAIT))
    more: Wait = field(default_factory=lambda: Wait(MORE_WAIT))

    def __post_init__(self) -> None:
        self.sizes = _sizes(self.most)

    @property
    def size(self) -> int:
        """Threads of the coming step."""
        trial = self.trial  # read once: another thread may end it
        return self.sizes[self.at if trial is None else trial]

    def ran(self, kind: Kind, seconds: float, fastest: dict[Kind, float]) -> None:
        """A step is over; `fastest`: what those of a model took at best."""
        least = fastest.get(kind)
        if least is None or seconds < least:
            fastest[kind] = least = seconds
        window = self.window
        window.seconds += seconds
        window.fastest += least
        window.count += 1
        if window.seconds >= WINDOW and window.count >= FEWEST:
            self._judge(window)

    def _judge(self, window: Steps) -> None:
        now = sent_off()
        window.sent_off, self.counted, self.window = now - self.counted, now, Steps()
        if (trial := self.trial) is not None:
            self._go_on(trial, window)
            return
        usual = self.usual
        usual.add(window)
        self.fewer.since += 1
        self.more.since += 1
        is_slow = usual.slowness > SLOW
        is_disturbed = is_slow and usual.sent_off > DISTURBED * usual.seconds
        if is_disturbed and self.at + 1 < len(self.sizes) and self.fewer.is_over:
            self.trial = self.at + 1
        elif self.at and self.more.is_over:
            self.trial = self.at - 1

    def _go_on(self, trial: int, window: Steps) -> None:
        """Once more with the trial, or the choice is made."""
        are_more, is_faster = trial < self.at, window.slowness < FASTER * self.usual.slowness
        self.won += is_faster
        if is_faster and self.won < WINS:
            return
        self.trial, self.won = None, 0
        if not is_faster:
            (self.more if are_more else self.fewer).again()
            return
        self.at, self.usual = trial, window
        if are_more:
            self.more, self.fewer = Wait(MORE_WAIT), Wait(FEWER_WAIT)
        else:
            self.more.since = 0


def _sizes(most: int) -> tuple[int, ...]:
    """All, and one, two, four ... fewer, down to one."""
    sizes, fewer = [most], 1
    while most - fewer > 1:
        sizes.append(most - fewer)
        fewer *= 2
    return (*sizes, 1) if most > 1 else (most,)


@cache
def threads_of(most: int) -> Threads:
    """Of all steps that may take so many threads."""
    return Threads(most)


def beside_other_work(most: int) -> int | None:
    """So many of these threads run compiled steps now; None where all do."""
    size = threads_of(most).size
    return size if size < most else None
