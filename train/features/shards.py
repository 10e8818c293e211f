"""Shards: features of the rows on disk, each file beside a manifest that is written after it.

OUT/features/KEY/shard-00007.safetensors and .json. KEY is a digest of all that decides the content.
A shard without a manifest, of another size or hash is none: it is never read, and written again.
The manifest's time says when the shard was last opened; the least recently used go first when
`data.features_gb` is reached. Letters: R rows of a shard, N their tokens.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specctl.core.storage.files import Disk, FileEntry, file_entry, write_whole
from specctl.train.saving.tensorfile import tensor_chunks

SCHEMA = "specctl.features/1"
SHARD_BYTES = 64_000_000
LEAST_ROWS = 8  # of a shard, however long they are: terabytes are then not millions of files
MOST_OPEN = 64  # shards of one process that stay mapped
READERS = 4  # threads that hash and read
OFFSETS = "offsets"
_NAME = "shard-" + 5 * "[0-9]"  # as a pattern: files that a user named alike are none of ours


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which rows lie in which shard: `each` rows in every one but the last."""

    num_rows: int
    each: int

    @classmethod
    def of(cls, num_rows: int, bytes_per_row: int) -> ShardLayout:
        fitting = max(LEAST_ROWS, SHARD_BYTES // max(1, bytes_per_row))
        return cls(num_rows, max(1, min(num_rows, fitting)))

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.each)

    def rows(self, shard: int) -> range:
        return range(shard * self.each, min(self.num_rows, (shard + 1) * self.each))

    def place(self, row: int) -> tuple[int, int]:
        """Shard of a row, and which of its rows it is."""
        return divmod(row, self.each)


class Shards:
    """The shards of one key. Several processes may write different shards; all may read. A shard's
    hash is checked once a process; the most recently read stay mapped."""

    def __init__(self, folder: Path, layout: ShardLayout, disk: Disk | None = None) -> None:
        self.folder, self.layout, self.disk = folder, layout, disk or Disk()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._whole: set[int] = set()
        self._absent: set[int] = set()
        self._locks: defaultdict[int, Lock] = defaultdict(Lock)
        self._lock = Lock()
        self._readers = ThreadPoolExecutor(READERS, "features")
        self._coming: dict[int, Future[dict[str, Tensor] | None]] = {}

    def file(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def manifest(self, shard: int) -> Path:
        return self.file(shard).with_suffix(".json")

    def write(self, shard: int, tokens: Mapping[str, Tensor], lengths: list[int]) -> int:
        """Keep the tokens of a shard's rows, one after the other; returns its bytes."""
        assert len(lengths) == len(self.layout.rows(shard)), f"shard {shard}: {len(lengths)} rows"
        entry = write_whole(self.disk, self.file(shard), packed(tokens, lengths))
        about = {"schema": SCHEMA, "bytes": entry.bytes, "sha256": entry.sha256}
        write_whole(self.disk, self.manifest(shard), json.dumps(about).encode())
        self._absent.discard(shard)
        self._whole.discard(shard)
        return entry.bytes

    def is_there(self, shard: int) -> bool:
        """Whether the shard was written to its end; its hash is checked when it is opened."""
        return self._is_here(shard)

    def read(self, row: int) -> dict[str, Tensor] | None:
        """What is kept of a row; None if its shard is not there or is damaged (it is dropped)."""
        shard, place = self.layout.place(row)
        file = self._opened(shard)
        if file is None:
            return None
        start, end = file.get_slice(OFFSETS)[place : place + 2].tolist()
        names = (name for name in file.keys() if name != OFFSETS)  # noqa: SIM118
        return {name: file.get_slice(name)[start:end].clone() for name in names}

    def ahead(self, rows: Sequence[int]) -> None:
        """Begin to read rows that will be asked for next, in other threads."""
        for row in rows:
            if row not in self._coming:
                self._coming[row] = self._begin(row)

    def read_rows(self, rows: Sequence[int]) -> list[dict[str, Tensor] | None]:
        """`read` of each, several at once."""
        coming = [
            self._coming.pop(row) if row in self._coming else self._begin(row) for row in rows
        ]
        return [future.result() for future in coming]

    def _begin(self, row: int) -> Future[dict[str, Tensor] | None]:
        return self._readers.submit(self.read, row)

    def _opened(self, shard: int) -> Any:
        with self._lock:
            own = self._locks[shard]
        with own:  # another thread may be hashing it
            with self._lock:
                if shard in self._open:
                    self._open.move_to_end(shard)
                    return self._open[shard]
                if shard in self._absent:
                    return None
            if not self._is_whole(shard):
                self._absent.add(shard)
                self.manifest(shard).unlink(missing_ok=True)
                return None
            file = self._open_file(shard)
            if file is None:
                return None
            with suppress(FileNotFoundError):
                os.utime(self.manifest(shard))
            with self._lock:
                self._open[shard] = file
                while len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)
            return file

    def _open_file(self, shard: int) -> Any:
        """The file of a whole shard; None if it has gone."""
        return safe_open(self.file(shard), framework="pt")

    def _is_here(self, shard: int) -> bool:
        """Whether a file of the right size lies in the folder."""
        entry, path = self._entry(shard), self.file(shard)
        return entry is not None and path.exists() and path.stat().st_size == entry.bytes

    def _is_whole(self, shard: int) -> bool:
        """Whether the file is the one that was written; hashed when first asked."""
        if not self._is_here(shard):
            return False
        if shard not in self._whole and file_entry(self.file(shard)) != self._entry(shard):
            return False
        self._whole.add(shard)
        return True

    def _entry(self, shard: int) -> FileEntry | None:
        try:
            return entry_of(self.manifest(shard).read_bytes())
        except OSError:
            return None


def packed(tokens: Mapping[str, Tensor], lengths: list[int]) -> bytes:
    """The file of a shard: the tokens of its rows, one after the other."""
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return b"".join(tensor_chunks({**tokens, OFFSETS: offsets}))


def entry_of(manifest: bytes) -> FileEntry | None:
    """What a manifest says of its file; None if it says nothing."""
    try:
        about = json.loads(manifest)
        return FileEntry(about["bytes"], about["sha256"]) if about["schema"] == SCHEMA else None
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard on disk, of any key: when it was last used, and its size."""

    used: float
    file: Path
    bytes: int

    def drop(self) -> None:
        """Manifest first, so that what a kill leaves is no shard."""
        self.file.with_suffix(".json").unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)


def kept_shards(root: Path) -> list[StoredShard]:
    """All whole shards under `root`, the least recently used first. Another process may drop one
    while they are listed."""
    found: list[StoredShard] = []
    for manifest in root.glob(f"*/{_NAME}.json"):
        file = manifest.with_suffix(".safetensors")
        with suppress(FileNotFoundError):
            found.append(StoredShard(manifest.stat().st_mtime, file, file.stat().st_size))
    return sorted(found, key=lambda shard: (shard.used, str(shard.file)))


def sweep(root: Path) -> None:
    """Remove what a killed writer left: half-written files, and shards without a manifest. Only
    while nobody writes."""
    for part in root.glob(f"*/.{_NAME}.*.tmp"):
        part.unlink(missing_ok=True)
    for file in root.glob(f"*/{_NAME}.safetensors"):
        if not file.with_suffix(".json").exists():
            file.unlink(missing_ok=True)


def make_room(root: Path, own: Collection[Path], wanted: int, cap: int) -> int:
    """Drop shards until those under `root` and `wanted` further bytes fit in `cap`, as far as they
    can: the least recently used first, of other keys before `own` ones, and own ones only while
    they alone are too many. Returns the bytes that may still be written."""
    shards = kept_shards(root)
    others = [shard for shard in shards if shard.file.parent not in own]
    mine = [shard for shard in shards if shard.file.parent in own]
    used = sum(shard.bytes for shard in shards)
    for candidates, most in ((others, cap - wanted), (mine, cap)):
        for shard in candidates:
            if used <= most:
                break
            shard.drop()
            used -= shard.bytes
    return max(0, cap - used)
