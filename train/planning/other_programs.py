"""How much of this machine's processors other programs used meanwhile: a pace that is measured
beside them is that of a busy machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import psutil

NOTABLE = 0.2  # share of the processors from which it is said


def _busy_seconds() -> float:
    """Processor seconds that all programs, and other guests of a virtual machine, ever used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _all_seconds() -> float:
    """Processor seconds, used or not."""
    return float(sum(psutil.cpu_times()))


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Counts from its making on."""

    busy: float = field(default_factory=_busy_seconds)
    own: float = field(default_factory=_own_seconds)
    all: float = field(default_factory=_all_seconds)

    def share(self) -> float:
        """Of the processors' time since then, from 0 to 1."""
        there = _all_seconds() - self.all
        others = (_busy_seconds() - self.busy) - (_own_seconds() - self.own)
        return min(1.0, max(0.0, others / there)) if there > 0 else 0.0

    def note(self) -> str:
        """A phrase where the share is notable, else nothing."""
        share = self.share()
        if share < NOTABLE:
            return ""
        return f"other programs kept {share:.0%} of the processors busy while it was measured"
