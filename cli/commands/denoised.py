"""`specctl generate` with a masked diffusion model as its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.commands.decoded_alone import changed_sampling, refuse_given, tell_made
from specctl.cli.options.denoising import DenoisingFlags
from specctl.cli.options.prompts import PromptText
from specctl.cli.options.sampling import NONE, SamplingFlags, tell_drawn
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import RecipeError
from specctl.core.storage.diffusion_kinds import is_diffusion_folder
from specctl.recipes.targets import resolve

ALWAYS = ("name", "device", "dtype", "offline")  # of a target's flags
TAKEN = ("temperature", "seed", "max_new_tokens", "ignore_eos")


def is_denoised(target: TargetChoice, own: str, denoising: DenoisingFlags) -> bool:
    """Whether the target is a masked diffusion model. Settings of one are refused for any other."""
    folder = None if target.name == own else resolve(target.name).path
    if folder is not None and is_diffusion_folder(folder):
        return True
    if given := denoising.given():
        name, value = next(iter(given.items()))
        raise RecipeError(
            "settings of diffusion models mean nothing for this target",
            where=f"diffusion.{name}",
            found=f"{value!r}, and --target {target.name}",
            expected="a folder with a masked diffusion model (LLaDA, Dream)",
            do=f"leave out diffusion.{name}, or give such a folder: docs/diffusion.md",
        )
    return False


def generate_denoised(
    console: Console,
    target: TargetChoice,
    sampling: SamplingFlags,
    denoising: DenoisingFlags,
    prompts: Sequence[PromptText],
    chat: bool | None,
    stats: bool,
    others: Sequence[str],
) -> None:
    """Write the continuations. `others`: what was given of flags that such a target does not
    have."""
    refuse_given(
        "a masked diffusion model is decoded without drafter, and by its own settings alone",
        left_out(target, sampling, others, ALWAYS, TAKEN),
        "temperature, seed, number of tokens, and settings diffusion.*",
        "; to see the settings: specctl generate --help-all",
    )
    used = sampling.sampling()  # checked, and the seed drawn where it is -1
    from specctl.api.denoise import denoise, load_named
    from specctl.diffusion.settings import DenoiseSettings

    DenoiseSettings(**denoising.given())  # what cannot be is refused before the target is read
    model = load_named(target.name, target.device, target.dtype)

    def show(index: int, text: str) -> None:
        if len(prompts) > 1:
            line = " ".join(prompts[index].text.split())[:70]
            console.write(("\n" if index else "") + f"[{index + 1}/{len(prompts)}] {line}\n")
        console.write(text + "\n")

    tell_drawn(console, sampling, used)
    made = denoise(
        model,
        [list(prompt.messages) or prompt.text for prompt in prompts],
        chat=chat,
        on_text=show,
        temperature=sampling.temperature or 0.0,
        seed=used.seed,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=sampling.ignore_eos,
        **denoising.given(),
    )
    tell_made(console, made, "text is", "the plain schedule", stats)
    name = str(Path(target.name))
    nexts = [with_text("generate", "--target", name, "--set", "diffusion.ahead=4", "--stats")]
    console.done({**made.to_json(), "target": {"name": name}}, next=nexts)


def left_out(
    target: TargetChoice,
    sampling: SamplingFlags,
    others: Sequence[str],
    always: Sequence[str],
    taken: Sequence[str],
) -> list[str]:
    """What was given beside the target's flags `always` and the sampling settings `taken`."""
    plain = SamplingFlags(generation_config=NONE)  # it has no part in this
    if sampling.generation_config is None:
        sampling = replace(sampling, generation_config=NONE)
    given = [*others, *changed_sampling(sampling, plain, taken)]
    given += [
        f"target.{field.name}"
        for field in fields(target)
        if field.name not in always and getattr(target, field.name) != field.default
    ]
    return given
