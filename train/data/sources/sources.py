"""Where training text comes from: this machine's sources, files, folders, tables, hub data sets,
and the target itself (`written/self_prompts.py` writes what is then read as a file).

A source yields `Sample`s, either raw text or a conversation. A record that cannot be used is noted
in `Defects` with its file and line and left out; if none can be used, that is an error. Of several
sources a record of each is read in turn.
"""

from __future__ import annotations

import glob
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, RecipeError, SpecctlError, nearest
from specctl.train.data.files.hub_sets import hub_rows, saved_rows
from specctl.train.data.files.json_records import Read, holds_splits, json_records
from specctl.train.data.files.splits import ALL, DEFAULT, folder_splits, is_about, no_split
from specctl.train.data.files.streams import BROKEN, content_stem, content_suffix, opened
from specctl.train.data.files.tables import (
    arrow_records,
    decoded,
    parquet_records,
    table_records,
)
from specctl.train.data.records.layouts import NO_CHOICES, FieldChoices
from specctl.train.data.records.record_images import resolved
from specctl.train.data.records.records import Sample, samples_of, without_nulls
from specctl.train.data.sources.defects import Defects

__all__ = ["DataSource", "check_source", "find_source", "read_samples"]

TEXT, JSONL, PARQUET, CSV, ARROW = "text", "jsonl", "parquet", "csv", "arrow"  # of a file
RECORDS = "records"  # a folder of record files, each read by its own suffix
CORPUS, HUB, SAVED = "corpus", "hub", "saved"  # saved: what `datasets` wrote with save_to_disk
SELF = "self"  # questions that the target writes; a file of that name is ./self
SUFFIXES = {
    JSONL: (".jsonl", ".json", ".ndjson", ".jsonlines"),
    PARQUET: (".parquet",),
    CSV: (".csv", ".tsv"),
    ARROW: (".arrow",),
}
KIND_OF = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
PROSE = (".txt", ".text")  # may hold anything, records as well
# By one of these a record in a file of text is told from another object in JSON.
KEYS = (
    "messages", "conversations", "conversation", "turns", "prompt", "instruction", "question",
    "text", "chosen", "input_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DataSource:
    """What one name in data.source stands for: its kind, and the files that are read, each with
    its own kind."""

    name: str
    kind: str
    path: Path
    files: tuple[tuple[Path, str], ...] = ()
    split: str | None = None  # that the files belong to; None: they belong to none
    domain: str = ""  # of its records; "": the name of their file
    left: tuple[tuple[str, str], ...] = ()  # what is not read: reason and file
    remarks: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """On this disk; None of what is not here."""
        if self.kind in (CORPUS, HUB, SELF):
            return None
        return sum(file.stat().st_size for file, _ in self.files)

    @property
    def what(self) -> str:
        """In words: files and split."""
        if self.kind in (CORPUS, SELF):
            is_text = self.kind == CORPUS
            return "text of this machine" if is_text else "questions that the target writes itself"
        if self.kind == HUB:
            return f"split {self.split}"
        count = len(self.files)
        files = "1 file" if count == 1 else f"{count:,} files"
        return files if self.split is None else f"split {self.split}, {files}"


# -- all sources ----------------------------------------------------------------------------------


def names_of(source: str | Sequence[str]) -> tuple[str, ...]:
    """The names of one or several sources."""
    return (source,) if isinstance(source, str) else tuple(source)


def is_corpus(source: str | Sequence[str]) -> bool:
    """True for the text of this machine: "corpus", or a part of it such as "corpus:docstring"."""
    return all(name.partition(":")[0] == CORPUS for name in names_of(source))


def check_source(source: str | Sequence[str], format: str, split: str = DEFAULT) -> None:
    """Refuse a source that is nowhere here, and a split that its files do not have."""
    for name in names_of(source):
        find_source(name, format, split)


def read_samples(
    source: str | Sequence[str],
    format: str,
    split: str,
    seed: int,
    defects: Defects,
    choices: FieldChoices = NO_CHOICES,
) -> Iterator[Sample]:
    """Every usable sample of the source, in an order that depends on the source and seed alone; of
    several sources one of each in turn, until all are at their end. `choices`: what the user says
    of the fields of records."""
    names = names_of(source)
    for name, times in Counter(names).items():
        if times > 1:
            defects.remark(f"{name} is given {times} times, and read as often")
    found = [find_source(name, format, split) for name in names]
    running = [(one.name, _read(one, split, seed, defects, choices)) for one in found]
    while running:
        still = []
        for name, samples in running:
            sample = next(samples, None)
            if sample is not None:
                defects.took(name)
                yield sample
                still.append((name, samples))
        running = still


def _read(
    source: DataSource, split: str, seed: int, defects: Defects, choices: FieldChoices
) -> Iterator[Sample]:
    for remark in source.remarks:
        defects.remark(remark)
    for reason, where in source.left:
        defects.note(reason, where, is_file=True)
    if source.kind == SELF:
        raise unwritten("data.source")
    if source.kind == CORPUS:
        yield from _corpus(source.name, seed)
    elif source.kind in (HUB, SAVED):
        is_hub, domain = source.kind == HUB, source.domain
        rows = hub_rows(source.name, split) if is_hub else saved_rows(source.path, source.split)
        for number, record in enumerate(rows):
            record = without_nulls(record)
            for sample in _usable(record, f"{domain}: row {number}", domain, defects, choices):
                yield sample if is_hub else _beside(sample, source.path)
    else:
        for file, kind in source.files:
            yield from _samples_of(file, kind, source, split, defects, choices)


def _samples_of(
    file: Path,
    kind: str,
    source: DataSource,
    split: str,
    defects: Defects,
    choices: FieldChoices,
) -> Iterator[Sample]:
    if kind == TEXT:
        yield from _text(file, defects)
        return
    inside = None if source.split is not None or split == ALL else split
    for where, record in file_records(file, kind, inside):
        record = without_nulls(record) if kind in (PARQUET, ARROW) else record
        domain = source.domain or content_stem(file)
        for sample in _usable(record, where, domain, defects, choices):
            yield _beside(sample, file.parent)


def _beside(sample: Sample, folder: Path) -> Sample:
    """The sample with paths of images as they are from that folder."""
    if not sample.images:
        return sample
    return replace(sample, images=resolved(sample.images, folder))


def file_records(file: Path, kind: str, split: str | None = None) -> Iterator[Read]:
    """Place and value of every record of a file of that kind, a ValueError in place of one that
    cannot be read. `split`: of a file of JSON that holds several."""
    if kind == JSONL:
        return json_records(file, split)
    readers: Mapping[str, Callable[[Path], Iterator[Read]]] = {
        PARQUET: parquet_records, CSV: table_records, ARROW: arrow_records,
    }  # fmt: skip
    return readers[kind](file)


def _usable(
    record: Any, where: str, domain: str, defects: Defects, choices: FieldChoices
) -> Iterator[Sample]:
    try:
        if isinstance(record, ValueError):
            raise record
        yield from samples_of(decoded(record), where, domain, choices)
    except ValueError as error:
        defects.note(str(error), where)


# -- what a name stands for -----------------------------------------------------------------------


def find_source(name: str, format: str, split: str) -> DataSource:
    """What a name stands for; FileError where it is nowhere here, RecipeError where its files have
    no such split."""
    path = Path(name).expanduser()
    if is_corpus(name):
        return DataSource(name, CORPUS, path)
    if name == SELF:
        return DataSource(name, SELF, path)
    if format == HUB:
        return _of_hub(name, path, split)
    if path.is_dir():
        return _of_folder(name, path, "", format, split)
    if path.exists():
        return _of_files(name, path, [path], format, split)
    folder, _, config = name.rpartition(":")
    if folder and Path(folder).expanduser().is_dir():
        return _of_folder(name, Path(folder).expanduser(), config, format, split)
    matched = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
    files = [one for one in matched if one.is_file()]
    if files:
        return _of_files(name, path, files, format, split)
    if format == "auto" and not _is_path(name, path):
        return _of_hub(name, path, split)
    raise _no_such_path(name, path)


def _is_path(name: str, path: Path) -> bool:
    """Whether a name that is nowhere here means a file, not a data set of the hub."""
    suffixes = (*KIND_OF, *PROSE, ".md", ".py")
    is_written_so = name.startswith((".", "/", "~")) or name.count("/") > 1
    return is_written_so or content_suffix(path) in suffixes or path.suffix != content_suffix(path)


def _of_hub(name: str, path: Path, split: str) -> DataSource:
    repo = name.partition(":")[0].partition("@")[0]
    return DataSource(name, HUB, path, split=split, domain=repo)


def _of_files(name: str, path: Path, files: Sequence[Path], format: str, split: str) -> DataSource:
    kinds = [(file, kind_of(file) if format == "auto" else format) for file in files]
    found = DataSource(
        name, kinds[0][1], path, tuple(kinds), remarks=tuple(_remarks(kinds, format))
    )
    has_splits = all(kind == JSONL and holds_splits(file) for file, kind in kinds)
    return found if has_splits else _without_split(found, split)


def _of_folder(name: str, folder: Path, config: str, format: str, split: str) -> DataSource:
    if _saved_splits(folder) is not None:
        return _of_saved(name, folder, split)
    files = _visible(folder)
    kind = _kind_of_folder(files) if format == "auto" else format
    taken = [f for f in files if not is_about(f) and _is_of(f, kind)]
    others = [f for f in files if not is_about(f) and f not in taken]
    found = folder_splits(folder, taken, config, must_be_all=kind == TEXT)
    chosen = found.files(folder, split) if found.splits else taken
    if kind == TEXT and not found.splits:
        chosen = files
    if not chosen:
        raise _no_files(folder, kind)
    auto = format == "auto" and kind == RECORDS
    kinds = [(file, kind_of(file) if auto else kind) for file in chosen]
    if format == "auto" and kind == TEXT:
        kinds = [(file, kind_of(file) if file.suffix in PROSE else TEXT) for file in chosen]
    left = tuple(("file of another kind beside the data", str(file)) for file in others)
    whole = DataSource(
        name, kind, folder, tuple(kinds), left=left, remarks=tuple(_remarks(kinds, format))
    )
    if not found.splits:
        return _without_split(whole, split)
    domain = folder.resolve().name
    return replace(
        whole, split=split, domain=domain, remarks=(*whole.remarks, *_unread(found.others, folder))
    )


def _without_split(source: DataSource, split: str) -> DataSource:
    """The source, with a word on a split that it does not have."""
    if split in (DEFAULT, ALL, ""):
        return source
    shown = ", ".join(file.name for file, _ in source.files[:5])
    shown += ", ..." if len(source.files) > 5 else ""
    text = f"data.split={split} has no effect on {source.name}, which has no splits: {shown}"
    return replace(source, remarks=(*source.remarks, text))


def _unread(others: Sequence[Path], folder: Path) -> Iterator[str]:
    if others:
        shown = ", ".join(file.name for file in others[:5])
        yield f"{folder}: in no split, and not read: {shown}{', ...' if len(others) > 5 else ''}"


def _remarks(kinds: Iterable[tuple[Path, str]], format: str) -> Iterator[str]:
    """What is said of files that hold records under the name of a text."""
    for file, kind in kinds:
        if format == "auto" and kind == JSONL and content_suffix(file) in PROSE:
            yield (
                f"{file} holds records in JSON and is read as such "
                "(--set data.format=text learns it as it is written)"
            )


# -- kinds of files -------------------------------------------------------------------------------


def kind_of(file: Path) -> str:
    """How a file is read, by its own suffix; without one, by what it begins with."""
    suffix = content_suffix(file)
    if suffix in KIND_OF:
        return KIND_OF[suffix]
    is_open = suffix in PROSE or not suffix
    if is_open and _first_record(file, any_object=not suffix):
        return JSONL
    return TEXT


def _first_record(file: Path, any_object: bool) -> bool:
    """Whether a file begins with an object in JSON, and one with a key of records."""
    try:
        with opened(file) as stream:
            if stream.read(64).lstrip()[:1] not in (b"{", b"["):
                return False
        _, record = next(json_records(file), ("", None))
    except (SpecctlError, *BROKEN):
        return False
    return isinstance(record, dict) and (any_object or any(key in record for key in KEYS))


def _kind_of_folder(files: Sequence[Path]) -> str:
    """By what it holds most of."""
    names = [file for file in files if not is_about(file)]
    num_records = sum(content_suffix(file) in KIND_OF for file in names)
    return RECORDS if 2 * num_records >= max(len(names), 1) else TEXT


def _is_of(file: Path, kind: str) -> bool:
    if kind == TEXT:
        return True
    suffixes = KIND_OF if kind == RECORDS else SUFFIXES[kind]
    return content_suffix(file) in suffixes


def _visible(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, in order; what begins with a dot is left out."""
    return [
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    ]


def _no_files(folder: Path, kind: str) -> FileError:
    suffixes = () if kind == TEXT else SUFFIXES.get(kind, tuple(KIND_OF))
    return FileError(
        f"the data folder holds no {kind} files",
        found=str(folder),
        expected=" or ".join(f"at least one file *{suffix}" for suffix in suffixes)
        or "at least one file",
        do="give another folder, or set data.format",
    )


def _no_such_path(source: str, path: Path) -> FileError:
    parent = path.parent
    names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    close = f"; nearby: {nearest(path.name, names)}" if names else ""
    return FileError(
        "the data source does not exist",
        where="--data, or data.source of the recipe",
        found=source + close,
        expected="'corpus', 'self', a file or folder, or a hub data set such as owner/name",
        do="check the path; without data of your own, --data self lets a chat model write it",
    )


def unwritten(where: str) -> RecipeError:
    """The error where questions of the target would be read and nothing writes them."""
    return RecipeError(
        "no target writes questions here",
        where=where,
        found=SELF,
        expected="data that are there",
        do=f"specctl regenerate --data {SELF} writes questions and answers to a file; ./{SELF} is "
        "a file or folder of that name",
    )


# -- readers --------------------------------------------------------------------------------------


def _corpus(name: str, seed: int) -> Iterator[Sample]:
    from specctl.train.data.sources.corpus import STDLIB, collect, part_of, shuffled

    for source in shuffled([s for s in collect() if s.split == "train"], seed):
        domain = "standard library" if source.distribution == STDLIB else "packages"
        text = part_of(source.text, name.partition(":")[2])
        if text:
            yield Sample(f"{source.distribution}:{source.name}", domain, text=text)


def _text(path: Path, defects: Defects) -> Iterator[Sample]:
    """One file is one document; its domain is its folder."""
    try:
        with opened(path) as stream:
            text = io.TextIOWrapper(stream, "utf-8").read()
    except UnicodeDecodeError as error:
        defects.note("file is not UTF-8 text", f"{path}: byte {error.start}", is_file=True)
    except BROKEN as error:
        defects.note(f"file cannot be unpacked: {type(error).__name__}", str(path), is_file=True)
    except FileError as error:
        defects.note(f"file is no text: {error.found}", str(path), is_file=True)
    else:
        if text.strip():
            yield Sample(str(path), path.parent.name, text=text)
        else:
            defects.note("empty file", str(path), is_file=True)


def _saved_splits(folder: Path) -> list[str] | None:
    """The splits of what `save_to_disk` wrote, [""] where it has none; None for other folders."""
    try:
        if (folder / "dataset_dict.json").is_file():
            return list(json.loads((folder / "dataset_dict.json").read_text())["splits"])
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            return [str(json.loads((folder / "state.json").read_text()).get("_split") or "")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


def _of_saved(name: str, folder: Path, split: str) -> DataSource:
    """What `save_to_disk` wrote: one data set, or one a split."""
    splits, is_one = _saved_splits(folder) or [], not (folder / "dataset_dict.json").is_file()
    wanted = splits if split == ALL or (is_one and split == DEFAULT) else split.split("+")
    for one in wanted if splits != [""] else ():
        if one not in splits:
            raise no_split(str(folder), one, dict.fromkeys(splits))
    base = [folder] if is_one else [folder / one for one in wanted]
    files = [(file, ARROW) for below in base for file in sorted(below.glob("*.arrow"))]
    chosen = None if splits == [""] else "+".join(wanted)
    found = DataSource(
        name, SAVED, folder, tuple(files), split=chosen, domain=folder.resolve().name
    )
    return _without_split(found, split) if splits == [""] else found
