"""Tables: aligned where there is room, wrapped where there is little, else records."""

from __future__ import annotations

import io
from typing import Any

import pytest

from specctl.cli.app.console import Console
from specctl.core.messages.table import format_table

COLUMNS = ("name", "family", "what")
ROWS = [
    ("a", "small-lm", "a sentence of several words that needs some room"),
    ("a longer name", "eagle3", "short"),
]


def test_figures_are_aligned_to_the_right() -> None:
    lines = format_table(("name", "n"), [("a", 5), ("long name", 1234)])
    assert lines[2] == "a              5"
    assert lines[3] == "long name  1,234"


def test_without_a_limit_every_row_is_one_line() -> None:
    assert len(format_table(COLUMNS, ROWS)) == 2 + len(ROWS)


def test_the_line_below_the_names_is_as_wide_as_its_columns() -> None:
    names, line, row = format_table(("a", "b", "c"), [("x", "y" * 60, "z" * 60)])
    assert [len(part) for part in line.split()] == [1, 60, 40]
    assert names.index("c") == row.index("z") == line.rindex(" ") + 1


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width: int) -> None:
    lines = format_table(COLUMNS, ROWS, width)
    assert max(map(len, lines)) <= width
    shown = " ".join(lines).split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(shown)


def test_columns_stand_closer_before_they_become_records() -> None:
    lines = format_table(("name", "one", "two"), [("row", 1, 2)], 12)
    assert lines == ["name one two", "---- --- ---", "row    1   2"]


def test_prose_wraps_in_its_column() -> None:
    lines = format_table(COLUMNS, ROWS, 50)
    assert lines[0].split() == list(COLUMNS)
    start = lines[0].index("what")
    assert lines[3][:start].strip() == ""
    assert lines[3][start:].strip()


def test_a_table_without_room_becomes_records() -> None:
    lines = format_table(("drafter", "tau", "tokens/s"), [("plain", 1.0, "81.0")], 16)
    assert lines == ["plain", "  tau       1.00", "  tokens/s  81.0"]


@pytest.mark.parametrize("width", [24, 40, 160])
def test_a_paragraph_wraps_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text, shown = " ".join(["some words of a self-made summary"] * 8), io.StringIO()
    Console(shown, io.StringIO()).prose(text)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines) == text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_list_of_recipes_fits(width: int, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("recipes", "ls").out.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("eagle3") for line in lines)
    assert max(map(len, run("recipes", "ls", "--all").out.splitlines())) <= width


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    Console(out, io.StringIO()).table(("a", "b"), [("x", "word " * 100)])
    assert len(out.getvalue().splitlines()) == 3
