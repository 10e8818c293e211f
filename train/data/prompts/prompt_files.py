"""Files of prompts, read as training data are: a record each, or a line of a text file each.

A text stands for itself (`text`, or `prompt` alone); every other record is the conversation that
training would make of it, up to where the assistant is to speak.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError
from specctl.core.storage.bounded_read import read_stream
from specctl.train.data.files.json_records import EMPTY
from specctl.train.data.files.streams import content_stem, opened
from specctl.train.data.files.tables import decoded
from specctl.train.data.records.layouts import IMAGES
from specctl.train.data.records.records import Sample, check_values, sample_of
from specctl.train.data.sources.sources import TEXT, file_records, kind_of

SHOWN = "the record holds images, which files of prompts do not show"
# What is said beside a prompt, so that the prompt alone would not be what was meant.
BESIDE = ("system", "system_prompt", "tools", "history", "context", "input")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt of a file, as a text or a conversation that waits for its answer."""

    where: str
    sample: Sample


def file_prompts(file: Path, texts: Sequence[str], turns_first: bool) -> Iterator[FilePrompt]:
    """The prompts of a file. `texts`: the keys of a text that stands for itself, the first one
    counts; `turns_first`: messages beside it count before. FileError names the place of one that
    cannot be used, UnicodeDecodeError a file of text that is not UTF-8."""
    kind, stem = kind_of(file), content_stem(file)
    if kind == TEXT:
        for number, line in enumerate(_lines(file), start=1):
            if line.strip():
                yield FilePrompt(f"{file}:{number}", Sample(str(file), stem, text=line))
        return
    for where, record in file_records(file, kind):
        try:
            if isinstance(record, ValueError):
                raise record
            yield FilePrompt(where, _sample(decoded(record), where, stem, texts, turns_first))
        except ValueError as error:
            if str(error) != EMPTY:
                raise _unusable(where, str(error), record) from error


def _lines(file: Path) -> list[str]:
    with opened(file) as stream:
        body = read_stream(stream)
    return io.TextIOWrapper(io.BytesIO(body), "utf-8").read().split("\n")


def _sample(record: Any, where: str, stem: str, texts: Sequence[str], turns_first: bool) -> Sample:
    if isinstance(record, str):
        record = {"text": record}
    if isinstance(record, Mapping) and any(record.get(name) for name in IMAGES):
        raise ValueError(SHOWN)
    text = _text(record, texts, turns_first)
    if text is not None:
        check_values(record.get("messages"))
        named = record.get("domain") or record.get("category")
        domain = named if isinstance(named, str) else stem
        return Sample(where, domain, text=text)
    sample = sample_of(record, where, stem)
    if sample.images:
        raise ValueError(SHOWN)
    if not sample.messages:
        return sample
    return replace(sample, messages=_waiting(sample), given=(), unanswered=())


def _text(record: Any, texts: Sequence[str], turns_first: bool) -> str | None:
    """The text that stands for itself; None where a record says more."""
    if not isinstance(record, Mapping) or (turns_first and record.get("messages")):
        return None
    said = next((record[key] for key in texts if key in record), None)
    return said if isinstance(said, str) and not any(record.get(key) for key in BESIDE) else None


def _waiting(sample: Sample) -> tuple[Any, ...]:
    """The conversation without the answer at its end; of questions that follow each other, as in
    MT-Bench, the first one, since the others would build on its answer."""
    messages = sample.messages
    if sample.unanswered:
        return messages[: sample.unanswered[0]]
    roles = [message["role"] for message in messages]
    end = len(roles)
    while end and roles[end - 1] == "assistant":
        end -= 1
    if not end:
        raise ValueError("nothing stands before the assistant's turn")
    return messages[:end]


def _unusable(where: str, reason: str, record: Any) -> FileError:
    shown = ""
    if isinstance(record, Mapping):
        shown = "; " + ", ".join(f"{key}: {ascii(record[key])[:40]}" for key in record)
    return FileError(
        "a line of the prompts cannot be read",
        where=where,
        found=(reason + shown)[:200],
        expected='a JSON object such as {"prompt": "def main("} or {"messages": [...]}, or another '
        "record of training data",
        do="correct that line, or use a .txt file with one prompt per line",
    )
