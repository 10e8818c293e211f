"""The records of a file of JSON, one after the other, in bounded memory.

Three ways in which people keep them: one record a line; records over many lines, one after the
other or in a list; an object that holds the list, such as {"data": [...]} or {"train": [...]}.
A place that cannot be read is yielded as a ValueError in place of its record, and reading goes on
where the next record begins.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from specctl.core.errors import FileError
from specctl.train.data.files.splits import no_split
from specctl.train.data.files.streams import BROKEN, opened

LONGEST_LINE = 1 << 24  # bytes of a record; no context holds what is longer
MOST_SKIPPED = 1 << 26  # bytes of a record that is not held, behind which a file is not read on
CHUNK = 1 << 16  # characters that are read at once
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval")
LISTS = (
    "data", "instances", "rows", "records", "examples", "samples", "items", "dataset", "entries",
    "dialogues", "dialogs", "questions", "prompts", *SPLITS,
)  # fmt: skip
TURN = ("role", "from", "speaker")  # a list of objects with one of these is one conversation

EMPTY = "empty file"
CUT = "the file ends within it"
NO_TEXT = "record is not UTF-8 text"

_BLANK = re.compile(r"[\s,]*")
_SCALAR = r'"(?:[^"\\]|\\.)*"|[-+\w.]+'
_FIELDS = rf'(?:\s*"(?:[^"\\]|\\.)*"\s*:\s*(?:{_SCALAR})\s*,)*?'
_ROWS = rf'\[(?=\s*[{{\]])(?!\s*\{{\s*"(?:{"|".join(TURN)})")'  # of objects that are no turns
_NAME = rf'\s*"(?P<name>{"|".join(LISTS)})"\s*:\s*{_ROWS}'
_FIRST_LIST = re.compile(r"\s*\{" + _FIELDS + _NAME)
_NEXT_LIST = re.compile(r"\s*," + _FIELDS + _NAME)
_NO_UTF8 = re.compile("[\udc80-\udcff]")

Read = tuple[str, Any]  # the place of a record, and its value or the ValueError instead


def json_records(path: Path, split: str | None = None) -> Iterator[Read]:
    """Place and value of every record. `split`: which one of lists that are named after splits; all
    of them by default. RecipeError where there is no such list."""
    if _is_document(path):
        yield from _document(path, split)
    else:
        yield from _lines(path)


def holds_splits(path: Path) -> bool:
    """Whether a file holds lists that are named after splits."""
    try:
        with opened(path) as file:
            found = _FIRST_LIST.match(file.read(CHUNK).decode(errors="ignore"))
    except BROKEN:
        return False
    return found is not None and found["name"] in SPLITS


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError says why there is none."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("line is nested too deep") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one that says two things by one name says nothing that can be relied on."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key[:40]!r} stands twice in one object")
        found[key] = value
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs)


# -- one record a line ----------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[Read]:
    is_empty = True
    for where, line in _raw_lines(path):
        is_empty = False
        yield where, line if isinstance(line, ValueError) else _parsed_line(line)
    if is_empty:
        yield str(path), ValueError(EMPTY)


def _parsed_line(line: bytes) -> Any:
    try:
        return parsed(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        is_cut = isinstance(error, json.JSONDecodeError) and not line.endswith(b"\n")
        return ValueError(f"line is not JSON: {type(error).__name__}" + f", {CUT}" * is_cut)
    except ValueError as error:
        return error


def _raw_lines(path: Path) -> Iterator[tuple[str, bytes | ValueError]]:
    """Place and bytes of every line that is not empty; one that is too long is never held."""
    with opened(path) as file:
        for number in itertools.count(1):
            where = f"{path}:{number}"
            try:
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                is_long = len(line.removesuffix(b"\n")) > LONGEST_LINE
                skipped = len(line)
                while is_long and line and not line.endswith(b"\n") and skipped < MOST_SKIPPED:
                    line = file.readline(LONGEST_LINE)
                    skipped += len(line)
            except BROKEN as error:
                yield where, broken_off(error)
                return
            if is_long:
                yield where, ValueError(f"line is longer than {LONGEST_LINE:,} bytes")
                if skipped >= MOST_SKIPPED:
                    return
            elif line.strip():
                yield where, line


def broken_off(error: BaseException) -> ValueError:
    """What is said of a file that could be read up to a place."""
    why = "its text cannot be decoded" if isinstance(error, UnicodeDecodeError) else str(error)
    return ValueError(f"the file breaks off: only what stands before is read ({why[:120]})")


# -- records over many lines ----------------------------------------------------------------------


def _is_document(path: Path) -> bool:
    """Whether records stand over many lines, or in a list: told by the first line, and where that
    is no JSON, by whether a record begins there."""
    lines = _raw_lines(path)
    _, first = next(lines, ("", b""))
    if isinstance(first, ValueError):
        return _begins_with_list(path)
    text = first.decode(errors="replace").lstrip()
    if not text.startswith(("[", "{")):
        return False
    try:
        value = parsed(text)
    except json.JSONDecodeError:
        _, record = next(_document(path, None), ("", None))
        return isinstance(record, dict) or str(record) == NO_TEXT
    except ValueError:
        return False
    if isinstance(value, list):
        return next(lines, None) is None
    return bool(_lists_in(value)) and next(lines, None) is None


def _lists_in(value: Any) -> list[str]:
    """The names under which an object, which is no record then, holds lists of records."""
    return [name for name in LISTS if isinstance(value, dict) and _is_rows(value.get(name))]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict) and not any(key in row for key in TURN) for row in value
    )


def _begins_with_list(path: Path) -> bool:
    """Of a file whose first line is too long to be held, or cannot be read."""
    try:
        with opened(path) as file:
            head = file.read(CHUNK).decode(errors="ignore")
    except BROKEN:
        return False
    return head.lstrip().startswith("[") or _FIRST_LIST.match(head) is not None


class _Text:
    """The text of a file from a place on, of which no more is held than is looked at. One user:
    `_document`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._reader = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        self.held, self.place, self.is_whole = "", 0, False
        self.broken: ValueError | None = None

    def more(self) -> bool:
        """Twice as much text; False where there is no more, or it would be too much."""
        held = len(self.held) - self.place
        size = max(CHUNK, held)
        if self.is_whole or held > LONGEST_LINE:
            return False
        try:
            read = self._reader.read(size)
        except BROKEN as error:
            self.broken, read = broken_off(error), ""
        self.held, self.place = self.held[self.place :] + read, 0
        self.is_whole = not read
        return bool(read)

    def skip(self) -> str:
        """The next character that is neither blank nor a comma; "" at the end."""
        while True:
            found = _BLANK.match(self.held, self.place)
            assert found is not None, "nothing is a match, too"
            self.place = found.end()
            if self.place < len(self.held) or not self.more():
                return self.held[self.place : self.place + 1]

    def matches(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What stands here, with as much text as one chunk."""
        if len(self.held) - self.place < CHUNK:
            self.more()
        found = pattern.match(self.held, self.place)
        if found is not None:
            self.place = found.end()
        return found

    def value(self) -> Any:
        """The value that begins here; ValueError where there is none, without moving on."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.held, self.place)
            except RecursionError:
                raise ValueError("record is nested too deep") from None
            except json.JSONDecodeError:
                if self.more():
                    continue
                raise
            if end == len(self.held) and self.more():
                continue  # a number may go on
            begun, self.place = self.place, end
            if _NO_UTF8.search(self.held, begun, end):
                return ValueError(NO_TEXT)
            return value

    def is_at_end(self) -> bool:
        """Whether nothing but the rest of an object stands here, behind a list of it."""
        while self.more():
            pass
        try:
            _, end = _DECODER.raw_decode('{"": 0' + self.held[self.place :])
        except (ValueError, RecursionError):
            return False
        return not self.held[self.place + end - len('{"": 0') :].strip()

    def indent(self) -> str:
        """The line break and blanks before this place; "" where other text stands before it."""
        line = self.held.rfind("\n", 0, self.place)
        before = self.held[line : self.place] if line >= 0 else ""
        return before if not before.strip() else ""

    def behind(self, mark: str) -> bool:
        """Move on to the next mark, behind this place; False where there is none."""
        if not mark:
            return False
        while True:
            found = self.held.find(mark, self.place + 1)
            if found >= 0:
                self.place = found
                return True
            self.place = max(self.place, len(self.held) - len(mark))
            if not self.more():
                return False


def _document(path: Path, split: str | None) -> Iterator[Read]:
    """The records of a file of records over many lines."""
    with opened(path) as file:
        text, wanted = _Text(file), _Wanted(path, split)
        text.more()
        found = text.matches(_FIRST_LIST)
        if found is None:
            is_list = text.skip() == "["
            text.place += is_list
            for where, value in _values(path, text, is_list):
                names = [] if is_list else _lists_in(value)
                for name in filter(wanted.takes, names):
                    yield from _rows_of(value[name], f"{path}: {name}")
                if not names:
                    yield where, value
            wanted.check()
            return
        while found is not None:
            is_taken, name = wanted.takes(found["name"]), found["name"]
            for read in _values(path, text, is_list=True, of=name):
                if is_taken:
                    yield read
            found = text.matches(_NEXT_LIST)
        wanted.check()
        if text.broken is None and not text.is_at_end():
            yield str(path), ValueError(f"what follows the list {name!r} is not read")


class _Wanted:
    """Which of the lists of a file are read, by their names. One user: `_document`."""

    def __init__(self, path: Path, split: str | None) -> None:
        self.path, self.split = path, split
        self.names, self.is_any = list[str](), False

    def takes(self, name: str) -> bool:
        self.names.append(name)
        is_taken = self.split is None or name not in SPLITS or name == self.split
        self.is_any |= is_taken
        return is_taken

    def check(self) -> None:
        """RecipeError where there are lists, but none by the name of the split."""
        if self.names and not self.is_any:
            raise no_split(str(self.path), str(self.split), dict.fromkeys(self.names))


def _rows_of(rows: list[Any], where: str) -> Iterator[Read]:
    for number, row in enumerate(rows, start=1):
        yield f"{where} record {number}", _row(row)


def _values(path: Path, text: _Text, is_list: bool, of: str = "") -> Iterator[Read]:
    """Values up to the end of the list, or of the text."""
    mark = ""
    for number in itertools.count(1):
        where = f"{path}: {of + ' ' if of else ''}record {number}"
        following = text.skip()
        if is_list and following == "]":
            text.place += 1
            return
        if not following:
            if text.broken is not None:
                yield where, text.broken
            elif is_list:
                yield where, ValueError("the list has no end: the file may be cut off")
            elif number == 1:
                yield str(path), ValueError(EMPTY)
            return
        mark = mark or text.indent() + following
        try:
            yield where, _row(text.value())
        except ValueError as error:
            yield where, _said_of(error, text)
            if not text.behind(mark if len(mark) > 1 else ""):
                _check_rest(where, text, error)
                return


def _said_of(error: ValueError, text: _Text) -> ValueError:
    if text.broken is not None:
        return text.broken
    if isinstance(error, json.JSONDecodeError):
        return ValueError("record is not JSON" + (f": {CUT}" if _is_cut(error, text) else ""))
    return error


def _is_cut(error: ValueError, text: _Text) -> bool:
    """Whether what begins here would be JSON, if the file did not end."""
    if not text.is_whole or not isinstance(error, json.JSONDecodeError):
        return False
    end = len(text.held.rstrip()) - len("\\u00e9")  # an escape is cut where it begins
    return error.msg.startswith("Unterminated") or error.pos >= end


def _check_rest(where: str, text: _Text, error: ValueError) -> None:
    """FileError where more records may follow one that cannot be read, and nothing says where."""
    if _is_cut(error, text) or text.broken is not None:
        return
    raise FileError(
        "a record of a JSON file cannot be read, and those behind it not either",
        where=where,
        found=str(error)[:200],
        expected="valid JSON",
        do="correct that record, or write one record a line: each then stands for itself",
    )


def _row(value: Any) -> Any:
    """A record; of the rows of the hub's viewer what they hold."""
    if isinstance(value, Mapping) and "row_idx" in value and isinstance(value.get("row"), Mapping):
        return value["row"]
    return value
