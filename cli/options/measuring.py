"""Flags of what is measured: on which prompts, how long, how often; and of what is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.options.flags import Chat, panel

PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", "-f", help="Text or JSONL file; else the held-out prompts."),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
Domain = Annotated[str | None, typer.Option(help="Only the held-out prompts of this domain.")]
TokensEach = Annotated[int, typer.Option(min=1, help="Tokens per prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each; the median is shown.")]
Batch = Annotated[int, typer.Option(min=1, max=256, help="Prompts decoded at once.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Draw speed-up and acceptance by position into this file (.png, .svg, .pdf)."
    ),
]
PLOTTED = (
    "Draw speed-ups, acceptance by position and tokens over the cost of a round into this file "
    "(.png, .svg, .pdf)."
)

of_questions: partial[Any] = panel("Questions")
written_option: partial[Any] = panel("What is written")


@dataclass(frozen=True, slots=True)
class QuestionFlags:
    """The questions of a benchmark."""

    suite: Annotated[
        list[str] | None,
        of_questions(
            "--suite",
            metavar="NAME[=PATH],...",
            help="Question sets: everyday (comes with specctl), spec-bench, mt-bench, humaneval, "
            "gsm8k, alpaca, speed-bench, from the hub or from PATH, a file or folder.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        of_questions("--limit", min=1, help="Of a suite at most so many questions a category."),
    ] = None
    prompts: Annotated[
        Path | None,
        of_questions("--prompts", "-f", help="Text or JSONL file; else the held-out prompts."),
    ] = None
    num_prompts: Annotated[
        int | None,
        of_questions("--num-prompts", min=1, help="Prompts without a suite; 16 if left out."),
    ] = None
    domain: Annotated[
        str | None,
        of_questions("--domain", help="Only the prompts of this domain, or category of a suite."),
    ] = None
    chat: Chat = None

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites, one by one."""
        return tuple(word for given in self.suite or () for word in given.split(",") if word)

    def check(self) -> None:
        """Refuse flags that say nothing, and a suite or a file that is not there, before the target
        is loaded."""
        from specctl.api.bench_questions import check_question_flags
        from specctl.train.data.prompts.heldout import check_prompts
        from specctl.train.data.prompts.suites import check_suite

        check_question_flags(self.suites, self.prompts is not None, self.num_prompts, self.limit)
        for suite in self.suites:
            check_suite(suite)
        if self.prompts is not None:
            check_prompts(self.prompts)

    def words(self) -> list[str]:
        """The flags that run the same suite again; nothing of other prompts."""
        limit = ["--limit", str(self.limit)] if self.limit and self.suites else []
        return [word for suite in self.suites for word in ("--suite", suite)] + limit


@dataclass(frozen=True, slots=True)
class WrittenFlags:
    """Where a benchmark writes what it found."""

    out: Annotated[
        Path | None, written_option("--out", "-o", help="Also write the result as JSON.")
    ] = None
    plot: Annotated[Path | None, written_option("--plot", help=PLOTTED)] = None
    card: Annotated[
        Path | None,
        written_option("--card", help="Write tables and command as Markdown into this file (.md)."),
    ] = None


def chat_words(chat: bool | None) -> list[str]:
    """The flag that says how prompts are read, where one was given."""
    return [] if chat is None else ["--chat" if chat else "--raw"]
