"""`--generation-config`: whether to sample as the target's own generation_config.json says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.app.console import Console
from specctl.cli.options.flags import SAMPLING
from specctl.core.errors import IntegrityError, SpecctlError, nearest

if TYPE_CHECKING:
    from specctl.runtime.sampling.generation_config import Suggested
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

MODEL, NONE = "model", "none"

GenerationConfigFlag = Annotated[
    str | None,
    typer.Option(
        "--generation-config",
        metavar="model|none",
        help="model: sample as the target's generation_config.json says where no flag does; none: "
        "say nothing of it.",
        rich_help_panel=SAMPLING,
    ),
]


def check_choice(choice: str | None) -> None:
    """Refuse another word, before anything loads."""
    if choice not in (None, MODEL, NONE):
        raise SpecctlError(
            f"unknown generation config {choice!r}",
            where="--generation-config",
            found=choice,
            expected=f"{MODEL} or {NONE}",
            do=f"--generation-config {nearest(choice, (MODEL, NONE), 1)}",
        )


def followed(console: Console, target: Target, choice: str | None) -> Suggested | None:
    """What is to be followed; None where nothing is. A part that cannot be is told or refused."""
    if choice != MODEL:
        return None
    found = target.suggested
    if found is None:
        console.warn(f"{target.name} has no generation_config.json: there is nothing to follow")
        return None
    if found.wrong:
        raise IntegrityError(
            f"generation_config.json of {target.name} cannot be followed",
            where="--generation-config",
            found="; ".join(found.wrong),
            expected="values that sampling can have",
            do="correct the file, or leave --generation-config out and give the flags",
        )
    if found.others:
        console.warn(
            f"generation_config.json of {target.name} also asks for {', '.join(found.others)}: "
            "that has no counterpart here and is not followed"
        )
    return found


def tell(
    console: Console, target: Target, choice: str | None, used: Sequence[Sampling], whose: str = ""
) -> None:
    """Say once what the file asks for and what is done; nothing where that is the same."""
    from specctl.runtime.sampling.generation_config import described

    found, what = target.suggested, " and ".join(dict.fromkeys(map(described, used)))
    if found is None or choice == NONE:
        return
    if choice == MODEL:
        console.say(f"sampling by generation_config.json of {target.name} and flags: {what}{whose}")
        return
    if found.wrong:
        console.warn(
            f"generation_config.json of {target.name} has values that mean nothing: "
            + "; ".join(found.wrong)
        )
    ignored = [part for part in found.unlike(used[0]) if all(part in found.unlike(u) for u in used)]
    if ignored:
        console.say(
            f"generation_config.json of {target.name} asks for {', '.join(ignored)}; used: {what}"
            f"{whose} (--generation-config model follows it, none is silent)"
        )
