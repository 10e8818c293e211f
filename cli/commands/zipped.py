"""`specctl generate` with pictures whose rows are decoded at once (ZipAR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from specctl.api.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.options.picturing import ImageFlags
from specctl.cli.options.prompts import PromptText
from specctl.core.errors import IncompatibleError

if TYPE_CHECKING:
    from specctl.images.codebook import Codebook
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

TAKEN = ("temperature", "seed", "ignore_eos")


def generate_zipped(
    console: Console,
    target: Target,
    codebook: Codebook,
    images: ImageFlags,
    sampling: Sampling,
    prompts: Sequence[PromptText],
    stats: bool,
) -> None:
    """Write the tokens and the pictures."""
    from specctl.api.zip_images import zip_images

    texts = [prompt.text for prompt in prompts]
    made = zip_images(
        target,
        texts,
        codebook.grid,
        images.window or str(codebook.grid),
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
    for output in made.outputs:
        console.write(output.text + "\n")
    if made.verification.startswith("approximate"):
        console.warn(f"the pictures are {made.verification}: not what plain decoding writes")
    if stats:
        for line in made.lines():
            console.out(line)
    console.result = result = {**made.to_json(), "target": target_json(target)}
    images.write(console, codebook, made.outputs)
    plain = ["--set", f"picture.window={codebook.grid}", "--stats"]
    follow = with_text("generate", "--target", target.name, *plain)
    console.done(result, next=[follow])


def check_zipped(sampling: Sampling, others: Sequence[str]) -> None:
    """Refuse what rows that are decoded at once do not have, whoever set it; `others`: what was
    given beside the sampling."""
    plain = type(sampling)()
    given = [
        f"sample.{field.name}"
        for field in fields(plain)
        if field.name not in TAKEN and getattr(sampling, field.name) != getattr(plain, field.name)
    ]
    if found := [*others, *given]:
        raise IncompatibleError(
            "ZipAR decodes whole pictures, without drafter, with temperature and seed alone",
            where="picture.window",
            found=", ".join(found),
            expected="a target, prompts, temperature and seed",
            do=f"leave out {found[0]} (sample.generation_config=none: what the target suggests), "
            "or picture.window",
        )
