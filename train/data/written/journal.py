"""Answers on disk: a record a turn, appended the moment it is written.

A killed job loses the turns that were being written and no other. One process writes a file, all
read all. A record that was torn by a kill, or damaged later, does not match its checksum: it is
left out, and the turn is written again. No record is ever changed.

    "SpcA" | prompt, turn, kept, tail, new, reason (u32) | tail ids, new ids (i32) | crc32

A prompt repeats what stood before it: `kept` of its first tokens are those of the turn before
(prompt and answer), only its `tail` is written down. The checksum begins with the plan's digest, so
that a record of another plan is none.
"""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.train.data.prompts.answers import Turn

MAGIC = b"SpcA"
_HEAD = struct.Struct("<4s6I")
_CRC = struct.Struct("<I")
REASONS = ("eos", "length", "context", "stop", "grammar")
FLUSH_SECONDS = 2.0
LARGEST = 1 << 28  # tokens of a record; a damaged head may say anything


@dataclass(frozen=True, slots=True)
class _Record:
    index: int
    turn: int
    kept: int
    tail: array[int]
    new: array[int]
    reason: str


@dataclass(frozen=True, slots=True)
class FoundTurns:
    """What a journal holds: the turns of each prompt, in order, and how many damaged stretches lay
    between its records."""

    turns: dict[int, list[Turn]]
    num_damaged: int


class AnswerJournal:
    """The answers of one plan in a folder. One writer: the process of that `rank`."""

    def __init__(self, folder: Path, digest: str, rank: int = 0) -> None:
        self.folder, self.seed = folder, zlib.crc32(digest.encode())
        self.path = folder / f"answers-{rank:03d}.bin"
        self._file: int | None = None
        self._flushed = 0.0

    def read(self) -> FoundTurns:
        """All turns of all files. A turn counts once, and only behind the turns before it."""
        records: dict[tuple[int, int], _Record] = {}
        num_damaged = 0
        for path in sorted(self.folder.glob("answers-*.bin")):
            for record in self._records(path.read_bytes()):
                if record is None:
                    num_damaged += 1
                else:
                    records.setdefault((record.index, record.turn), record)
        turns: dict[int, list[Turn]] = {}
        for index, number in sorted(records):
            record, before = records[index, number], turns.setdefault(index, [])
            if number == len(before):
                text = before[-1].prompt_ids + before[-1].new_ids if before else array("i")
                prompt = text[: record.kept] + record.tail
                before.append(Turn(prompt, record.new, record.reason))
        return FoundTurns(turns, num_damaged)

    def _records(self, body: bytes) -> Iterator[_Record | None]:
        """The records of a file; None for each stretch that is none, but for a torn end."""
        at = 0
        while at < len(body):
            found = self._record(body, at)
            if found is not None:
                record, at = found
                yield record
                continue
            at = body.find(MAGIC, at + 1)
            while at >= 0 and self._record(body, at) is None:
                at = body.find(MAGIC, at + 1)
            if at < 0:
                return
            yield None

    def _record(self, body: bytes, at: int) -> tuple[_Record, int] | None:
        """The record at a place and where it ends; None if there is no whole one."""
        if len(body) < at + _HEAD.size:
            return None
        magic, index, turn, kept, num_tail, num_new, reason = _HEAD.unpack_from(body, at)
        ids = at + _HEAD.size
        end = ids + 4 * (num_tail + num_new)
        is_plain = magic == MAGIC and reason < len(REASONS) and num_tail + num_new <= LARGEST
        if not is_plain or len(body) < end + _CRC.size:
            return None
        if _CRC.unpack_from(body, end)[0] != zlib.crc32(body[at:end], self.seed):
            return None
        middle = ids + 4 * num_tail
        tail, new = _ints(body[ids:middle]), _ints(body[middle:end])
        return _Record(index, turn, kept, tail, new, REASONS[reason]), end + _CRC.size

    def append(self, index: int, turn: int, before: Turn | None, written: Turn) -> None:
        """Keep a turn for good; `before` is the turn before it in its conversation."""
        kept = 0 if before is None else _common(before, written.prompt_ids)
        tail = written.prompt_ids[kept:]
        reason = REASONS.index(written.finish_reason)
        sizes = (len(tail), len(written.new_ids))
        body = _HEAD.pack(MAGIC, index, turn, kept, *sizes, reason)
        body += _bytes(tail) + _bytes(written.new_ids)
        self._write(body + _CRC.pack(zlib.crc32(body, self.seed)))

    def _write(self, body: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        rest = memoryview(body)
        while len(rest):
            rest = rest[os.write(self._file, rest) :]
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            os.fsync(self._file)
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> AnswerJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _common(before: Turn, prompt: Sequence[int]) -> int:
    """How many tokens a prompt begins with of the turn before it."""
    text = before.prompt_ids + before.new_ids
    most = min(len(text), len(prompt))
    if text[:most] == prompt[:most]:
        return most
    return next(i for i in range(most) if text[i] != prompt[i])


def _ints(body: bytes) -> array[int]:
    found = array("i", body)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _bytes(ids: array[int]) -> bytes:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()
