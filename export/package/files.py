"""What may lie in a package: names, kinds of files, hashes, safetensors headers, foreign configs.

Everything here is checked before any library is allowed to parse a file, and without torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, IntegrityError
from specctl.core.storage.model_folder import (
    READ_SUFFIXES,
    gguf_error,
    is_file_name,
    is_hub_link,
    is_inside,
    near_name,
    no_gguf_file,
    refuse_pointer,
)

MAX_HEADER_BYTES = 8 << 20
MAX_JSON_BYTES = 32 << 20

# fmt: off
PICKLE_SUFFIXES = frozenset({
    ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz",
    ".h5", ".hdf5", ".keras", ".msgpack",
})
# fmt: on
ARCHIVE_SUFFIXES = frozenset(
    [".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".whl", ".nemo"]
)
CODE_SUFFIXES = frozenset([".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh", ".exe"])

# Weights beside OpenVINO's XML: bare numbers, which nothing else reads by these names.
IR_WEIGHTS = frozenset(f"openvino_{name}.bin" for name in ("model", "tokenizer", "detokenizer"))

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
# What repositories hold beside a package, and nobody reads.
_INERT = re.compile(
    r"(licen[cs]e|notice|copying|use_policy)([._-].*)?|.*\.(png|jpe?g|gif|svg|webp|pdf)",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def check_name(name: str) -> None:
    """Refuse a file name that could mean anything but one plain file of the folder."""
    suffix = Path(name).suffix.lower()
    reason = ""
    if not _NAME.fullmatch(name) or name.endswith("."):
        reason = "only letters, digits, dot, dash and underscore may name a file"
    elif _DEVICE.fullmatch(name):
        reason = "it is the name of a device on some systems"
    elif suffix in PICKLE_SUFFIXES and name not in IR_WEIGHTS:
        reason = "files of this kind can run code when they are loaded"
    elif suffix in ARCHIVE_SUFFIXES:
        reason = "archives are not accepted"
    elif suffix in CODE_SUFFIXES:
        reason = "packages hold no code"
    if reason:
        raise IntegrityError(
            f"refused file name: {reason}",
            found=ascii(name[:150]),
            expected="safetensors, JSON, text or markdown with a plain name",
            do="get the package from its author again; convert pickled weights to safetensors",
        )


def is_inert(name: str) -> bool:
    """Whether a file of that name is a licence or a picture."""
    return _NAME.fullmatch(name) is not None and _INERT.fullmatch(name) is not None


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn a failure of the file system into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(
            "a file of the package cannot be read",
            found=os.strerror(error.errno) if error.errno else str(error)[:200],
            expected="readable files",
            do="check the rights of the folder and the disk",
            where=Path(error.filename or path).name,
        ) from error


def open_folder(path: Path) -> Path:
    """The real path of a folder; a file or a missing path is refused with the reason."""
    if path.is_dir():
        return path.resolve()
    if path.exists() and is_file_name(path):
        raise gguf_error(path)
    if path.exists():
        raise IntegrityError(
            "a package is a folder, not a file",
            found=path.name,
            expected="a folder with manifest.json, or a transformers folder with config.json",
            do="give the folder; unpack archives yourself after checking where they come from",
        )
    if is_file_name(path):
        raise no_gguf_file(path)
    raise FileError(
        "no such package folder",
        found=str(path),
        expected="an existing folder",
        do=f"{near_name(path)}, or train one with `specctl train-draft`",
    )


def list_files(folder: Path) -> dict[str, Path]:
    """Every visible file of a package by name; links that leave it and non-files are refused.
    Folders are nobody's business here: no file in them is read.

    The hub cache is the one exception: there a snapshot links into the blobs of its repository.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() and not is_hub_link(path):
            raise _refused(path, "a symbolic link", "regular files")
        if not stat.S_ISREG(path.stat().st_mode):
            raise _refused(path, "not a regular file", "regular files in one flat folder")
        if not path.name.startswith("."):
            found[path.name] = path
    return found


def model_files(folder: Path) -> dict[str, Path]:
    """The files that are read of a foreign model's folder, by name: its JSON, texts, tokenizer and
    safetensors. One that is a link out of the folder, or no file, is refused; whatever else lies
    there (pictures, pickles, other formats, folders) is left alone."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix.lower() not in READ_SUFFIXES:
            continue
        if path.is_dir():
            continue
        if path.is_symlink() and not (path.exists() and is_inside(path)):
            raise _refused(path, "a symbolic link", "regular files")
        if not stat.S_ISREG(path.stat().st_mode):
            raise _refused(path, "not a regular file", "regular files")
        found[path.name] = path
    return found


def _refused(path: Path, kind: str, expected: str) -> IntegrityError:
    return IntegrityError(
        f"the package contains {kind}",
        found=ascii(path.name),
        expected=expected,
        do="remove it, or copy the package again with real files",
    )


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a key written twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is written twice")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size; anything else is an IntegrityError."""
    return parse_json(read_bounded(path), path.name)


def read_bounded(path: Path) -> bytes:
    """The bytes of a file that is no larger than a JSON file may be."""
    refuse_pointer(path)
    with path.open("rb") as stream:
        raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise IntegrityError(
            "a JSON file is too large",
            found=f"more than {MAX_JSON_BYTES:,} bytes",
            expected="a few kilobytes",
            do="get the package again",
            where=path.name,
        )
    return raw


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys; anything else is an IntegrityError."""
    try:
        body = json.loads(raw, object_pairs_hook=no_duplicates)
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            "a JSON file cannot be read",
            found=_short(error),
            expected="a JSON object in UTF-8",
            do="get the package again",
            where=where,
        ) from error
    return body


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header of a safetensors file claims it."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, after proving that the header fits the file.

    Never reads more than the header, never trusts a size that the file does not back.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        limit = min(size - 8, MAX_HEADER_BYTES)
        if size < 8 or length > limit or length < 2:
            raise _bad_header(path, f"header of {length:,} bytes", f"2 to {max(limit, 2):,} bytes")
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        _check_metadata(header.pop("__metadata__", {}))
        spans = [(_span(name, entry), name) for name, entry in header.items()]
        _check_cover(spans, size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise _bad_header(
            path, _short(error), "a header that describes exactly the data"
        ) from error
    return {name: TensorEntry(e["dtype"], tuple(e["shape"])) for name, e in header.items()}


def _bad_header(path: Path, found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        "the safetensors header is not valid",
        found=found,
        expected=expected,
        do="get the file again; pickled weights must be converted by their author",
        where=path.name,
    )


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ is not a table of texts")


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _span(name: str, entry: object) -> tuple[int, int]:
    """Begin and end of a tensor's bytes, checked against its dtype and shape."""
    shown = ascii(name[:80])
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {shown} has unknown dtype {ascii(dtype)[:40]}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_count, shape)):
        raise ValueError(f"tensor {shown} has shape {ascii(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        raise ValueError(f"tensor {shown} has offsets {ascii(offsets)[:80]}")
    begin, end = offsets
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != need:
        raise ValueError(f"tensor {shown} needs {need:,} bytes, its offsets give {end - begin:,}")
    return begin, end


def _check_cover(spans: list[tuple[tuple[int, int], str]], num_bytes: int) -> None:
    """The tensors tile the data without gap, overlap or remainder."""
    at = 0
    for (begin, end), name in sorted(spans):
        if begin != at:
            raise ValueError(f"tensor {name[:80]!a} begins at {begin:,} instead of {at:,}")
        at = end
    if at != num_bytes:
        raise ValueError(f"the tensors end at {at:,}, the data at {num_bytes:,}")


def _short(error: BaseException) -> str:
    return ascii(str(error) or type(error).__name__)[1:-1][:200]
