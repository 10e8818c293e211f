"""Tables as lines of text, cut to the width of a terminal (pipes get every line whole), and as HTML
for notebooks."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from specctl.core.messages.printable import one_line, printable

GAP, NARROW_GAP = 2, 1  # between columns; the latter where they fit no other way
LEAST = 12  # a column of prose is not made narrower than this
TALLEST = 6  # lines of one cell; a row that needs more is written as a record


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Named columns, rows of values, and lines of text below them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([*format_table(self.columns, self.rows), *self.notes])

    __repr__ = __str__

    def markdown(self) -> str:
        """The table as Markdown, each note as a line of a list below it."""
        cells = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [f"| {' | '.join(_cell(one).replace('|', chr(92) + '|') for one in row)} |"
                 for row in cells]  # fmt: skip
        notes = [f"- {one_line(note)}" for note in self.notes]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        head = _html_row("th", self.columns)
        cells = [[_cell(value, printable) for value in row] for row in self.rows]
        body = "".join(_html_row("td", row) for row in cells)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{notes}"


class Tabled(ABC):
    """A result that prints as its table."""

    __slots__ = ()

    @abstractmethod
    def table(self) -> Table:
        """What is printed."""

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _html_row(tag: str, cells: Sequence[str]) -> str:
    style = ' style="text-align: left; white-space: pre-wrap"'
    return f"<tr>{''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def format_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None
) -> list[str]:
    """Lines of a table: left-aligned text, right-aligned figures, two blanks between.

    Where the table is wider than `width`, prose is wrapped in its column; where that makes the
    table tall or cannot work, every row becomes a record of `column  value` lines.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    natural = [max(len(c), *(len(row[i]) for row in cells), 0) for i, c in enumerate(columns)]
    widths, gap = natural, GAP
    if width is not None:
        fitted = [(_fitted(columns, cells, natural, width, gap), gap) for gap in (GAP, NARROW_GAP)]
        found = next(((w, g) for w, g in fitted if w is not None), None)
        if found is None:
            return list(_records(columns, cells, width))
        widths, gap = found
    numeric = [_looks_numeric(cells, i) for i in range(len(columns))]
    lines = _row(columns, widths, numeric, gap)
    lines.append((" " * gap).join("-" * w for w in (*widths[:-1], min(widths[-1], 40))))
    for row in cells:
        lines += _row(row, widths, numeric, gap)
    return lines


def _fitted(
    columns: Sequence[str], cells: Sequence[Sequence[str]], natural: list[int], width: int, gap: int
) -> list[int] | None:
    """Widths within the limit, or None where a table would be no good. The first column names the
    row and is never wrapped; the widest other columns of prose give way."""
    widths = list(natural)
    free = [i for i in range(1, len(columns)) if not _looks_numeric(cells, i)]
    least = {i: min(natural[i], max(LEAST, len(columns[i]))) for i in free}
    excess = sum(widths) + gap * (len(widths) - 1) - width
    while excess > 0:
        widest = max(free, key=lambda i: widths[i] - least[i], default=None)
        if widest is None or widths[widest] == least[widest]:
            return None
        widths[widest] -= 1
        excess -= 1
    tallest = max((len(_wrap(row[i], widths[i])) for row in cells for i in free), default=1)
    return None if tallest > TALLEST and len(columns) > 2 else widths


def _row(
    values: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], gap: int
) -> list[str]:
    """The lines of one row; cells that are wrapped make it several."""
    wrapped = [_wrap(value, width) for value, width in zip(values, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [cell[number] if number < len(cell) else "" for cell in wrapped]
        padded = [
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(parts, widths, numeric, strict=True)
        ]
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def _records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Every row under its first cell, one line a column; empty cells are left out."""
    label = max(len(column) for column in columns[1:]) if len(columns) > 1 else 0
    indent = " " * (label + 2 * GAP)
    for row in cells:
        yield from _wrap(row[0], width)
        for column, value in zip(columns[1:], row[1:], strict=True):
            first, *rest = _wrap(value, max(LEAST, width - len(indent)))
            if value not in ("", "-"):
                yield f"{' ' * GAP}{column:{label}}{' ' * GAP}{first}".rstrip()
                yield from (indent + line for line in rest)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 1)) or [""]


def _cell(value: object, shown: Callable[[str], str] = one_line) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else shown(str(value))


def _looks_numeric(cells: Sequence[Sequence[str]], column: int) -> bool:
    values = [row[column].replace(",", "") for row in cells if row[column] != "-"]
    return bool(values) and all(_is_number(value) for value in values)


def _is_number(text: str) -> bool:
    try:
        float(text.removesuffix("x").removesuffix("%"))
    except ValueError:
        return False
    return True
