"""The flags of `specctl export --publish`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from specctl.cli.options.flags import panel
from specctl.core.errors import RecipeError, one_of_two

published = panel("Published with specctl")


@dataclass(frozen=True, slots=True)
class PublishFlags:
    """Where a drafter is to come with specctl: its name, and what its card gains."""

    name: Annotated[
        str | None,
        published(
            "--publish",
            metavar="NAME",
            help="Put it into published/NAME of this checkout, in bfloat16 (or --store).",
        ),
    ] = None
    license: Annotated[
        str | None, published("--license", help="Licence of the weights, such as apache-2.0.")
    ] = None
    measured: Annotated[
        Path | None,
        published("--measured", help="Card of specctl bench --card, added to its README.md."),
    ] = None
    force: Annotated[bool, published("--force", help="Replace the drafter of that name.")] = False

    def check(self, others: Mapping[str, object]) -> bool:
        """Whether something is published; flags that then are ignored, or that are ignored without,
        are refused."""
        if self.name is not None:
            beside = [flag for flag, value in others.items() if value]
            if beside:
                raise one_of_two(
                    f"--publish writes a package into its own folder, and {beside[0]} is ignored",
                    f"--publish and {beside[0]}",
                    f"leave out {beside[0]}",
                )
            return True
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        if given:
            raise RecipeError(
                f"--{given[0]} is for what is published",
                where=f"--{given[0]}",
                found="no --publish",
                expected="--publish NAME beside it",
                do=f"leave --{given[0]} out",
            )
        return False


NOT_PUBLISHED = PublishFlags()
