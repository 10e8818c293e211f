"""Outlines as a model writes them: numbered points, and what each needs; anything else is none.

The list begins with the first line and is numbered from 1. It ends in front of a line that is not
the next point, that is longer than LONGEST, or that repeats an earlier one, as small models do.
Blank lines do not count. A point of a graph ends with what it builds on and how hard it is,
`(needs: 1, 2; difficulty: 3)` or `(needs: none)`. Points stand behind what they need: where one of
a graph does not say what that is, or names one that does not stand in front of it (itself, one that
there is not, one that waits for it), every point needs all in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

LEAST = 2  # points, with fewer there is nothing to write at once
LONGEST = 120  # characters of a point
HARDEST = 5
_POINT = re.compile(r"\s{0,3}(\d{1,3})[.)]\s+(\S.*)")
_DECLARED = re.compile(
    r"(?P<title>.*\S)\s*\(needs:\s*(?P<needs>none|\d{1,3}(?:\s*,\s*\d{1,3})*)"
    r"(?:\s*;\s*difficulty:\s*(?P<difficulty>[1-5]))?\s*\)\.?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class OutlinePoint:
    """A point of an outline, numbered from 1. `needs`: numbers of the points whose texts it reads;
    `difficulty`: 1 to HARDEST, None where the outline does not say."""

    number: int
    title: str
    needs: tuple[int, ...] = ()
    difficulty: int | None = None

    @property
    def heading(self) -> str:
        """How its text begins."""
        is_open = self.title[-1].isalnum() or self.title[-1] in ")]\"'"
        return f"{self.number}. {self.title}{':' if is_open else ''}"


@dataclass(frozen=True, slots=True)
class Outline:
    """`waves`: the numbers of points that are written at once, in order; `why_sequential`: why
    each waits for all in front of it, where that is not what the outline says."""

    points: tuple[OutlinePoint, ...]
    waves: tuple[tuple[int, ...], ...]
    why_sequential: str | None = None

    def __str__(self) -> str:
        """The list without what its points need."""
        return "\n".join(f"{point.number}. {point.title}" for point in self.points)


def read_outline(text: str, most: int, is_graph: bool, is_cut: bool = False) -> Outline | None:
    """The first `most` points of the list that the text begins with; None where it is none.
    `is_cut`: the text broke off, so its last line is not read."""
    lines = text.splitlines()
    points, undeclared, _ = _points(lines[:-1] if is_cut else lines, most, is_graph)
    if len(points) < LEAST:
        return None
    if not is_graph:
        return Outline(tuple(points), (tuple(point.number for point in points),))
    why = None if undeclared is None else f"point {undeclared} does not say what it needs"
    return _graph(points, why)


def is_over(text: str, most: int, is_graph: bool) -> bool:
    """Whether a whole line of the text has ended the list, so that nothing behind it is read."""
    whole, _, _ = text.rpartition("\n")
    return _points(whole.splitlines(), most, is_graph)[2]


def _points(
    lines: Sequence[str], most: int, is_graph: bool
) -> tuple[list[OutlinePoint], int | None, bool]:
    """The points of the list, the first of them that does not say what it needs, and whether the
    list has ended."""
    points, undeclared = list[OutlinePoint](), None
    for line in filter(str.strip, lines):
        found = _POINT.fullmatch(line.rstrip())
        if found is None or int(found[1]) != len(points) + 1 or len(points) == most:
            return points, undeclared, True
        point = OutlinePoint(len(points) + 1, _bare(found[2]))
        declared = _declared(point) if is_graph else point
        title = (declared or point).title
        if not 0 < len(title) <= LONGEST or any(_is_alike(title, other) for other in points):
            return points, undeclared, True
        points.append(declared or point)
        if declared is None and undeclared is None:
            undeclared = point.number
    return points, undeclared, False


def waves_of(points: Sequence[OutlinePoint]) -> tuple[tuple[int, ...], ...]:
    """The points by waves: each stands in the first one in front of which all that it needs is
    written."""
    wave_of = dict[int, int]()
    for point in points:
        wave_of[point.number] = max((wave_of[n] + 1 for n in point.needs), default=0)
    return tuple(
        tuple(number for number, wave in wave_of.items() if wave == at)
        for at in range(max(wave_of.values()) + 1)
    )


def _graph(points: Sequence[OutlinePoint], why: str | None) -> Outline:
    behind = [(p.number, n) for p in points for n in p.needs if not 0 < n < p.number]
    if why is None and behind:
        why = "point {} needs point {}, which does not stand in front of it".format(*behind[0])
    if why is not None:
        points = [replace(p, needs=tuple(range(1, p.number))) for p in points]
    return Outline(tuple(points), waves_of(points), why)


def _declared(point: OutlinePoint) -> OutlinePoint | None:
    found = _DECLARED.fullmatch(point.title)
    if found is None:
        return None
    needs = found["needs"].lower()
    numbers = () if needs == "none" else tuple(sorted({int(n) for n in needs.split(",")}))
    difficulty = None if found["difficulty"] is None else int(found["difficulty"])
    return OutlinePoint(point.number, _bare(found["title"]), numbers, difficulty)


def _bare(title: str) -> str:
    """Without the marks of bold text."""
    return title.replace("**", "").strip()


def _is_alike(title: str, other: OutlinePoint) -> bool:
    return title.casefold() == other.title.casefold()
