"""From the words of a command line to prompts: an argument, standard input or a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.core.errors import FileError, SpecctlError, one_of_two, unreadable
from specctl.core.storage.bounded_read import MOST_INPUT, open_regular, read_pipe, read_stream

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

TEXTS = ("prompt", "text")  # keys of a prompt that is read as it is


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the user gave it: a text, or the messages of a conversation with the tools that
    may be called in it."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()


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
        file, found = Path("-"), [PromptText(_standard_input())]
    elif prompt is not None:
        found = [PromptText(prompt)]
    else:
        raise SpecctlError(
            "no prompt was given",
            where="the command line",
            found="neither PROMPT nor --file",
            expected="a text, - for standard input, or a file of prompts",
            do=with_text(*_own_words()),
        )
    if not found or any(not p.text.strip() and not p.messages for p in found):
        raise SpecctlError(
            "the prompt is empty",
            where=_place(file),
            found="only white space" if found else "no line with text",
            expected="at least one character that is not white space",
            do=_with_text(file, prompt),
        )
    for prompt_text in found:
        check_text(prompt_text.text, file)
    return found[:limit]


def tell_chat(console: Console, target: Target, chat: bool | None) -> None:
    """Say how texts are read, where nobody chose and it is not plain."""
    from specctl.api.arguments.prompts import chat_note

    if note := chat_note(target, chat):
        console.say(note)


def _with_text(file: Path | None, prompt: str | None) -> str:
    """How a prompt is given in the place where there was none."""
    if file is None:
        return with_text(*_own_words(prompt))
    if file == Path("-"):
        return f"echo 'def main(' | {command_line(*_own_words())}"
    return f"write at least one line of text into {file}, or give another file with --file"


def _own_words(prompt: str | None = None) -> list[str]:
    """The command that was typed, with its target and its flags, without the prompt."""
    words = sys.argv[1:]
    if prompt in words:  # the flags may have values that are empty, too
        del words[len(words) - 1 - words[::-1].index(prompt)]
    return words if words[:1] == ["generate"] else ["generate"]


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
    if str(file) == "-":
        return _read_once(_standard_input().encode("utf-8", "surrogatepass"), file)
    try:
        if file.is_fifo():
            return _read_once(read_pipe(file), file)
        open_regular(file).close()
        return _prompts(file)
    except (OSError, UnicodeDecodeError) as error:
        expected = "a text file (one prompt per line) or a file of records that you may read"
        do = "give an existing file, or the prompt itself as an argument"
        raise unreadable("the file of prompts", file, error, "--file", expected, do) from error


def _standard_input() -> str:
    try:
        return str(read_stream(sys.stdin, MOST_INPUT))
    except OSError as error:
        raise SpecctlError(
            "standard input is too long",
            where=_place(Path("-")),
            found=error.strerror or str(error),
            expected="prompts",
            do="give fewer prompts at once",
        ) from error


def _read_once(body: bytes, source: Path) -> list[PromptText]:
    """Prompts of what can be read only once: lines, or records where it begins with one."""
    with TemporaryDirectory(prefix="specctl-") as folder:
        file = Path(folder) / "input.txt"
        file.write_bytes(body)
        try:
            return _prompts(file)
        except (FileError, UnicodeDecodeError) as error:
            found = getattr(error, "found", str(error))
            where = str(getattr(error, "where", "")).replace(str(file), _place(source))
            raise _bad_input(where or _place(source), found) from error


def _prompts(file: Path) -> list[PromptText]:
    from specctl.train.data.prompts.prompt_files import file_prompts

    found = []
    for prompt in file_prompts(file, TEXTS, turns_first=True):
        sample = prompt.sample
        if sample.ids and not sample.messages and not sample.text:
            raise _bad_input(prompt.where, "token ids alone (specctl bench --prompts reads them)")
        text = sample.text or _last_words(sample.messages)
        found.append(PromptText(text, sample.messages, sample.tools))
    return found


def _last_words(messages: Sequence[Mapping[str, Any]]) -> str:
    return str(messages[-1].get("content", "")) if messages else ""


def _bad_input(where: str, found: str) -> FileError:
    return FileError(
        "a line of the prompts cannot be read",
        where=where,
        found=found,
        expected='a text, or a JSON object such as {"prompt": "def main("}',
        do="correct that line",
    )
