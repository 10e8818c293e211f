"""What `specctl quickstart` shows of its steps: the story in plain words, bookkeeping with
--verbose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specctl.cli.app.console import Console
from specctl.core.printable import counted
from specctl.runtime.measure.reporter import Advance

if TYPE_CHECKING:
    from specctl.runtime.proof.proof_report import Check

CHECKS = {
    "rules, exact": ("the rule that accepts guesses keeps the distribution, exactly", "case"),
    "rules, fast": ("its fast and its plain implementation decide alike", "random draft"),
    "greedy identity": ("greedy text is that of plain decoding", "token"),
    "seeded identity": ("with a fixed seed, sampled text is that of plain decoding", "token"),
    "cache rollback": ("after a rejected guess, the cache is that of plain decoding", "round"),
    "distribution": ("sampled text has the target's distribution", "sample"),
    "drafts follow": ("guesses come from the probabilities that they are judged by", "guess"),
}  # by the first words of a check: what it shows, and what it counts


@dataclass(frozen=True, slots=True)
class StoryReporter:
    """A reporter that leaves the bookkeeping of training and trimming to --verbose."""

    console: Console
    BOOKKEEPING: ClassVar[re.Pattern[str]] = re.compile(
        r"(answers|data|package): |(starts from|trains|frozen|counting tokens|vocab-trim:) |"
        r"frozen, shared|[\d,]+ rows? to train on"
    )

    def say(self, text: str) -> None:
        show = self.console.detail if self.BOOKKEEPING.match(text) else self.console.say
        show(text)

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        return self.console.task(label, total, unit)


class TrimReporter(StoryReporter):
    """What trimming alone says of the speed is no news before the two drafters are compared."""

    __slots__ = ()

    def warn(self, text: str) -> None:
        self.console.detail(f"warning: {text}")


class ProofReporter(StoryReporter):
    """How far the proof is, without the names of its checks, which are said in words at its end."""

    __slots__ = ()

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        with self.console.task(label, total, unit) as advance:
            yield lambda amount, note="": advance(amount)


def in_plain_words(checks: Sequence[Check]) -> list[str]:
    """A line for each kind of check that passed, and the number of its cases."""
    lines = []
    for start, (what, unit) in CHECKS.items():
        count = sum(check.count for check in checks if check.name.startswith(start))
        if count:
            lines.append(f"passed: {what} ({counted(count, unit, 'guesses' * (unit == 'guess'))})")
    known = tuple(CHECKS)
    lines += [f"passed: {check.name}" for check in checks if not check.name.startswith(known)]
    return lines
