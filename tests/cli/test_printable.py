"""Strings of others on a terminal (names, messages, generated text) are read, and do nothing."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from specctl.cli.app.command import command
from specctl.cli.app.console import Console
from specctl.cli.app.progress import RichProgress
from specctl.cli.main import main
from specctl.core.errors import FileError
from specctl.core.messages.printable import PrintableStream, guarded_streams, one_line, printable
from specctl.train.data.sources.defects import Defects

TITLE = "\x1b]0;owned\x07"  # the title of the window; most sequences begin with the same character
CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
HOSTILE = f"a\r{TITLE}\x9b2J\u202egnp.exe\u2066[red]:dog:\x7f\udc80"


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def drives(text: str) -> set[str]:
    """The characters in a text that a terminal would act upon."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[Console]:
    """A console at a terminal with its bars, and one whose streams are pipes."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return [Console(Screen(), Screen()), Console(io.StringIO(), io.StringIO())]


def shown(console: Console) -> str:
    assert isinstance(console.stdout, io.StringIO)
    assert isinstance(console.stderr, io.StringIO)
    return console.stdout.getvalue() + console.stderr.getvalue()


def test_every_character_that_drives_a_terminal_is_an_escape() -> None:
    every = "".join(map(chr, range(0x3000)))
    left = drives(printable(every))
    assert not {c for c in left if unicodedata.category(c) != "Cf"}
    assert not left & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert printable(HOSTILE) == (
        r"a\x0d\x1b]0;owned\x07\x9b2J\u202egnp.exe\u2066[red]:dog:\x7f\udc80"
    )


def test_text_of_any_language_stays_as_it_is() -> None:
    for text in (
        "caf\u00e9",
        "\u65e5\u672c\u8a9e",
        "\u05e9\u05dc\u05d5\u05dd",
        "a\tb\nc",
        "\U0001f600",
    ):
        assert printable(text) == text
    assert one_line("a\nb") == r"a\nb"


def test_whatever_a_console_shows_is_printable(both: list[Console]) -> None:
    for console in both:
        console.verbose = True
        for speak in (console.say, console.detail, console.warn, console.heading, console.out):
            speak(HOSTILE)
        console.prose(HOSTILE)
        console.table((HOSTILE, "b"), [(HOSTILE, "x\ny")], HOSTILE)
        with console.task(HOSTILE, 1, HOSTILE) as advance:
            console.say(HOSTILE)
            advance(1, HOSTILE)
        console.done({}, next=[HOSTILE + "\nNext: another"])
        parts = dict.fromkeys(("found", "expected", "do", "where"), HOSTILE)
        console.fail(FileError(HOSTILE, **parts))
        seen = shown(console)
        assert seen.count(printable(HOSTILE)) >= 10, "nothing is taken for markup or an emoji"
        assert "\nNext: another" not in seen
        for wrong in (TITLE, "\x9b", "\u202e", "\u2066", "\x7f", "\udc80", "a\r"):
            assert wrong not in seen


def test_labels_and_notes_of_bars_are_neither_markup_nor_sequences() -> None:
    stream = io.StringIO()
    bars = RichProgress(RichConsole(file=stream, force_terminal=True, width=120))
    with bars.task(f"[red]{TITLE}", 2, "steps") as advance:
        advance(1, f"[bold]{TITLE}:dog:")
    assert r"[red]\x1b]0;owned" in stream.getvalue()
    assert r"[bold]\x1b]0;owned\x07:dog:" in stream.getvalue()
    assert TITLE not in stream.getvalue()


def test_the_name_of_a_data_file_is_printable_where_it_was_left_out(both: list[Console]) -> None:
    defects = Defects()
    defects.note("file is not UTF-8 text", f"data/{HOSTILE}.txt")
    for console in both:
        defects.tell(console)
        assert f"data/{printable(HOSTILE)}.txt" in shown(console)


def test_show_prints_what_a_folder_says_as_text(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / f"evil{TITLE}"
    folder.mkdir()
    named = {"model_type": HOSTILE, "architectures": [HOSTILE], "hidden_size": CLIPBOARD}
    (folder / "config.json").write_text(json.dumps(named))
    for words in (["show", folder], ["show", folder / "none"], ["generate", "-t", folder, "x"]):
        ran = run(*words)
        assert not drives(ran.out + ran.err)
        assert r"\x1b]0;owned" in ran.out + ran.err


def test_show_refuses_json_that_is_nested_without_end(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    ran = run("show", tmp_path)
    assert ran.code == 4
    assert "config.json cannot be read" in ran.err
    told = "".join(ran.err.split())  # a long path wraps
    assert str(tmp_path / "config.json") in told
    assert "downloadthefolderagain" in told


def test_a_json_answer_holds_the_very_name(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    ran = run("show", tmp_path, "--json")
    assert ran.json["result"]["config"]["model_type"] == HOSTILE
    assert not drives(ran.out)


def test_generated_text_is_exact_in_a_pipe_and_printable_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "g.regex").write_text(r"\x1b\]0;owned\x07")
    words = ["generate", "-q", "--grammar", str(tmp_path / "g.regex"), "a = "]
    pipe, screen = io.StringIO(), Screen()
    assert main(words, Console(pipe, io.StringIO())) == 0
    assert main(words, Console(screen, Screen())) == 0
    assert pipe.getvalue() == f"{TITLE}\n"
    assert screen.getvalue() == printable(TITLE) + "\n"


def test_a_compared_text_is_text_as_well() -> None:
    console = Console(Screen(), io.StringIO())
    console.write(HOSTILE)
    assert shown(console) == printable(HOSTILE)
    console.colour("\x1b[32m")
    assert shown(console).endswith("\x1b[32m"), "our own colours are"


def test_what_libraries_print_and_log_is_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, errors = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", errors)

    def body(console: Console) -> None:
        """A command."""
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": f"of {HOSTILE}"}))

    app_of(body)
    for stream in (screen, errors):
        assert printable(HOSTILE) in stream.getvalue()
        assert not drives(stream.getvalue())


def app_of(body: Any) -> None:
    """Runs a function as a command."""
    import typer

    app = typer.Typer()
    app.command()(command(body))
    typer.main.get_command(app).main([], standalone_mode=False, obj=Console())


def test_bars_of_libraries_may_still_move() -> None:
    stream = io.StringIO()
    guard = PrintableStream(stream)
    for piece in ("\r 10%", "\n\x1b[A", f"\r20% {TITLE}\x1b[A"):
        guard.write(piece)
    assert stream.getvalue() == "\r 10%\n\x1b[A\r20% " + printable(TITLE + "\x1b[A")


def test_while_our_bars_are_shown_libraries_are_guarded_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with guarded_streams():
        bars = RichProgress(RichConsole(file=screen, force_terminal=True, width=120))
        before = sys.stderr
        with bars.task("work", 1, "steps"):
            print("\x1b]8;;http://x\x1b\\click", file=sys.stderr)
        assert sys.stderr is before
    assert r"\x1b]8;;http://x\x1b\click" in screen.getvalue()


def test_a_pipe_keeps_what_libraries_print(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with guarded_streams():
        print(TITLE, end="")
    assert pipe.getvalue() == TITLE
