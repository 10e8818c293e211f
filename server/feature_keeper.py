"""Features kept beside the traffic, opt-in: the target's states of the answers that are kept.

They are what `train-draft --follow` would have the target read again. States tell of a text what
the text itself does, so nothing is kept of a request whose text is not. An eighth of the limit is
for texts, which training can do with alone; the features have the rest, and what is oldest goes
first. Files are written by the recorder's thread; states that wait for it are bounded, too.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import Any

from specctl.core.storage.kept_features import (
    AnswerFeatures,
    feature_files,
    key_of,
    number_of,
    sweep_halves,
    text_key,
)
from specctl.core.storage.traffic_files import Writer, segments
from specctl.runtime.engine.row_features import RowFeatures
from specctl.server.logs import log
from specctl.server.traffic import TrafficKeeper

TEXT_SHARE = 8  # an eighth of the limit
MOST_WAITING = 256 << 20  # bytes of states that wait to be written
HEADER = 4096  # bytes of a file beside its states and ids, at most


class FeatureKeeper(TrafficKeeper):
    """Keeps at most `limit` bytes of texts and features in `folder`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.room = limit - limit // TEXT_SHARE
        self.features_kept = self.features_dropped = 0
        self._waiting, self._lock = 0, Lock()
        self._files: dict[Path, int] = {}  # bytes of each, the oldest first
        self._writer = Writer("", "")
        super().__init__(folder, limit // TEXT_SHARE)
        sweep_halves(folder)
        self._files = {path: path.stat().st_size for path in feature_files(folder)}
        self._drop_orphans()
        self._make_room(0)

    def begin(self, writer: Writer) -> None:
        super().begin(writer)
        self._writer = writer

    def _kept_beside(self) -> list[Path]:
        """None: features have a share of their own."""
        return []

    def _evict(self) -> None:
        super()._evict()
        self._drop_orphans()

    def _drop_orphans(self) -> None:
        """Features outlive no text, evicted here or deleted by hand: they say what it said. Texts
        may come without features, so that their own share does not see to it."""
        if not self._files:
            return
        here = set[str]()
        for path in segments(self.folder):
            here.update(map(text_key, path.read_bytes().splitlines()))
        for path in [path for path in self._files if key_of(path) not in here]:
            del self._files[path]
            path.unlink(missing_ok=True)

    def put(self, record: dict[str, Any], features: RowFeatures | None = None) -> None:
        if features is not None and not self._takes(features.nbytes):
            features = None
            self.features_dropped += 1
        super().put(record, features)

    def _takes(self, size: int) -> bool:
        """Whether so many bytes may wait; they are counted then."""
        with self._lock:
            if self._waiting + size > min(MOST_WAITING, self.room):
                return False
            self._waiting += size
        return True

    def _let_go(self, features: RowFeatures | None) -> None:
        if features is not None:
            with self._lock:
                self._waiting -= features.nbytes

    def _keep(self, line: bytes, features: RowFeatures | None) -> None:
        if features is None or not features.parts:
            return
        ids = tuple(features.tokens)
        size = features.nbytes + 8 * len(ids) + HEADER
        try:
            if size > self.room:
                self.features_dropped += 1
                return
            states = features.states()
            found = AnswerFeatures(self._writer, ids, features.prompt_len, states)
            self._make_room(size)
            number = 1 + max(map(number_of, self._files), default=0)
            path = found.write(self.folder, number, line)
            self._files[path] = path.stat().st_size
            self.features_kept += 1
        except Exception as error:  # such as no memory for a copy: the texts go on being kept
            self.features_dropped += 1
            if self.features_dropped == 1:
                log("features_failed", logging.WARNING, error=str(error))

    def _make_room(self, size: int) -> None:
        """For a file of so many bytes, by what is oldest."""
        total = sum(self._files.values()) + size
        for path in list(self._files):
            if total <= self.room:
                return
            total -= self._files.pop(path)
            path.unlink(missing_ok=True)
