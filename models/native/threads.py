"""How many threads steps run on, beside the other work of the machine: those of compiled decoding,
of PyTorch's forwards (models/torch_threads.py) and of training (train/step/step_threads.py).

Threads that wait for each other many times a step are as slow as the one that another process has
put off its core: beside one busy process, two threads on two cores decode at a third of the speed
of a single one (benchmarks/neighbours.py). So where the system preempts threads of this process,
fewer are tried, and kept where that is faster; now and then more are tried again. What the compiled
step computes does not depend on their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

try:
    import resource
except ImportError:  # Windows does not tell: all threads, always
    resource = None  # type: ignore[assignment]

WINDOW, FEWEST = 0.02, 4  # seconds in steps, and steps, by which a number of threads is judged
SLOW, DISTURBED = 1.6, 30.0  # beside the fastest steps; preemptions in a second of steps
FASTER, PAIRS = 0.95, 3  # of the time, at most, over so many pairs of windows: another is kept
HOPELESS = 1.2  # after the first pair
KEPT = 0.9  # of what was usual, a window later
FEWER_WAIT, MORE_WAIT = 8, 50  # windows between trials, after the first one for nothing,
LAST_WAIT = 100  # and at most
FORGOTTEN = 5.0  # seconds without a step, behind which the machine may be another
Kind = tuple[int, ...]  # of a step: whatever makes it dearer
Times = dict[Kind, tuple[float, float]]  # their work, and seconds


def preemptions() -> int:
    """How often threads of this process were put off their cores."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


@dataclass(slots=True)
class Steps:
    """Seconds of steps, and how often a thread was preempted meanwhile; of those whose kind is
    known also the seconds by themselves, and of the fastest of their kinds."""

    count: int = 0
    seconds: float = 0.0
    preempted: float = 0.0
    known: float = 0.0
    fastest: float = 0.0

    def add(self, window: Steps) -> None:
        """What was before fades: now and then a step waits for a tenth of a second."""
        self.seconds = KEPT * self.seconds + window.seconds
        self.preempted = KEPT * self.preempted + window.preempted
        self.known = KEPT * self.known + window.known
        self.fastest = KEPT * self.fastest + window.fastest

    @property
    def is_disturbed(self) -> bool:
        return self.preempted > DISTURBED * self.seconds

    def is_slow(self, slow: float) -> bool:
        return self.known > slow * self.fastest


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
class TurnTrial:
    """Another number of threads, `at` of the sizes, and the choice in turn, window by window. Only
    kinds of steps that both have run are compared: `times` of the choice, and of the other."""

    at: int
    runs: bool = True
    windows: int = 0
    times: tuple[Times, Times] = field(default_factory=lambda: ({}, {}))

    def add(self, kind: Kind, seconds: float, work: float) -> None:
        done, total = self.times[self.runs].get(kind, (0.0, 0.0))
        self.times[self.runs][kind] = done + work, total + seconds

    def ratio(self) -> float | None:
        """Of its time to the choice's, for steps as both ran them; None where there were none."""
        sums = [0.0, 0.0]
        for kind in self.times[0].keys() & self.times[1].keys():
            works, totals = zip(*(times[kind] for times in self.times), strict=True)
            for at in (0, 1):
                sums[at] += min(works) * totals[at] / works[at]
        return sums[1] / sums[0] if sums[0] else None


@dataclass(slots=True)
class Threads:
    """The threads of steps that may take `most`. Where threads of Python step at once,
    their times mix: that makes worse choices, and no other harm."""

    most: int
    fewest: int = FEWEST
    slow: float = SLOW  # 0: other numbers are tried wherever threads are preempted
    sizes: tuple[int, ...] = field(init=False)  # falling
    at: int = 0  # the choice, of `sizes`
    trial: TurnTrial | None = None  # of another number with the choice
    usual: Steps = field(default_factory=Steps)  # by the choice
    window: Steps = field(default_factory=Steps)
    counted: int = 0  # preemptions before the window
    ended: float = 0.0  # when the last step did
    fewer: Wait = field(default_factory=lambda: Wait(0))
    more: Wait = field(default_factory=lambda: Wait(0))
    failed: int = 0  # trials of fewer threads since the choice

    def __post_init__(self) -> None:
        self.sizes = _sizes(self.most)

    @property
    def chosen(self) -> int:
        return self.sizes[self.at]

    def begin(self, now: float) -> int:
        """A step begins: how many threads it runs on."""
        if now - self.ended > FORGOTTEN:
            self.trial, self.usual, self.window = None, Steps(), Steps()
            self.fewer, self.more = Wait(0), Wait(0)
        if not self.window.count:
            self.counted = preemptions()
        trial = self.trial  # read once: another thread may end it
        return self.sizes[trial.at if trial is not None and trial.runs else self.at]

    def end(
        self,
        kind: Kind,
        seconds: float,
        now: float,
        fastest: dict[Kind, float],
        work: float = 1.0,
    ) -> None:
        """It is over. `fastest`: the seconds of its model's fastest steps on all threads, for a
        `work` of one: steps of a kind take as long as they have work."""
        self.ended, trial, window = now, self.trial, self.window
        window.seconds += seconds
        window.count += 1
        if trial is not None:
            trial.add(kind, seconds, work)
        elif self.at == 0:
            least = fastest.get(kind)
            if least is None or seconds / work < least:
                fastest[kind] = seconds / work
            if least is not None:  # the first of a kind tells nothing
                window.known += seconds
                window.fastest += least * work
        if window.seconds >= WINDOW and window.count >= self.fewest:
            window.preempted = max(0, preemptions() - self.counted)
            self.window = Steps()
            self._judge(window)

    def _judge(self, window: Steps) -> None:
        if (trial := self.trial) is not None:
            trial.windows, trial.runs = trial.windows + 1, not trial.runs
            if trial.windows % 2 == 0:
                self._compare(trial)
            return
        self.usual.add(window)
        self.fewer.since += 1
        self.more.since += 1
        at = self.at
        is_worse = self.usual.is_disturbed and (at > 0 or self.usual.is_slow(self.slow))
        if is_worse and at + 1 < len(self.sizes) and self.fewer.is_over:
            self.trial = TurnTrial(self._fewer_than(at))
        elif at and self.more.is_over:
            self.trial = TurnTrial(at - 1)

    def _fewer_than(self, choice: int) -> int:
        """Each of the numbers down to half of that one has its turn."""
        least = self.sizes[choice] // 2
        within = [at for at, size in enumerate(self.sizes) if at > choice and size >= least]
        return within[self.failed % len(within)]

    def _compare(self, trial: TurnTrial) -> None:
        """After a pair of windows: another pair, or the choice."""
        ratio, are_more = trial.ratio(), trial.at < self.at
        is_last = trial.windows == 2 * PAIRS
        if not is_last and (ratio is None or ratio < HOPELESS):
            return
        self.trial = None
        if ratio is None or ratio > FASTER:
            self.more.again(MORE_WAIT) if are_more else self.fewer.again(FEWER_WAIT)
            self.failed += not are_more
            return
        self.at, self.usual, self.failed = trial.at, Steps(), 0
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
    """Of all compiled steps of this process that may take so many."""
    return Threads(most)


@cache
def forward_threads_of(most: int) -> Threads:
    """Of all forwards in PyTorch; they are long, so that each may be a trial."""
    return Threads(most, fewest=1, slow=0.0)


def threads_used(most: int) -> int:
    """On how many of so many threads steps and forwards run now."""
    return min(threads_of(most).chosen, forward_threads_of(most).chosen)
