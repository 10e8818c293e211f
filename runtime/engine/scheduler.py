"""Scheduler: what happens to a request before its first round.

Requests wait in order; a free slot takes the first of them, its prompt is read, whole or (where
live rows shall go on meanwhile) one chunk per round, and the row joins. A free slot keeps what it
has cached of a conversation until it is taken: the next request of that conversation goes to the
slot that holds its longest beginning, and only the rest is read. Never between conversations: a
name that matches exactly is the only key, and None matches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import LmOut
from specctl.runtime.engine.prefill import CHUNK, Follow, PrefillProgress, read
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a free slot still holds: the tokens whose entries are true, and the taps at them."""

    conversation: str
    tokens: Sequence[int]
    taps: Mapping[int, Tensor]

    def common(self, request: Request) -> int:
        """How many positions of that request need not be read; its last token is always fed."""
        if request.conversation != self.conversation:
            return 0
        longest = min(len(self.tokens), len(request.tokens) - 1)
        for at in range(longest):
            if self.tokens[at] != request.tokens[at]:
                return at
        return longest


@dataclass(slots=True)
class Scheduler:
    """Waiting requests, prompts being read, free slots. One writer: the engine.

    `chunk` prompt tokens are read per round, shared by the rows that join; None reads whole
    prompts at once. `taps` is what the drafter wants of every position.
    """

    target: Target
    num_slots: int
    taps: tuple[int, ...] = ()
    chunk: int | None = None
    waiting: deque[tuple[int, Request]] = field(default_factory=deque)
    readings: list[PrefillProgress] = field(default_factory=list)
    free: list[int] = field(init=False)
    kept: dict[int, CachedPrefix] = field(default_factory=dict)  # by slot, the longest unused first

    def __post_init__(self) -> None:
        self.free = list(range(self.num_slots))

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.readings)

    def submit(self, index: int, request: Request) -> None:
        """Put a request at the end of the queue; refuses a prompt that can never be read."""
        context = self.target.spec.max_positions
        if not 0 < len(request.tokens) < context:
            raise SpecctlError(
                "the prompt does not fit the target's context",
                found=f"{len(request.tokens):,} tokens",
                expected=f"1 to {context - 1:,} tokens",
                do="shorten the prompt, or choose a target with a longer context",
            )
        self.waiting.append((index, request))

    def cancel(self, index: int) -> bool:
        """Forget a request that has not joined yet; whether there was one."""
        for reading in self.readings:
            if reading.row.index == index:
                self.readings.remove(reading)
                reading.row.kept_len = reading.at
                reading.row.prompt_taps = reading.prompt_taps()
                self.release(reading.row)
                return True
        found = [each for each in self.waiting if each[0] == index]
        for each in found:
            self.waiting.remove(each)
        return bool(found)

    def seat(self, roots: bool) -> None:
        """Seat who can be seated. `roots`: the last tokens will be read, too."""
        while self.waiting and self.free:
            self.readings.append(self._seat(*self.waiting.popleft(), roots))

    def read(self, kv: SlotKV, roots: bool, follow: Follow | None = None) -> list[PrefillProgress]:
        """Read on, and return the rows whose prompts are read, until they are said to have
        `joined`. `roots`: read the last tokens too, and prompts whole. `follow`: what has a drafter
        read as much in a round."""
        while not all(reading.is_done for reading in self.readings):
            num_open = sum(not reading.is_done for reading in self.readings)
            width = CHUNK if self.chunk is None else max(1, self.chunk // num_open)
            read(self.target, kv, self.readings, width, self.taps, roots)
            if self.chunk is not None:
                break
        done = [reading for reading in self.readings if reading.is_done]
        if follow is not None and self.chunk is not None:
            most = max(1, self.chunk // max(len(self.readings), 1))
            behind = [reading for reading in self.readings if reading.follow(follow, most)]
            done = [reading for reading in done if reading not in behind]
        return sorted(done, key=lambda reading: reading.row.slot)

    def joined(self, done: Sequence[PrefillProgress]) -> list[Row]:
        """The rows of these readings, with the taps of their prompts, take part in rounds now."""
        self.readings = [reading for reading in self.readings if reading not in done]
        for reading in done:
            reading.row.prompt_taps = reading.prompt_taps()
        return [reading.row for reading in done]

    def _seat(self, index: int, request: Request, roots: bool) -> PrefillProgress:
        """The slot that holds most of the request; else the first that holds nothing; else the one
        that was not used for longest."""
        best = max(self.kept, key=lambda slot: self.kept[slot].common(request), default=-1)
        common = self.kept[best].common(request) if best >= 0 else 0
        empty = [slot for slot in self.free if slot not in self.kept]
        slot = best if common else min(empty) if empty else next(iter(self.kept))
        self.free.remove(slot)
        held = self.kept.pop(slot, None)
        row = Row.of(index, slot, request)
        row.reused_len = common
        reading = PrefillProgress(row, common, row.kept_len + roots)
        if common and held is not None and held.taps:
            reading.taps.append({tap: value[:common] for tap, value in held.taps.items()})
        return reading

    def release(self, row: Row) -> None:
        """A row has left its slot, which may go on remembering what it read."""
        self.free.append(row.slot)
        name, taps = row.request.conversation, row.prompt_taps
        if name is not None:
            ends = [row.kept_len, *(len(value) for value in taps.values())]
            if taps or not self.taps:
                self.kept[row.slot] = CachedPrefix(name, tuple(row.tokens[: min(ends)]), taps)

    def forget(self) -> None:
        """The caches are new: nothing is kept of anybody."""
        self.kept.clear()


def roots_of(readings: Sequence[PrefillProgress]) -> LmOut:
    """What a forward of the roots returns, where they were read with the prompts."""
    return LmOut(torch.stack([each.root_1V for each in readings if each.root_1V is not None]))
