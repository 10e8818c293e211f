"""What was read of the data, what was left out of it, and what a reader may not have meant."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from specctl.core.printable import counted
from specctl.runtime.measure.reporter import Reporter


class Defects:
    """What was left out of the data, by reason, and where first; how many records each source
    gave, and remarks on how it was read. One writer: the job."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.remarks: list[str] = []
        self.records: Counter[str] = Counter()  # usable ones, by source
        self._source_of = array("H")  # of each usable record, in the order in which they were read
        self._told = 0  # remarks
        self._is_told = False  # which shares the sources have

    def note(self, reason: str, where: str, count: int = 1) -> None:
        self.counts[reason] += count
        self.first.setdefault(reason, where)

    def remark(self, text: str) -> None:
        """Something that the user should know of how the data are read; said once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def took(self, source: str) -> None:
        """A usable record of that source was read."""
        self.records[source] += 1
        self._source_of.append(list(self.records).index(source))

    def shares(self, numbers: Iterable[int] | None = None) -> dict[str, int]:
        """Records by source: of those with these numbers in the order of reading, or of all."""
        if numbers is None:
            return dict(self.records)
        names = list(self.records)
        chosen = Counter(names[self._source_of[number]] for number in numbers)
        return {name: chosen[name] for name in names}

    def lines(self) -> list[str]:
        return [f"{n:,} x {why} (first: {self.first[why]})" for why, n in self.counts.items()]

    def tell(self, console: Reporter) -> None:
        self.tell_reading(console)
        for line in self.lines():
            console.warn(f"data left out: {line}")

    def tell_reading(self, console: Reporter, numbers: Iterable[int] | None = None) -> None:
        """What was read and how, as far as it was not said yet; of several sources, which share
        each has of the records (of those that were chosen for prompts, where `numbers` names
        them)."""
        for text in self.remarks[self._told :]:
            console.warn(f"data: {text}")
        self._told = len(self.remarks)
        if len(self.records) < 2 or self._is_told:
            return
        self._is_told = True
        whole, prompts = sum(self.records.values()), self.shares(numbers or ())
        for name, count in self.records.items():
            chosen = f", {counted(prompts[name], 'prompt')}" if numbers is not None else ""
            console.say(
                f"data: {name}: {counted(count, 'record')} ({count / whole:.0%} of all){chosen}"
            )
