"""From the words of a command line to prompts: an argument, standard input or a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from specctl.core.errors import FileError, SpecctlError, one_of_two, unreadable


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the user gave it: a text, or the messages of a conversation."""

    text: str
    messages: tuple[dict[str, str], ...] = ()


def read_prompts(prompt: str | None, file: Path | None, limit: int | None) -> list[PromptText]:
    """The prompts of a command line: an argument, - for standard input, or a file."""
    if prompt is not None and file is not None:
        raise one_of_two(
            "a prompt and a file of prompts were given",
            f"{prompt[:40]!r} and --file {file}",
            'specctl generate -f prompts.txt   or   specctl generate "def main("',
        )
    if file is not None:
        found = _read_file(file)
    elif prompt == "-":
        file, found = Path("-"), [PromptText(sys.stdin.read())]
    elif prompt is not None:
        found = [PromptText(prompt)]
    else:
        raise SpecctlError(
            "no prompt was given",
            where="the command line",
            found="neither PROMPT nor --file",
            expected="a text, - for standard input, or a file of prompts",
            do='specctl generate "def main("',
        )
    if not found or any(not p.text.strip() and not p.messages for p in found):
        raise SpecctlError(
            "the prompt is empty",
            where=_place(file),
            found="only white space" if found else "no line with text",
            expected="at least one character that is not white space",
            do='specctl generate "def main("',
        )
    for prompt_text in found:
        check_text(prompt_text.text, file)
    return found[:limit]


def _place(file: Path | None) -> str:
    """Where a prompt came from."""
    known = {None: "the command line", Path("-"): "standard input"}
    return known.get(file, str(file))


def check_text(text: str, file: Path | None) -> None:
    """Half of a surrogate pair (bytes that are no UTF-8, or a broken escape) is no character."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise SpecctlError(
            "the prompt is not valid Unicode",
            where=_place(file),
            found=ascii(text)[:80],
            expected="UTF-8 text",
            do="write the prompt as UTF-8, for example with iconv -f latin1 -t utf-8",
        )


def _read_file(file: Path) -> list[PromptText]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        expected = "a text file (one prompt per line) or JSONL that you may read"
        do = "give an existing file, or the prompt itself as an argument"
        raise unreadable("the file of prompts", file, error, "--file", expected, do) from error
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if file.suffix.lower() not in (".jsonl", ".json"):
        return [PromptText(line) for _, line in lines]
    return [_record(line, f"{file}:{number}") for number, line in lines]


def _record(line: str, where: str) -> PromptText:
    from specctl.train.data.records import check_values, parse_line

    try:
        record = parse_line(line)
        messages = record.get("messages") if isinstance(record, dict) else None
        check_values(messages)
    except ValueError as error:
        raise _bad_line(where, str(error)) from error
    if isinstance(record, str):
        return PromptText(record)
    if not isinstance(record, dict):
        raise _bad_line(where, type(record).__name__)
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return PromptText(messages[-1]["content"], tuple(messages))
    text = record.get("prompt", record.get("text"))
    if not isinstance(text, str):
        shown = (f"{key}: {ascii(value)[:40]}" for key, value in record.items())
        raise _bad_line(where, ", ".join(shown)[:200] or "{}")
    return PromptText(text)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _bad_line(where: str, found: str) -> FileError:
    return FileError(
        "a line of the prompts cannot be read",
        where=where,
        found=found,
        expected='a JSON object such as {"prompt": "def main("} or {"messages": [...]}',
        do="correct that line, or use a .txt file with one prompt per line",
    )
