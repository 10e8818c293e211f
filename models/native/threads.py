"""How many threads the compiled step runs on, beside the other work of the machine.

Threads that wait for each other many times a step are as slow as the one that another process has
put off its core: beside one busy process, two threads on two cores decode at a third of the speed
of a single one (benchmarks/neighbours.py). So where the system preempts threads of this process,
fewer are tried, and kept where that is faster; now and then more are tried again. What is computed
does not depend on their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

try:
    import resource
except ImportError:  # Windows does not tell: all threads, always
    resource = None  # type: ignore[assignment]

WINDOW, FEWEST = 0.02, 4  # seconds in steps, and steps, by which a number of threads is judged
SLOW, DISTURBED = 1.3, 30.0  # beside the fastest steps; preemptions in a second of steps
FASTER = 0.95  # of the usual time, at most: another number is kept,
WINS = 3  # in so many windows one after the other
KEPT = 0.9  # of what was usual, a window later
FEWER_WAIT, MORE_WAIT = 8, 50  # windows between trials, after the first one for nothing,
LAST_WAIT = 100  # and at most
FORGOTTEN = 5.0  # seconds without a step, behind which the machine may be another
Kind = tuple[int, ...]  # of a step: whatever makes it dearer


def preemptions() -> int:
    """How often threads of this process were put off their cores."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


@dataclass(slots=True)
class Steps:
    """Steps on one number of threads: their seconds, those of the fastest of their kinds, and how
    often a thread was preempted meanwhile."""

    seconds: float = 0.0
    fastest: float = 0.0
    preempted: float = 0.0
    count: int = 0

    def add(self, window: Steps) -> None:
        """What was before fades: now and then a step waits for a tenth of a second."""
        self.seconds = KEPT * self.seconds + window.seconds
        self.fastest = KEPT * self.fastest + window.fastest
        self.preempted = KEPT * self.preempted + window.preempted

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

    def again(self, least: int) -> None:
        """A trial was for nothing."""
        self.windows, self.since = min(max(least, 2 * self.windows), LAST_WAIT), 0


@dataclass(slots=True)
class Threads:
    """The threads of compiled steps that may take `most`. Where threads of Python step at once,
    their times mix: that makes worse choices, and no other harm."""

    most: int
    sizes: tuple[int, ...] = field(init=False)  # falling
    at: int = 0  # the choice, of `sizes`
    trial: int | None = None  # another one, that runs instead
    won: int = 0  # windows in which the trial was faster
    usual: Steps = field(default_factory=Steps)  # by the choice
    window: Steps = field(default_factory=Steps)
    counted: int = 0  # preemptions before the window
    ended: float = 0.0  # when the last step did
    fewer: Wait = field(default_factory=lambda: Wait(0))
    more: Wait = field(default_factory=lambda: Wait(0))

    def __post_init__(self) -> None:
        self.sizes = _sizes(self.most)

    @property
    def chosen(self) -> int:
        return self.sizes[self.at]

    def begin(self, now: float) -> int:
        """A step begins: how many threads it runs on."""
        if now - self.ended > FORGOTTEN:
            self._forget()
        if not self.window.count:
            self.counted = preemptions()
        trial = self.trial  # read once: another thread may end it
        return self.sizes[self.at if trial is None else trial]

    def _forget(self) -> None:
        self.trial, self.won, self.usual, self.window = None, 0, Steps(), Steps()
        self.fewer, self.more = Wait(0), Wait(0)

    def end(self, kind: Kind, seconds: float, now: float, fastest: dict[Kind, float]) -> None:
        """It is over. `fastest`: the seconds of the fastest steps of its model by kind; the first
        of a kind tells nothing."""
        self.ended = now
        least = fastest.get(kind)
        if least is None or (seconds < least and self.trial is None):
            fastest[kind] = seconds
        if least is None:
            return
        window = self.window
        window.seconds += seconds
        window.fastest += least
        window.count += 1
        if window.seconds >= WINDOW and window.count >= FEWEST:
            window.preempted = max(0, preemptions() - self.counted)
            self.window = Steps()
            self._judge(window)

    def _judge(self, window: Steps) -> None:
        if (trial := self.trial) is not None:
            self._go_on(trial, window)
            return
        usual = self.usual
        usual.add(window)
        self.fewer.since += 1
        self.more.since += 1
        is_preempted = usual.preempted > DISTURBED * usual.seconds
        is_disturbed = is_preempted and usual.slowness > SLOW
        if is_disturbed and self.at + 1 < len(self.sizes) and self.fewer.is_over:
            self.trial = self.at + 1
        elif self.at and self.more.is_over:
            self.trial = self.at - 1

    def _go_on(self, trial: int, window: Steps) -> None:
        """One more window of the trial, or the choice."""
        are_more, is_faster = trial < self.at, window.slowness < FASTER * self.usual.slowness
        self.won += is_faster
        if is_faster and self.won < WINS:
            return
        self.trial, self.won = None, 0
        if not is_faster:
            self.more.again(MORE_WAIT) if are_more else self.fewer.again(FEWER_WAIT)
            return
        self.at, self.usual = trial, window
        if are_more:
            self.more, self.fewer = Wait(0), Wait(FEWER_WAIT, since=0)
        else:
            self.fewer, self.more = Wait(0), Wait(MORE_WAIT, since=0)


def _sizes(most: int) -> tuple[int, ...]:
    """All, one, two, four ... fewer down to half of them, then half as many each time."""
    sizes, fewer = [most], 1
    while most - fewer > most // 2:
        sizes.append(most - fewer)
        fewer *= 2
    half = most // 2
    while half:
        sizes.append(half)
        half //= 2
    return tuple(sizes)


@cache
def threads_of(most: int) -> Threads:
    """Of all steps of this process that may take so many."""
    return Threads(most)


def threads_used(most: int) -> int:
    """On how many of so many threads compiled steps run now."""
    return threads_of(most).chosen
