"""Files that are whole or absent: written beside their place, flushed, renamed, their folder
flushed; hashed. Every system call that can fail is one that a test can make fail. No torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, ResourceError

SLACK = 1.2  # free space required, times the size of what will be written


class Disk:
    """What a save needs of the operating system."""

    def free(self, folder: Path) -> int:
        """Bytes that an ordinary user may still write."""
        return shutil.disk_usage(folder).free

    def mkdir(self, folder: Path) -> None:
        folder.mkdir()

    def open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def replace(self, source: Path, to: Path) -> None:
        os.replace(source, to)

    def symlink(self, to: str, path: Path) -> None:
        os.symlink(to, path)

    def fsync_path(self, path: Path) -> None:
        """Flush a file or a folder that somebody else has written."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def write_file(disk: Disk, path: Path, chunks: Iterator[memoryview]) -> FileEntry:
    """Write, fsync and hash a new file."""
    digest, total = hashlib.sha256(), 0
    descriptor = disk.open(path)
    try:
        for chunk in chunks:
            digest.update(chunk)
            total += len(chunk)
            while len(chunk):
                chunk = chunk[disk.write(descriptor, chunk) :]
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(total, digest.hexdigest())


def write_whole(disk: Disk, path: Path, body: bytes) -> FileEntry:
    """Write or replace a file: a reader sees the old one, none, or the whole new one, also after
    a power cut. What a killed writer of the same file left beside it is removed."""
    with naming(path, len(body), f"the file {path.name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return replace_file(disk, path, body)


def replace_file(disk: Disk, path: Path, body: bytes) -> FileEntry:
    """The same in a folder that is there; the operating system's errors are raised as they are."""
    half = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
    for left in [p for p in path.parent.iterdir() if half.fullmatch(p.name)]:
        left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        entry = write_file(disk, beside, iter([memoryview(body)]))
        disk.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    disk.fsync_path(path.parent)
    return entry


def write_bytes(path: Path, body: bytes) -> None:
    """Atomic on POSIX: a reader sees the old file, no file, or the whole new one."""
    write_whole(Disk(), path, body)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(fields, indent=2, ensure_ascii=True) + "\n").encode())


def file_entry(path: Path) -> FileEntry:
    """Size and hash of a file as it lies on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def sha256_file(path: Path) -> str:
    return file_entry(path).sha256


def digest_of(fields: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of the fields."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def naming(path: Path, need: int, what: str) -> Iterator[None]:
    """Turn an operating-system error of a save into one that names path and need."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"no room to save {what}",
                found=str(error),
                expected=f"{int(SLACK * need):,} free bytes for {need:,} bytes of it",
                do="free space on that file system; the same command goes on from the last save",
                where=str(path),
            ) from error
        raise FileError(
            f"cannot save {what}",
            found=str(error),
            expected=f"to write {need:,} bytes",
            do="check the folder's rights and disk; the same command goes on from the last save",
            where=str(path),
        ) from error
