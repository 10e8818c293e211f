"""The rows of tables as records: CSV and TSV, parquet, Arrow files, tables of `datasets`."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError
from specctl.core.messages.installed import library
from specctl.train.data.files.json_records import EMPTY, LONGEST_LINE, Read, broken_off, parsed
from specctl.train.data.files.streams import BROKEN, content_suffix, opened

BATCH = 1024  # rows of a table that are held at once
# Columns whose cells are lists and objects; a table without such cells holds them as JSON text.
NESTED = (
    "messages", "conversations", "conversation", "turns", "tools", "chosen", "rejected", "history",
    "input_ids", "loss_mask",
)  # fmt: skip
INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # columns in which pandas counts rows
_NO_UTF8 = re.compile("[\udc80-\udcff]")


def table_records(path: Path) -> Iterator[Read]:
    """Place and values of every row of a CSV or TSV file, by the names in its first line. A cell
    that is empty says nothing. ValueError in place of a row that cannot be read."""
    with opened(path) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        try:
            header = text.readline(LONGEST_LINE)
            if not header.strip():
                yield str(path), ValueError(EMPTY)
                return
            dialect: dict[str, Any] = {"delimiter": _delimiter(path, header), "strict": True}
            names = _names(path, header, dialect)
            yield from _rows(path, text, names, dialect)
        except BROKEN as error:
            yield str(path), broken_off(error)


def _delimiter(path: Path, header: str) -> str:
    """What stands between the names of the columns, most often."""
    if content_suffix(path) == ".tsv":
        return "\t"
    return max(",;\t", key=lambda mark: header.count(mark))


def _names(path: Path, header: str, dialect: Mapping[str, Any]) -> list[str]:
    try:
        names = [name.strip() for name in next(csv.reader([header], **dialect))]
    except csv.Error as error:
        raise _bad_header(path, str(error)) from error
    twice = sorted({name for name in names if names.count(name) > 1 and not _counts_rows(name)})
    if twice:
        raise _bad_header(path, "twice: " + ", ".join(twice))
    return names


def _bad_header(path: Path, found: str) -> FileError:
    return FileError(
        "the first line of a table does not name its columns",
        where=f"{path}:1",
        found=found,
        expected="names such as prompt,response, each once",
        do="correct the first line, or learn the file as plain text: --set data.format=text",
    )


def _rows(
    path: Path, text: Iterable[str], names: list[str], dialect: Mapping[str, Any]
) -> Iterator[Read]:
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(text, **dialect)
    for number in itertools.count(1):
        where = f"{path}: row {number}"
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield where, ValueError(f"row cannot be read: {error}")
            continue
        if cells:
            yield where, _row(names, cells)


def _row(names: list[str], cells: list[str]) -> Any:
    if len(cells) != len(names):
        few = "more" if len(cells) > len(names) else "fewer"
        return ValueError(f"row has {few} columns than the first line names")
    if any(_NO_UTF8.search(cell) for cell in cells):
        return ValueError("row is not UTF-8 text")
    return {
        name: cell
        for name, cell in zip(names, cells, strict=True)
        if cell.strip() and not _counts_rows(name)
    }


def _counts_rows(name: str) -> bool:
    return INDEX.fullmatch(name) is not None


def decoded(record: Any) -> Any:
    """The record with lists and objects where it holds them as text, as JSON or as Python shows
    them; without the columns that only count rows. ValueError names a cell that is neither."""
    if not isinstance(record, Mapping):
        return record
    found = {key: value for key, value in record.items() if not _counts_rows(str(key))}
    for name in NESTED:
        value = found.get(name)
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            found[name] = _value(name, value)
        elif isinstance(value, list) and value and all(_is_object(one) for one in value):
            found[name] = [_value(name, one) for one in value]
    return found


def _is_object(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("{") and value.rstrip().endswith("}")


def _value(name: str, text: str) -> Any:
    try:
        return parsed(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"the text in {name!r} is no list in JSON") from None


def parquet_records(path: Path) -> Iterator[Read]:
    """Place and values of every row of a parquet file."""
    parquet = library("pyarrow.parquet", "this data source", "data")
    yield from _batches(
        path, "parquet", lambda: parquet.ParquetFile(path).iter_batches(batch_size=BATCH)
    )


def arrow_records(path: Path) -> Iterator[Read]:
    """Place and values of every row of a file that Arrow (and `datasets`) writes."""
    ipc = library("pyarrow.ipc", "this data source", "data")
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)

        def batches() -> Iterator[Any]:
            if not is_file:
                yield from ipc.open_stream(file)
                return
            reader = ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))

        yield from _batches(path, "Arrow", batches)


def _batches(path: Path, kind: str, batches: Any) -> Iterator[Read]:
    from pyarrow.lib import ArrowException

    row = 0
    try:
        for batch in batches():
            for record in batch_records(batch):
                row += 1
                yield f"{path}: row {row}", record
    except (OSError, ArrowException) as error:
        raise FileError(
            f"a{'n' * (kind == 'Arrow')} {kind} file cannot be read",
            where=str(path),
            found=f"after {row:,} rows: {str(error).splitlines()[0][:200]}",
            expected=f"a whole {kind} file",
            do="write or download the file again",
        ) from error


def batch_records(batch: Any) -> Iterator[Any]:
    """The rows of a batch; the error in place of a row with a value that Python has not, such as a
    time beyond the last year or text that is not UTF-8."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError):
        pass
    for row in range(batch.num_rows):
        try:
            yield from batch.slice(row, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            yield ValueError(f"record cannot be read: {type(error).__name__}")
