"""`specctl generate` with pictures whose rows are decoded at once (ZipAR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.commands.decoded_alone import changed_sampling, end_pictures, refuse_given
from specctl.cli.options.picturing import ImageFlags
from specctl.cli.options.prompts import PromptText

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
    plain = ["--set", f"picture.window={codebook.grid}", "--stats"]
    follow = with_text("generate", "--target", target.name, *plain)
    about = target_json(target)
    end_pictures(console, made, "plain decoding", stats, about, images, codebook, follow)


def check_zipped(sampling: Sampling, others: Sequence[str]) -> None:
    """Refuse what rows that are decoded at once do not have, whoever set it; `others`: what was
    given beside the sampling."""
    refuse_given(
        "ZipAR decodes whole pictures, without drafter, with temperature and seed alone",
        [*others, *changed_sampling(sampling, type(sampling)(), TAKEN)],
        "a target, prompts, temperature and seed",
        " (sample.generation_config=none: what the target suggests), or picture.window",
        where="picture.window",
    )
