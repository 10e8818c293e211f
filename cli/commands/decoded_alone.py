"""What `specctl generate` shares for targets and settings that draft nothing: models of diffusion,
pictures. They refuse most flags, and end with what was written and how."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.options.picturing import ImageFlags
from specctl.core.errors import IncompatibleError

if TYPE_CHECKING:
    from specctl.api.denoise import DenoiseResult
    from specctl.api.zip_images import PicturesResult
    from specctl.images.codebook import Codebook


def changed_sampling(given: Any, plain: Any, but: Collection[str]) -> list[str]:
    """The settings of sampling that are not as in `plain`, beside the fields `but`."""
    return [
        f"sample.{field.name}"
        for field in fields(plain)
        if field.name not in but and getattr(given, field.name) != getattr(plain, field.name)
    ]


def refuse_given(
    what: str, given: Sequence[str], expected: str, hint: str, where: str = "the command line"
) -> None:
    """IncompatibleError if anything is given that goes not with it; `hint`: behind "leave out" and
    the first of it."""
    if given:
        raise IncompatibleError(
            what,
            where=where,
            found=", ".join(given),
            expected=expected,
            do=f"leave out {given[0]}{hint}",
        )


def tell_made(
    console: Console, made: DenoiseResult | PicturesResult, kind: str, plain: str, stats: bool
) -> None:
    """Warn of what is approximate, as another than `plain`, and say the figures."""
    if made.verification.startswith("approximate"):
        console.warn(f"the {kind} {made.verification}: not what {plain} writes")
    if stats:
        for line in made.lines():
            console.out(line)


def end_pictures(
    console: Console,
    made: PicturesResult,
    plain: str,
    stats: bool,
    target: dict[str, Any],
    images: ImageFlags,
    codebook: Codebook,
    follow: str,
) -> None:
    """Write texts and pictures; the result is there before the file is. `follow`: what to run."""
    for output in made.outputs:
        console.write(output.text + "\n")
    tell_made(console, made, "pictures are", plain, stats)
    console.result = result = {**made.to_json(), "target": target}
    images.write(console, codebook, made.outputs)
    console.done(result, next=[follow])
