"""What a GGUF file says of itself: its fields, and where each tensor lies. No weight is read.

A file comes from anywhere, and may be cut short, damaged or made to harm: every count, length,
offset and alignment is held against the bytes that are there before memory is taken for it. A model
in parts (`NAME-00001-of-00003.gguf`) is one table over all of them. No torch.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.storage.model_folder import refuse_pointer

T = TypeVar("T")
MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
MOST_DIMENSIONS, LONGEST_KEY, LARGEST_ALIGNMENT = 4, 1 << 16, 1 << 20
DEFAULT_ALIGNMENT = 32
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
PROJECTOR = "mmproj"  # what the names of image parts begin with, by llama.cpp's converter
AGAIN = "fetch the file again, and wait until its download is whole"


@dataclass(frozen=True, slots=True)
class GgufKind:
    """A type of numbers: `weights` of a row at a time take `bytes`."""

    name: str
    weights: int
    bytes: int


# By the number that files have for them: the types that are read.
KINDS: Mapping[int, GgufKind] = {
    0: GgufKind("F32", 1, 4),
    1: GgufKind("F16", 1, 2),
    2: GgufKind("Q4_0", 32, 18),
    3: GgufKind("Q4_1", 32, 20),
    6: GgufKind("Q5_0", 32, 22),
    7: GgufKind("Q5_1", 32, 24),
    8: GgufKind("Q8_0", 32, 34),
    10: GgufKind("Q2_K", 256, 84),
    11: GgufKind("Q3_K", 256, 110),
    12: GgufKind("Q4_K", 256, 144),
    13: GgufKind("Q5_K", 256, 176),
    14: GgufKind("Q6_K", 256, 210),
    30: GgufKind("BF16", 1, 2),
}
# Types that are refused by their names.
OTHER_KINDS: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY, _FLOAT, _BOOL = 8, 9, 6, 7
# What other files begin with, for those that were given the wrong name.
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as PyTorch pickles are"),
    (b"\x80\x02", "a pickle"),
    (b"ggml", "GGML, a format before GGUF"),
    (b"lmgg", "GGML, a format before GGUF"),
    (b"tjgg", "GGJT, a format before GGUF"),
    (b"fmgg", "GGMF, a format before GGUF"),
    (b"<!DO", "a web page"),
    (b"<htm", "a web page"),
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where the numbers of a tensor lie: `offset` in bytes from the start of the file `path`.
    `shape` is as torch has it, rows first."""

    name: str
    shape: tuple[int, ...]
    kind: GgufKind
    offset: int
    path: Path

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count // self.kind.weights * self.kind.bytes

    @property
    def row_bytes(self) -> int:
        """Of one row, which is a whole number of blocks."""
        return self.shape[-1] // self.kind.weights * self.kind.bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A model in GGUF: the fields of its first part, the tensors of all `parts`."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str, "")

    @property
    def bytes(self) -> int:
        """Of all weights, as they are stored."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def weights(self) -> int:
        return sum(tensor.count for tensor in self.tensors.values())

    def kinds(self) -> dict[str, int]:
        """How many weights of each type there are, the most first."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.kind.name] = found.get(tensor.kind.name, 0) + tensor.count
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def get(self, key: str, kind: type[T], default: T) -> T:
        """A field; the default where it is absent. IntegrityError where it is of another kind."""
        if key not in self.fields:
            return default
        value = self.fields[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.damaged(f"{key} is of another kind", repr(value)[:80], kind.__name__)
        checked: T = value
        return checked

    def need(self, key: str, kind: type[T]) -> T:
        """A field that must be there."""
        if key not in self.fields:
            raise self.damaged(f"the file has no {key}", "no such field", kind.__name__)
        checked: T = self.get(key, kind, self.fields[key])
        return checked

    def damaged(self, what: str, found: str, expected: str = "") -> IntegrityError:
        """The error for a file that contradicts itself."""
        return _damaged(self.path, what, found, expected)


def is_gguf(path: Path) -> bool:
    """Whether a file is meant to be GGUF, by its name or its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """The model that a file is, or is a part of. Raises IntegrityError for a damaged file,
    IncompatibleError for one that is not read, FileError for a part that is not there."""
    parts = _parts(path)
    tables = [_read_file(part) for part in parts]
    first = tables[0]
    _check_parts(path, parts, tables)
    tensors: dict[str, GgufTensor] = {}
    for table in tables:
        for name, tensor in table.tensors.items():
            if name in tensors:
                raise _damaged(table.path, "a tensor is there twice", ascii(name)[:80])
            tensors[name] = tensor
    return GgufHeader(parts[0], first.fields, tensors, tuple(parts))


# -- parts -----------------------------------------------------------------------------------------


def part_names(name: str) -> list[str] | None:
    """The names of all parts of the model that a file name belongs to; None for a whole file."""
    match = PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    count = int(match["count"])
    end = name[-len(SUFFIX) :]
    return [f"{match['stem']}-{i:05}-of-{count:05}{end}" for i in range(1, count + 1)]


def models_in(folder: Path) -> list[Path]:
    """The models that the GGUF files of a folder are: one in parts by the name of its first part;
    the image part of a multimodal model (mmproj) is none."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == SUFFIX)
    firsts = [(part_names(name) or [name])[0] for name in names]
    models = [name for name in firsts if not name.lower().startswith(PROJECTOR)]
    return [folder / name for name in dict.fromkeys(models or firsts)]


def _parts(path: Path) -> list[Path]:
    names = part_names(path.name)
    if names is None:
        return [path]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileError(
            "a part of the model is missing",
            found=f"no {ascii(missing[0])[1:-1][:120]} ({len(missing)} of {len(names)} missing)",
            expected="every part in one folder",
            do="fetch the missing parts into the same folder",
            where=str(path.parent),
        )
    return [path.parent / name for name in names]


def _check_parts(path: Path, parts: list[Path], tables: list[GgufHeader]) -> None:
    """Each part is that of its place in this very model."""
    if len(parts) == 1 and tables[0].get("split.count", int, 0) > 1:
        count, number = tables[0].fields["split.count"], tables[0].get("split.no", int, 0) + 1
        raise FileError(
            "the file is one part of a model, and its name does not say of which",
            found=f"part {number} of {count}",
            expected=f"NAME-{number:05}-of-{count:05}.gguf beside the others",
            do="give the parts the names that they had where they were published",
            where=str(path),
        )
    if len(parts) == 1:
        return
    for number, table in enumerate(tables):
        is_its_place = table.get("split.no", int, -1) == number
        if not is_its_place or table.get("split.count", int, -1) != len(parts):
            raise _damaged(
                table.path,
                "the part belongs to another model or another place",
                f"split.no {table.fields.get('split.no')}, "
                f"split.count {table.fields.get('split.count')}",
                f"split.no {number}, split.count {len(parts)}",
            )
    expected = tables[0].get("split.tensors.count", int, -1)
    there = sum(len(table.tensors) for table in tables)
    if expected != there:
        raise _damaged(
            path, "the parts are not those of one model", f"{there} tensors", f"{expected} tensors"
        )


# -- one file --------------------------------------------------------------------------------------


def _damaged(path: Path, what: str, found: str, expected: str = "") -> IntegrityError:
    return IntegrityError(what, found=found, expected=expected, do=AGAIN, where=str(path))


class _Reader:
    """The bytes of a file one after the other; none is taken that is not there."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self.stream, self.path, self.size, self.at = stream, path, size, 0

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        found = self.stream.read(count)
        if len(found) != count:
            raise self.short(what, self.at + count)
        self.at += count
        return found

    def check(self, count: int, what: str) -> None:
        """Refuse a length that the file cannot hold."""
        if count > self.size - self.at:
            raise self.short(what, self.at + count)

    def short(self, what: str, needed: int) -> IntegrityError:
        return _damaged(
            self.path,
            f"the GGUF file ends within {what}: it is cut short, or damaged",
            f"{self.size:,} bytes",
            f"at least {needed:,} bytes",
        )

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        length = self.number("<Q", what)
        if most is not None and length > most:
            raise _damaged(self.path, f"{what} is too long", f"{length:,} bytes", f"{most:,}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self.path, f"{what} is no text", "other bytes", "UTF-8") from None


def _read_file(path: Path) -> GgufHeader:
    """One file of a model, its tensors held against its bytes."""
    try:
        if not path.is_file():
            raise FileError(
                "the GGUF file is not there, or is no file",
                found=ascii(str(path)),
                expected="a regular file",
                do="check the path",
            )
        refuse_pointer(path)
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _read(_Reader(stream, path, size))
    except OSError as error:
        raise FileError(
            "the GGUF file cannot be read",
            found=str(error.strerror or error)[:120],
            do="check that it may be read, and that the disk is there",
            where=str(path),
        ) from None


def _read(reader: _Reader) -> GgufHeader:
    path = reader.path
    _check_magic(reader)
    _check_version(reader)
    num_tensors = reader.number("<Q", "its header")
    num_fields = reader.number("<Q", "its header")
    reader.check(13 * num_fields, "its fields")  # a key, its type and a byte of value each
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.text("the name of a field", LONGEST_KEY)
        if key in fields:
            raise _damaged(path, "a field is there twice", ascii(key)[:80])
        fields[key] = _value(reader, ascii(key)[1:-1][:80])
    reader.check(33 * num_tensors, "its table of tensors")
    listed = [_tensor(reader) for _ in range(num_tensors)]
    alignment = _alignment(path, fields)
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        if name in tensors:
            raise _damaged(path, "a tensor is there twice", ascii(name)[:80])
        if offset % alignment:
            found = f"{ascii(name)[:80]} at {offset:,}"
            raise _damaged(path, "a tensor is not aligned", found, f"a multiple of {alignment}")
        tensors[name] = GgufTensor(name, shape, kind, start + offset, path)
    _check_places(reader, tensors.values())
    return GgufHeader(path, fields, tensors, (path,))


def _check_magic(reader: _Reader) -> None:
    first = reader.take(min(4, reader.size), "its header")
    if first == MAGIC:
        return
    seen = next((what for start, what in _OTHER_FORMATS if first.startswith(start)), None)
    if seen is None and len(first) == 4 and b"{" in reader.stream.read(8)[:5]:
        seen = "safetensors"
    raise IntegrityError(
        "the file is not GGUF",
        found=seen or (f"a file that begins with {first!r}" if first else "an empty file"),
        expected="a file that begins with GGUF",
        do="give the folder of the model where it is safetensors with config.json; else " + AGAIN,
        where=str(reader.path),
    )


def _check_version(reader: _Reader) -> None:
    version = reader.number("<I", "its header")
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    is_big = swapped in (1, *VERSIONS)
    raise IncompatibleError(
        "the GGUF file is big-endian" if is_big else f"GGUF of version {version} is not read",
        found=f"version {swapped if is_big else version}"
        + (" in big-endian order" if is_big else ""),
        expected=f"version {' or '.join(map(str, VERSIONS))}, little-endian",
        do="convert the model anew with llama.cpp's convert_hf_to_gguf.py"
        + (" without --bigendian" if is_big else " of today"),
        where=str(reader.path),
    )


def _value(reader: _Reader, key: str) -> Any:
    kind = reader.number("<I", key)
    if kind == _STRING:
        return reader.text(key)
    if kind != _ARRAY:
        return _plain(reader.take(_width(reader, kind, key), key), kind)
    inner, count = reader.number("<I", key), reader.number("<Q", key)
    if inner == _STRING:
        reader.check(8 * count, key)
        return [reader.text(key) for _ in range(count)]
    width = _width(reader, inner, key)
    raw = reader.take(width * count, key)
    code = _SCALARS[inner]
    return [
        _shortest(value) if inner == _FLOAT else value for (value,) in struct.iter_unpack(code, raw)
    ]


def _width(reader: _Reader, kind: int, key: str) -> int:
    if kind not in _SCALARS:
        what = "an array of arrays" if kind == _ARRAY else f"type {kind}"
        raise _damaged(reader.path, f"the field {key} is of a kind that no model has", what)
    return struct.calcsize(_SCALARS[kind])


def _plain(raw: bytes, kind: int) -> Any:
    value = struct.unpack(_SCALARS[kind], raw)[0]
    return _shortest(value) if kind == _FLOAT else value


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 of a configuration, not 9.9999997e-06."""
    for digits in range(6, 10):
        near = float(f"{value:.{digits}g}")
        if struct.pack("<f", near) == struct.pack("<f", value):
            return near
    return value


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], GgufKind, int]:
    name = reader.text("the name of a tensor", LONGEST_KEY)
    shown = ascii(name)[1:-1][:80]
    dimensions = reader.number("<I", shown)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        found, most = f"{shown}: {dimensions:,}", f"1 to {MOST_DIMENSIONS}"
        raise _damaged(reader.path, "a tensor has a wrong number of dimensions", found, most)
    sizes = [reader.number("<Q", shown) for _ in range(dimensions)]
    number, offset = reader.number("<I", shown), reader.number("<Q", shown)
    kind = KINDS.get(number)
    if kind is None:
        raise IncompatibleError(
            "the file has weights of a type that is not read",
            found=f"{shown} in {OTHER_KINDS.get(number, f'type {number}')}",
            expected="one of " + ", ".join(kind.name for kind in KINDS.values()),
            do="take another file of the same model, such as Q4_K_M or Q8_0",
            where=str(reader.path),
        )
    if 0 in sizes or sizes[0] % kind.weights:
        found = f"{shown}: {sizes} in {kind.name}"
        raise _damaged(
            reader.path, "a tensor has a wrong shape", found, f"rows of whole {kind.weights}"
        )
    return name, tuple(reversed(sizes)), kind, offset


def _alignment(path: Path, fields: Mapping[str, Any]) -> int:
    found = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(found) is int and 0 < found <= LARGEST_ALIGNMENT and not found & (found - 1)
    if not is_power or found < 8:
        expected = f"a power of two from 8 to {LARGEST_ALIGNMENT:,}"
        raise _damaged(path, "general.alignment is wrong", repr(found)[:40], expected)
    return int(found)


def _check_places(reader: _Reader, tensors: Iterable[GgufTensor]) -> None:
    """Every tensor lies within the file, and none in another."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda one: one.offset):
        shown = ascii(tensor.name)[1:-1][:80]
        if tensor.offset < end:
            found = f"{shown} begins within {before}"
            raise _damaged(reader.path, "tensors overlap", found, "each in a place of its own")
        end, before = tensor.offset + tensor.bytes, shown
        if end > reader.size:
            raise reader.short(f"the numbers of {shown}", end)
