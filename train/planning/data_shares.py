"""What the sources of a run are and which share of its data each has, before they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.recipes.schema import DataPart
from specctl.train.data.files.tables import decoded
from specctl.train.data.records.layouts import FieldChoices, field_choices
from specctl.train.data.records.records import Sample, samples_of
from specctl.train.data.sources.sources import CSV, JSONL, file_records, find_source, names_of

BYTES_PER_TOKEN = 4
UNKNOWN_TOKENS = 10_000_000  # of a source whose size is not known
LOOKED_AT = 256  # first records of a file, which say how much of it is text


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source of data: what it is in words, its bytes on disk, and its share of those of all
    sources; None where they are not known."""

    name: str
    what: str
    bytes: int | None
    share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def source_shares(part: DataPart) -> tuple[SourceShare, ...]:
    """Every source of the data, in order. Nothing is asked of the hub."""
    found = [(name, *_size(part, name)) for name in names_of(part.source)]
    sizes = [size for _, _, size in found]
    whole = 0 if None in sizes else sum(size or 0 for size in sizes)
    return tuple(
        SourceShare(name, what, size, None if not whole or size is None else size / whole)
        for name, what, size in found
    )


def _size(part: DataPart, name: str) -> tuple[str, int | None]:
    try:
        source = find_source(name, part.format, part.split)
        return source.what, source.bytes
    except (SpecctlError, OSError):
        return "not here yet", None


def tokens_in(part: DataPart) -> int:
    """About how many tokens the sources hold."""
    choices, tokens = field_choices(part), 0
    for name in names_of(part.source):
        try:
            source = find_source(name, part.format, part.split)
            is_here = source.bytes is not None
            tokens += (
                sum(_file_tokens(file, kind, source.split, choices) for file, kind in source.files)
                if is_here
                else UNKNOWN_TOKENS
            )
        except (SpecctlError, OSError):
            tokens += UNKNOWN_TOKENS
    return tokens


def _file_tokens(file: Path, kind: str, split: str | None, choices: FieldChoices) -> int:
    """By the file's size. A record has more than its text: keys, and ids where it is tokenized."""
    size = file.stat().st_size
    if kind not in (JSONL, CSV):  # text alone, or packed
        return size // BYTES_PER_TOKEN
    looked_at, tokens = 0, 0.0
    for _, record in islice(file_records(file, kind, split), LOOKED_AT):
        if not isinstance(record, ValueError):
            text = json.dumps(record, ensure_ascii=False, default=str)
            looked_at += _size_of(text)
            tokens += sum(map(_sample_tokens, _samples(record, choices)))
    return round(size * tokens / looked_at) if tokens else size // BYTES_PER_TOKEN


def _samples(record: Any, choices: FieldChoices) -> Iterator[Sample]:
    try:
        yield from samples_of(decoded(record), "", choices=choices)
    except (ValueError, SpecctlError):
        return  # left out of the data, too


def _sample_tokens(sample: Sample) -> float:
    if sample.ids:
        return len(sample.ids)
    said = [sample.text, *(str(message.get("content") or "") for message in sample.messages)]
    return sum(map(_size_of, said)) / BYTES_PER_TOKEN


def _size_of(text: str) -> int:
    """In bytes, of text that may hold half of a character."""
    return len(text.encode(errors="surrogatepass"))
