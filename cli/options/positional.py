"""A drafter as a word of its own: `specctl export DIR`, beside the option --draft of before."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.options.flags import DRAFTING
from specctl.cli.options.names import complete_draft
from specctl.core.errors import SpecctlError, one_of_two
from specctl.recipes.drafter_names import drafter_names
from specctl.recipes.published import path_named

Word = Annotated[
    str | None,
    typer.Argument(
        metavar="[DRAFTER]",
        help="Package or run folder, or a drafter's name; the same as --draft.",
        autocompletion=complete_draft,
        show_default=False,
    ),
]
DraftFlag = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="The same as DRAFTER.",
        rich_help_panel=DRAFTING,
        autocompletion=complete_draft,
        show_default=False,
    ),
]


def one_drafter(word: str | None, flag: str | None, example: str) -> str:
    """The drafter that was given, as a word or by --draft; not both, and not neither."""
    if word is not None and flag is not None:
        raise one_of_two(
            "the drafter was given twice", f"{word} and --draft {flag}", f"leave out --draft {flag}"
        )
    given = word if word is not None else flag
    if given is None:
        raise SpecctlError(
            "no drafter was given",
            where="the command line",
            found="neither DRAFTER nor --draft",
            expected="the folder of a package, or of its run",
            do=example,
        )
    return given


def looks_like_package(word: str) -> bool:
    """Whether a word is the folder of a package or of a run that holds one, or a published drafter,
    rather than a text; of several joined by `+`, one at least."""
    if len(word) > 1000 or "\0" in word or "\n" in word:
        return False
    inside = ("manifest.json", "package/manifest.json")
    return any(
        (path_named(name) / file).is_file() for name in drafter_names(word) for file in inside
    )
