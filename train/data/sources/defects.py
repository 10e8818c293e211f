"""What was read of the data, what was left out of it, and what a reader may not have meant."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from specctl.core.messages.printable import counted
from specctl.runtime.measure.reporter import Reporter


class Defects:
    """What was left out of the data, by reason, and where first; how many records each source
    gave, and remarks on how it was read. `num_records` counts what was left out of records and
    conversations, without files. One writer: the job."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.num_records = 0
        self.remarks: list[str] = []
        self.records: Counter[str] = Counter()  # usable ones, by source
        self.chosen: Counter[str] = Counter()  # of these, the prompts; empty: not settled
        self._source_of = array("H")  # of each usable record, in the order in which they were read
        self._num_reported = 0  # of the remarks
        self._are_shares_reported = False

    def note(self, reason: str, where: str, count: int = 1, is_file: bool = False) -> None:
        self.counts[reason] += count
        self.num_records += 0 if is_file else count
        self.first.setdefault(reason, where)

    def add(self, other: Defects) -> None:
        """Count what others left out, too."""
        for reason, count in other.counts.items():
            self.counts[reason] += count
            self.first.setdefault(reason, other.first[reason])
        self.num_records += other.num_records

    def remark(self, text: str) -> None:
        """Something that the user should know of how the data are read; said once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def took(self, source: str) -> None:
        """A usable record of that source was read."""
        self.records[source] += 1
        self._source_of.append(list(self.records).index(source))

    def chose(self, numbers: Iterable[int]) -> None:
        """Those of the usable records, by their number in the order of reading, are prompts."""
        names = list(self.records)
        self.chosen = Counter(names[self._source_of[number]] for number in numbers)

    def lines(self) -> list[str]:
        return [f"{n:,} x {why} (first: {self.first[why]})" for why, n in self.counts.items()]

    def tell(self, console: Reporter) -> None:
        self.tell_reading(console)
        for line in self.lines():
            console.warn(f"data left out: {line}")

    def tell_reading(self, console: Reporter) -> None:
        """How the data were read, as far as it was not said yet; of several sources, the share that
        each has of the records, and of those that are prompts, answered already or not."""
        for text in self.remarks[self._num_reported :]:
            console.warn(f"data: {text}")
        self._num_reported = len(self.remarks)
        if len(self.records) < 2 or self._are_shares_reported:
            return
        self._are_shares_reported = True
        whole = sum(self.records.values())
        for name, count in self.records.items():
            share = f"{counted(count, 'record')} ({count / whole:.0%} of all)"
            answered = f", {self.chosen[name]:,} of them taken as prompts" if self.chosen else ""
            console.say(f"data: {name}: {share}{answered}")
