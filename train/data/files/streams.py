"""A file of data as a stream of UTF-8 bytes, whatever way it is packed and encoded.

What a file is decides its first bytes, not its name: gzip, Zstandard, bzip2 and xz are unpacked
while they are read, UTF-16 and UTF-32 are told by their mark or their zero bytes.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from specctl.core.errors import FileError
from specctl.core.messages.installed import library
from specctl.core.storage.bounded_read import open_regular

PACKED = (".gz", ".zst", ".bz2", ".xz")  # suffixes that stand behind the one of the content
BROKEN = (EOFError, OSError, UnicodeDecodeError, zlib.error, lzma.LZMAError)  # while reading
CHUNK, HEAD = 1 << 16, 64

_GZIP, _ZSTD, _XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00"
_BZIP2 = re.compile(rb"BZh[1-9]1AY&SY")
_POINTER = b"version https://git-lfs.github.com/spec/"
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, or a workbook of Excel",
    b"\x80\x04": "a pickle of Python",
    b"\x80\x05": "a pickle of Python",
    b"%PDF": "a PDF",
    b"SQLite format 3\x00": "a SQLite database",
    bytes(HEAD): "zeros alone where it begins",
}


def content_suffix(path: Path) -> str:
    """The suffix of what a file holds, in small letters: ".jsonl" of x.jsonl and of x.jsonl.gz."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    return Path(name.removesuffix(packed)).suffix


def content_stem(path: Path) -> str:
    """The name of a file without these suffixes."""
    is_packed = path.suffix.lower() in PACKED
    return Path(path.stem).stem if is_packed else path.stem


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked, in UTF-8 and without its mark. FileError where it cannot be
    opened, or is nothing that holds text; one of BROKEN while reading where it breaks off."""
    with ExitStack() as open_files:
        try:
            file = open_files.enter_context(open_regular(path))
            head = file.read(HEAD)
            file.seek(0)
        except OSError as error:
            raise FileError(
                "the data cannot be read",
                where=str(path),
                found=error.strerror or type(error).__name__,
                expected="a file that you may read",
                do="correct the path or the file's permissions; standard input is written -",
            ) from error
        _check_kind(path, head)
        stream: Any = file
        unpack = _unpacker(path, head)
        if unpack is not None:
            stream = open_files.enter_context(unpack(file))
        yield _in_utf8(stream)


def _check_kind(path: Path, head: bytes) -> None:
    if head.startswith(_POINTER):
        raise FileError(
            "the file is a pointer of Git LFS, and its content was not downloaded",
            where=str(path),
            found=head.split(b"\n")[0].decode(errors="replace"),
            expected="the data themselves",
            do="git lfs pull   in that folder, or: hf download OWNER/NAME --repo-type dataset "
            "--local-dir FOLDER",
        )
    found = next((what for mark, what in _FOREIGN.items() if head.startswith(mark)), None)
    if found is not None:
        raise FileError(
            "the file holds no records and no text",
            where=str(path),
            found=found,
            expected="JSONL, JSON, CSV, parquet or text, plain or packed by gzip, zstd, bzip2, xz",
            do="unpack it and give the folder, or write its records as JSONL or parquet",
        )


def _unpacker(path: Path, head: bytes) -> Callable[[IO[bytes]], Any] | None:
    if head.startswith(_GZIP):
        return lambda file: gzip.GzipFile(fileobj=file)
    if _BZIP2.match(head):
        return bz2.BZ2File
    if head.startswith(_XZ):
        return lzma.LZMAFile
    if head.startswith(_ZSTD):
        arrow = library("pyarrow", f"{path.name}, packed by zstd,", "data", instead="unpack it")
        return lambda file: io.BufferedReader(arrow.input_stream(file, compression="zstd"))
    return None


def _in_utf8(stream: Any) -> Any:
    """The stream behind its byte order mark, and in UTF-8 where it is in UTF-16 or UTF-32."""
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    try:
        head = bytes(buffered.peek(4)[:4])
    except BROKEN:
        return buffered  # it fails again where it is read
    encoding = json.detect_encoding(head)
    if encoding in ("utf-16", "utf-32") or (encoding != "utf-8" and 0 in head):
        return io.BufferedReader(_Recoded(buffered, encoding))
    if head.startswith(codecs.BOM_UTF8):
        buffered.read(len(codecs.BOM_UTF8))
    return buffered


class _Recoded(io.RawIOBase):
    """The text of a stream in another encoding, as UTF-8."""

    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream, self._held = stream, b""
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._held:
            read = self._stream.read(CHUNK)
            self._held = self._decoder.decode(read, final=not read).encode()
            if not read:
                break
        size = min(len(room), len(self._held))
        room[:size], self._held = self._held[:size], self._held[size:]
        return size
