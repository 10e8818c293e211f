"""The request log to learn from, opt-in: prompts and answers as JSONL that training takes as it is.

A chat is {"messages": [...]} with the answer as its last message, a completion {"text": prompt and
answer}: what `specctl distill --data` and `specctl adapt` read. Lines are written by a thread of
their own; a full disk or a slow one loses lines, never requests.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import FileError
from specctl.server.logs import log

if TYPE_CHECKING:
    from specctl.runtime.engine.row_features import RowFeatures

Waiting = tuple[bytes, "RowFeatures | None"]  # a line, and the states of its tokens

MAX_BYTES = 256 << 20  # then the file becomes NAME.1.jsonl, in the place of an older one
WAITING = 1024  # lines; more than the disk can take are dropped


class Recorder:
    """Appends to one file, which nobody else may read. One writer: its thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.written = self.dropped = 0
        self._lines: queue.Queue[Waiting | None] = queue.Queue(WAITING)
        self._file = self._open()
        self._thread = threading.Thread(target=self._write_all, name="specctl-record", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any], features: RowFeatures | None = None) -> None:
        """Have a record written, and what the target computed for it, where that is kept. Returns
        at once and never raises. One that is larger than a whole file may be is dropped."""
        line = json.dumps(record).encode() + b"\n"
        try:
            if len(line) <= self.max_bytes:
                self._lines.put_nowait((line, features))
                return
        except queue.Full:
            pass
        self.dropped += 1
        self._let_go(features)

    def close(self) -> None:
        """Write what waits, and end. Any number of times."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join()
            os.close(self._file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise FileError(
                "the file of recorded requests cannot be written",
                where=str(self.path),
                found=error.strerror or str(error),
                expected="a path in a folder that exists, and no link",
                do="give another --record",
            ) from error
        if hasattr(os, "fchmod"):
            os.fchmod(file, 0o600)
        return file

    def _write_all(self) -> None:
        while (waiting := self._lines.get()) is not None:
            line, features = waiting
            try:
                if os.fstat(self._file).st_size + len(line) > self.max_bytes:
                    self._rotate()
                self._append(line)
                self.written += 1
                self._keep(line, features)
            except (OSError, FileError) as error:
                self.dropped += 1
                if self.dropped == 1:
                    log("record_failed", logging.WARNING, error=str(error))
            self._let_go(features)

    def _keep(self, line: bytes, features: RowFeatures | None) -> None:
        """The line is written: whoever keeps features writes them, too."""

    def _let_go(self, features: RowFeatures | None) -> None:
        """They wait no more."""

    def _append(self, line: bytes) -> None:
        """The whole line or nothing of it: the next one must not be glued to its beginning."""
        size = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, size)
            raise OSError(errno.ENOSPC, "the disk took a part of a line")

    def _rotate(self) -> None:
        os.replace(self.path, self.path.with_name(f"{self.path.stem}.1{self.path.suffix}"))
        old, self._file = self._file, self._open()
        os.close(old)


def chat_record(messages: list[dict[str, str]], answer: str) -> dict[str, Any]:
    """A conversation with its answer."""
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def text_record(prompt: str, answer: str) -> dict[str, Any]:
    """A text and how it went on."""
    return {"text": prompt + answer}
