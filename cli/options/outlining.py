"""Answers from an outline whose points are written at once: settings of `specctl generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from specctl.cli.app.console import Console
from specctl.cli.app.settings import Setting
from specctl.cli.options.names import one_of
from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted

if TYPE_CHECKING:
    from specctl.cli.options.target_choice import TargetChoice
    from specctl.runtime.generate import Output
    from specctl.runtime.outline.answer import Outlining


@dataclass(frozen=True, slots=True)
class OutlineFlags:
    """How answers are written from outlines."""

    kind: Annotated[
        str | None,
        Setting(
            "outline.kind",
            "Answer chats from an outline, all points at once: skeleton; or each after those that "
            "it needs: skeleton-graph (approximate; docs/outlines.md).",
            metavar="KIND",
            complete=one_of("skeleton", "skeleton-graph"),
        ),
    ] = None
    points: Annotated[
        int | None,
        Setting(
            "outline.points", "Most points of an outline, 8 if left out; 1: none.", min=1, max=32
        ),
    ] = None

    small: Annotated[
        str | None,
        Setting(
            "outline.small",
            "Smaller model that writes the easy points of skeleton-graph.",
            metavar="MODEL",
        ),
    ] = None
    hard: Annotated[
        int | None,
        Setting(
            "outline.hard", "Difficulty from which the target writes, 3 if left out.", min=1, max=6
        ),
    ] = None

    def outlining(self) -> Outlining | None:
        """What was set but for the smaller model, which is not read yet; None where nothing was."""
        from specctl.recipes.targets import resolve
        from specctl.runtime.outline.answer import GRAPH, USUAL_POINTS, USUALLY_HARD, Outlining

        if self.kind is None:
            self._check_alone("outline.kind beside it", "--set outline.kind=skeleton")
            return None
        if self.small is None and self.hard is not None:
            self._check_alone("outline.small beside it", "--set outline.small=MODEL", ("hard",))
        if self.small is not None:
            resolve(self.small)  # a name that nothing has
            if self.kind != GRAPH:
                do = f"--set outline.kind={GRAPH}"
                self._check_alone(f"outline.kind={GRAPH}, which says what is easy", do, ("small",))
        points = USUAL_POINTS if self.points is None else self.points
        return Outlining(self.kind, points, hard=USUALLY_HARD if self.hard is None else self.hard)

    def with_small(self, how: Outlining | None, target: TargetChoice) -> Outlining | None:
        """With the smaller model, loaded as the target is."""
        if how is None or self.small is None:
            return how
        from specctl.runtime.target.target import load_target

        small = load_target(
            self.small, dtype=target.dtype, device=target.device, offline=target.offline
        )
        return replace(how, small=small)

    def _check_alone(
        self, expected: str, do: str, names: Sequence[str] = ("points", "small", "hard")
    ) -> None:
        """Refuse what was set of these, which would decide nothing."""
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            raise RecipeError(
                f"outline.{name} would decide nothing",
                where=f"outline.{name}",
                found=str(value),
                expected=expected,
                do=do,
            )


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
            + (f"; {len(report.small)} by the smaller model" if report.small else "")
        )
        if report.why_sequential is not None:
            console.say(f"{which}written point by point: {report.why_sequential}")
