"""Answers from an outline whose points are written at once: settings of `specctl generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from specctl.cli.app.console import Console
from specctl.cli.app.settings import Setting
from specctl.core.errors import RecipeError
from specctl.core.printable import counted

if TYPE_CHECKING:
    from specctl.runtime.generate import Output
    from specctl.runtime.outline.answer import Outlining


@dataclass(frozen=True, slots=True)
class OutlineFlags:
    """How answers are written from outlines."""

    kind: Annotated[
        str | None,
        Setting(
            "outline.kind",
            "Answer chats from an outline, all points at once: skeleton; or each behind those that "
            "it needs: skeleton-graph (approximate; docs/outlines.md).",
            metavar="KIND",
        ),
    ] = None
    points: Annotated[
        int | None,
        Setting(
            "outline.points", "Most points of an outline, 8 if left out; 1: none.", min=1, max=32
        ),
    ] = None

    def outlining(self) -> Outlining | None:
        """What was set; None where nothing was."""
        from specctl.runtime.outline.answer import Outlining

        if self.kind is None and self.points is not None:
            raise RecipeError(
                "outline.points says how long outlines are, but there is none",
                where="outline.points",
                found=str(self.points),
                expected="outline.kind beside it",
                do="--set outline.kind=skeleton",
            )
        if self.kind is None:
            return None
        return Outlining(self.kind) if self.points is None else Outlining(self.kind, self.points)


def warn_of(console: Console, how: Outlining) -> None:
    """Say what kind of answers these are."""
    if how.points > 1:
        console.warn(
            f"{how.kind} is approximate: points of an answer are written without the texts of "
            "others, and no distribution of the target is that of such answers"
        )


def show_outlines(console: Console, outputs: Sequence[Output]) -> None:
    """Say how each answer was written, where that was not what was set."""
    for index, output in enumerate(outputs):
        report = output.outline
        if report is None:
            continue
        which = f"answer {index + 1}: " if len(outputs) > 1 else ""
        if report.why_plain is not None:
            console.say(f"{which}written without an outline: {report.why_plain}")
            continue
        waves = counted(len(report.waves), "wave")
        console.say(
            f"{which}{counted(len(report.titles), 'point')} in {waves}, {report.tokens:,} tokens, "
            f"{report.outline_tokens:,} of them for the outline"
        )
        if report.why_sequential is not None:
            console.say(f"{which}written point by point: {report.why_sequential}")
