"""Where training text comes from: this machine's sources, files, folders, parquet, hub data sets.

A source yields `Sample`s, either raw text or a conversation. A record that cannot be used is noted
in `Defects` with its file and line and left out; if none can be used, that is an error.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, NetworkError, RecipeError, nearest
from specctl.core.installed import library
from specctl.runtime.measure.reporter import Reporter
from specctl.train.data.layouts import NO_CHOICES, FieldChoices
from specctl.train.data.records import Sample, parse_line, samples_of, without_nulls

LONGEST_LINE = 1 << 24  # bytes of a record; no context holds what is longer
TEXT, JSONL, PARQUET, HUB = "text", "jsonl", "parquet", "hub"
RECORDS = "records"  # a folder of record files, each read by its own suffix
SUFFIXES = {
    TEXT: (),
    JSONL: (".jsonl", ".json", ".ndjson"),
    PARQUET: (".parquet",),
    RECORDS: (".jsonl", ".json", ".ndjson", ".parquet"),
}
TABLES = (".csv", ".tsv")
ABOUT = ("readme", "license", "licence", "notice", "changelog")  # says nothing of a folder's kind


class Defects:
    """What was left out of the data, by reason, and where first. One writer: the job.
    `num_records` counts records and conversations alone, not files."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.num_records = 0

    def note(self, reason: str, where: str, count: int = 1, is_file: bool = False) -> None:
        self.counts[reason] += count
        self.num_records += 0 if is_file else count
        self.first.setdefault(reason, where)

    def add(self, other: Defects) -> None:
        """Count what others left out, too."""
        for reason, count in other.counts.items():
            self.counts[reason] += count
            self.first.setdefault(reason, other.first[reason])
        self.num_records += other.num_records

    def lines(self) -> list[str]:
        return [f"{n:,} x {why} (first: {self.first[why]})" for why, n in self.counts.items()]

    def tell(self, console: Reporter) -> None:
        for line in self.lines():
            console.warn(f"data left out: {line}")


def read_samples(
    source: str,
    format: str,
    split: str,
    seed: int,
    defects: Defects,
    choices: FieldChoices = NO_CHOICES,
) -> Iterator[Sample]:
    """Every usable sample of the source, in an order that depends on the source and seed alone.
    `choices`: what the user says of the records' fields."""
    if is_corpus(source):
        yield from _corpus(source, seed)
        return
    kind, path = check_source(source, format)
    if kind == HUB:
        yield from _hub(source, split, defects, choices)
        return
    for file in _files(path, kind, defects):
        reader = {TEXT: _text, JSONL: _jsonl, PARQUET: _parquet}[_kind_of(file, kind)]
        yield from reader(file, defects, choices)


def check_source(source: str, format: str) -> tuple[str, Path]:
    """The format of a source and its path; one that is nowhere here is refused."""
    path = Path(source).expanduser()
    if is_corpus(source):
        return TEXT, path
    kind = _kind(source, path) if format == "auto" else format
    if kind != HUB and not path.exists():
        raise _no_such_path(source, path)
    if format == "auto" and path.suffix.lower() in TABLES:
        raise FileError(
            "a table of this kind is not read as records",
            where="data.source",
            found=source,
            expected="JSONL or parquet with columns such as prompt and response, or text",
            do="write it as parquet: pandas.read_csv(FILE).to_parquet(...); or as plain text: "
            "--set data.format=text",
        )
    return kind, path


def _kind(source: str, path: Path) -> str:
    """The format of a source by its name, or by what a folder holds most of."""
    if path.is_dir():
        names = [p for p in _visible(path) if not p.stem.lower().startswith(ABOUT)]
        num_records = sum(p.suffix.lower() in SUFFIXES[RECORDS] for p in names)
        return RECORDS if 2 * num_records >= max(len(names), 1) else TEXT
    suffixes = (*SUFFIXES[RECORDS], ".txt", ".md", ".py")
    if path.exists() or path.suffix.lower() in suffixes:
        return _kind_of(path, RECORDS)
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    return TEXT if is_path else HUB


def _kind_of(file: Path, kind: str) -> str:
    """How a file is read: as the source says, or by its own suffix."""
    if kind != RECORDS:
        return kind
    if not file.suffix and file.is_file() and _begins_with_record(file):
        return JSONL
    found = (k for k in (JSONL, PARQUET) if file.suffix.lower() in SUFFIXES[k])
    return next(found, TEXT)


def _begins_with_record(file: Path) -> bool:
    """Whether the first line of a file without suffix is a JSON object."""
    with file.open("rb") as lines:
        try:
            return isinstance(parse_line(lines.readline(LONGEST_LINE)), dict)
        except ValueError:
            return False


def _visible(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, in order; what begins with a dot is left out."""
    return [
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    ]


def _files(path: Path, kind: str, defects: Defects) -> list[Path]:
    if path.is_file():
        return [path]
    suffixes, found = SUFFIXES[kind], []
    for file in _visible(path):
        if not suffixes or file.suffix.lower() in suffixes:
            found.append(file)
        elif not file.stem.lower().startswith(ABOUT):
            defects.note("file of another kind beside the data", str(file), is_file=True)
    if not found:
        raise FileError(
            f"the data folder holds no {kind} files",
            found=str(path),
            expected=" or ".join(f"at least one file *{suffix}" for suffix in suffixes)
            or "at least one file",
            do="give another folder, or set data.format",
        )
    return found


def _no_such_path(source: str, path: Path) -> FileError:
    parent = path.parent
    names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    close = f"; nearby: {nearest(path.name, names)}" if names else ""
    return FileError(
        "the data source does not exist",
        where="data.source",
        found=source + close,
        expected="'corpus', a file or folder, or a hub data set such as owner/name",
        do="correct data.source",
    )


def is_corpus(source: str) -> bool:
    """True for the text of this machine: "corpus", or a part of it such as "corpus:docstring"."""
    return source.partition(":")[0] == "corpus"


def _corpus(name: str, seed: int) -> Iterator[Sample]:
    from specctl.train.data.corpus import STDLIB, collect, part_of, shuffled

    for source in shuffled([s for s in collect() if s.split == "train"], seed):
        domain = "standard library" if source.distribution == STDLIB else "packages"
        text = part_of(source.text, name.partition(":")[2])
        if text:
            yield Sample(f"{source.distribution}:{source.name}", domain, text=text)


def _text(path: Path, defects: Defects, choices: FieldChoices) -> Iterator[Sample]:
    """One file is one document; its domain is its folder."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        defects.note("file is not UTF-8 text", f"{path}: byte {error.start}", is_file=True)
        return
    if text.strip():
        yield Sample(str(path), path.parent.name, text=text)
    else:
        defects.note("empty file", str(path), is_file=True)


def _jsonl(path: Path, defects: Defects, choices: FieldChoices) -> Iterator[Sample]:
    """A record per line, or a file that is one JSON list of records."""
    listed = _json_list(path)
    for number, record in enumerate(listed or (), start=1):
        yield from _usable(record, f"{path}: record {number}", path.stem, defects, choices)
    if listed is not None:
        return
    if path.stat().st_size == 0:
        defects.note("empty file", str(path), is_file=True)
    for where, line in _lines(path, defects):
        try:
            record = parse_line(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            defects.note(f"line is not JSON: {type(error).__name__}", where)
        except ValueError as error:
            defects.note(str(error), where)
        else:
            yield from _usable(record, where, path.stem, defects, choices)


def _lines(path: Path, defects: Defects) -> Iterator[tuple[str, bytes]]:
    """Place and bytes of every line that is not empty; one that is too long is never held."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line, where = file.readline(LONGEST_LINE + 1), f"{path}:{number}"
            if not line:
                return
            if len(line.removesuffix(b"\n")) > LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)
                defects.note(f"line is longer than {LONGEST_LINE:,} bytes", where)
            elif line.strip():
                yield where, line


def _json_list(path: Path) -> list[Any] | None:
    """The records of a file that holds one JSON list; None for every other file."""
    with path.open("rb") as file:
        if not file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return None
    try:
        found = parse_line(path.read_bytes())
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _parquet(path: Path, defects: Defects, choices: FieldChoices) -> Iterator[Sample]:
    parquet = library("pyarrow.parquet", "this data source", "data")
    from pyarrow.lib import ArrowException

    row = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in _records(batch):
                row += 1
                record = without_nulls(record)
                yield from _usable(record, f"{path}: row {row}", path.stem, defects, choices)
    except (OSError, ArrowException) as error:
        raise FileError(
            "a parquet file cannot be read",
            where=str(path),
            found=f"after {row:,} rows: {str(error).splitlines()[0][:200]}",
            expected="a whole parquet file",
            do="write or download the file again",
        ) from error


def _records(batch: Any) -> Iterator[Any]:
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
            yield error


def _hub(source: str, split: str, defects: Defects, choices: FieldChoices) -> Iterator[Sample]:
    """`owner/name[@revision][:config]`, through the `datasets` library."""
    datasets = library("datasets", "this data source", "data")
    head, _, config = source.partition(":")
    repo, _, revision = head.partition("@")
    try:
        rows = datasets.load_dataset(repo, config or None, split=split, revision=revision or None)
    except ValueError as error:
        raise RecipeError(
            "the hub data set has no such part",
            where="data.source, data.split",
            found=f"{source} split {split}: {error}",
            expected="owner/name[@revision][:config] and one of its splits",
            do="correct data.source or data.split",
        ) from error
    except OSError as error:
        raise NetworkError(
            f"cannot load the hub data set {repo!r}",
            found=f"{type(error).__name__}: {error}",
            expected="a reachable hub that has this data set and lets you read it",
            do="check the name and the connection, or download it and set data.source to the "
            "files; data.source=corpus needs no network",
        ) from error
    for number, record in enumerate(rows):
        record = without_nulls(record)
        yield from _usable(record, f"{repo}: row {number}", repo, defects, choices)


def _usable(
    record: Any, where: str, domain: str, defects: Defects, choices: FieldChoices
) -> Iterator[Sample]:
    try:
        if isinstance(record, Exception):
            raise ValueError(f"record cannot be read: {type(record).__name__}")
        yield from samples_of(record, where, domain, choices)
    except ValueError as error:
        defects.note(str(error), where)
