"""`specctl generate` with a model that writes pictures in an order of its own (neighbours,
any-order)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.commands.decoded_alone import end_pictures, refuse_given
from specctl.cli.commands.denoised import left_out
from specctl.cli.options.picturing import ImageFlags
from specctl.cli.options.prompts import PromptText
from specctl.cli.options.sampling import SamplingFlags, tell_drawn
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import RecipeError
from specctl.core.storage.grid_kinds import is_grid_folder
from specctl.recipes.targets import resolve

ALWAYS = ("name", "offline")  # of a target's flags
TAKEN = ("temperature", "seed", "ignore_eos")  # no end lies within a picture


def is_gridded(target: TargetChoice, own: str, images: ImageFlags) -> bool:
    """Whether the target is such a model. A number of passes is refused for any other."""
    folder = None if target.name == own else resolve(target.name).path
    if folder is not None and is_grid_folder(folder):
        return True
    if images.passes is not None:
        raise RecipeError(
            "a number of passes means nothing for this target",
            where="picture.passes",
            found=f"{images.passes}, and --target {target.name}",
            expected="a folder that specctl pretrain --recipe tiny-any-order wrote",
            do="leave it out, or give such a folder: docs/images-out.md",
        )
    return False


def generate_gridded(
    console: Console,
    target: TargetChoice,
    sampling: SamplingFlags,
    images: ImageFlags,
    prompts: Sequence[PromptText],
    stats: bool,
    others: Sequence[str],
) -> None:
    """Write the tokens and the pictures. `others`: what was given of flags that such a target does
    not have."""
    more = ["picture.window"] if images.window is not None else []
    more += ["--chat"] if any(prompt.messages for prompt in prompts) else []
    refuse_given(
        "a model of pictures is decoded whole, without drafter",
        left_out(target, sampling, [*others, *more], ALWAYS, TAKEN),
        "temperature, seed, picture.out, and picture.passes for any order",
        ": docs/images-out.md",
    )
    used = sampling.sampling()  # checked, and the seed drawn where it is -1
    images.check_file()
    from specctl.api.grid_images import grid_images
    from specctl.images.grid_folder import load_grid

    model = load_grid(resolve(target.name).path or Path(target.name))
    tell_drawn(console, sampling, used)
    texts = [prompt.text for prompt in prompts]
    made = grid_images(
        model, texts, passes=images.passes, temperature=used.temperature, seed=used.seed
    )
    name = str(Path(target.name))
    follow = command_line(
        "generate", "--target", name, "--temperature", 1, "--set", "picture.out=seven.png", "7"
    )
    plain, about = "one patch a pass", {"name": name}
    end_pictures(console, made, plain, stats, about, images, model.codebook, follow)
