"""denoise(): one prompt, continued by a masked diffusion model, block by block.

The plain schedule is deterministic for a seed: what a pass keeps follows from the canvas. Every
other way of keeping tokens or of computing passes is approximate and says so, but for `ahead`
(FreeDave), which gives the text of the plain schedule in fewer passes.
Letters: L positions, Q picked rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.diffusion.canvas import Canvas
from specctl.diffusion.folder import DiffusionTarget
from specctl.diffusion.free_draft import free_draft
from specctl.diffusion.passes import Passes
from specctl.diffusion.reuse.base import CanvasReader, WholeReader
from specctl.diffusion.reuse.delayed_kv import DelayedReader
from specctl.diffusion.reuse.window import WindowReader
from specctl.diffusion.settings import DenoiseSettings
from specctl.diffusion.unmask.base import BlockStep, Unmask
from specctl.diffusion.unmask.entropy import EntropyUnmask
from specctl.diffusion.unmask.explore import ExploreUnmask
from specctl.diffusion.unmask.learned import LearnedUnmask, read_filter
from specctl.diffusion.unmask.static import StaticUnmask, counts
from specctl.diffusion.unmask.threshold import ThresholdUnmask

MARKS = {
    "threshold": ThresholdUnmask.mark,
    "entropy": EntropyUnmask.mark,
    "explore": ExploreUnmask.mark,
    "learn2pd": LearnedUnmask.mark,
    "dkv": DelayedReader.mark,
    "window": WindowReader.mark,
}


@dataclass(frozen=True, slots=True)
class Denoised:
    """The answer's ids, up to and with an end of text; why it ended (eos or length); `passes` of
    the model, and the `positions` computed in them."""

    token_ids: tuple[int, ...]
    finish_reason: str
    passes: int
    positions: int


def denoise(
    target: DiffusionTarget, prompt: Sequence[int], settings: DenoiseSettings, **how: Any
) -> Denoised:
    """Continue a prompt; `how` is as in `denoise_with`. Raises SpecctlError where prompt and answer
    do not fit in the context, FileError where a filter is not there."""
    return denoise_with(target, prompt, settings, make_unmask(settings, target.folder), **how)


@torch.inference_mode()
def denoise_with(
    target: DiffusionTarget,
    prompt: Sequence[int],
    settings: DenoiseSettings,
    unmask: Unmask,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
) -> Denoised:
    """The same with a way of keeping tokens in the place of the settings'."""
    shape = target.shape
    check_prompt(target, prompt, max_new_tokens)
    canvas = Canvas.of(
        prompt,
        max_new_tokens,
        shape.mask_id,
        shape.vocab_size,
        seed if temperature > 0 else None,
    )
    ends = () if ignore_eos else target.eos_ids
    passes = Passes(target.model, temperature)

    def ended(now: Canvas, last: int) -> bool:
        return _cut(now.ids_L[now.start : last].tolist(), ends)[1]

    if settings.ahead:
        canvas = free_draft(canvas, _plan(canvas, settings), settings.ahead, passes, ended)
    else:
        _by_blocks(canvas, settings, make_reader(settings, passes, canvas.length),
                   unmask, ended)  # fmt: skip
    answer = canvas.ids_L[canvas.start :].tolist()
    answer = answer[: answer.index(shape.mask_id)] if shape.mask_id in answer else answer
    ids, is_end = _cut(answer, ends)
    return Denoised(tuple(ids), "eos" if is_end else "length", passes.count, passes.positions)


def _by_blocks(
    canvas: Canvas,
    settings: DenoiseSettings,
    reader: CanvasReader,
    unmask: Unmask,
    ended: Callable[[Canvas, int], bool],
) -> None:
    """Denoise the canvas in place."""
    for first, last in _blocks(canvas, settings):
        schedule = counts(last - first, settings.steps or last - first)
        step = 0
        while len(canvas.masked(first, last)):
            place_Q = canvas.masked(first, canvas.length if unmask.is_beyond else last)
            guess = reader.guess(canvas, place_Q)
            count = schedule[min(step, len(schedule) - 1)]
            keep = unmask.keep(guess, BlockStep(first, last, step, count))
            canvas.ids_L[guess.place_Q[keep]] = guess.token_Q[keep]
            step += 1
        if ended(canvas, last):
            return


def _blocks(canvas: Canvas, settings: DenoiseSettings) -> list[tuple[int, int]]:
    firsts = range(canvas.start, canvas.length, settings.block)
    return [(first, min(first + settings.block, canvas.length)) for first in firsts]


def _plan(canvas: Canvas, settings: DenoiseSettings) -> list[BlockStep]:
    """Every step of the plain schedule."""
    return [
        BlockStep(first, last, index, count)
        for first, last in _blocks(canvas, settings)
        for index, count in enumerate(counts(last - first, settings.steps or last - first))
    ]


def _cut(ids: list[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """The ids up to and with the first end of text, and whether there is one."""
    found = [index for index, token in enumerate(ids) if token in ends]
    return (ids[: found[0] + 1], True) if found else (ids, False)


def make_unmask(settings: DenoiseSettings, folder: Path) -> Unmask:
    """What the settings name; a filter lies in the folder of its model."""
    way = settings.unmask_way
    if way.name == "learn2pd":
        model = read_filter(folder)
        check_block(settings.block, model.block, folder)
        return LearnedUnmask(way.numbers[0], model)
    if way.name == "threshold":
        return ThresholdUnmask(*way.numbers)
    if way.name == "entropy":
        return EntropyUnmask(*way.numbers)
    return ExploreUnmask(*way.numbers) if way.name == "explore" else StaticUnmask()


def make_reader(settings: DenoiseSettings, passes: Passes, length: int) -> CanvasReader:
    """What the settings name, for a canvas of that many positions."""
    way = settings.reuse_way
    numbers = tuple(int(number) for number in way.numbers)
    if way.name == "dkv":
        return DelayedReader(passes, length, *numbers)
    if way.name == "window":
        return WindowReader(passes, length, *numbers)
    return WholeReader(passes)


def verification_of(settings: DenoiseSettings) -> str:
    """What results say of the text: plain, lossless (drafted steps were verified), or what it is
    approximate by."""
    if settings.ahead:
        return "lossless"
    ways = settings.unmask_way.name, settings.reuse_way.name
    named = [str(MARKS[way]) for way in ways if way in MARKS]
    return f"approximate:{'+'.join(named)}" if named else "plain"


def check_block(block: int, learned: int, folder: Path) -> None:
    """A filter reads blocks of one length."""
    if block != learned:
        raise IncompatibleError(
            "the filter was trained for blocks of another length",
            where=str(folder),
            found=f"diffusion.block {block}",
            expected=str(learned),
            do=f"--set diffusion.block={learned}",
        )


def check_prompt(target: DiffusionTarget, prompt: Sequence[int], new: int) -> None:
    """Refuse what the model was not made for; an empty prompt has nothing to attend to."""
    shape = target.shape
    if not prompt:
        raise SpecctlError(
            "the prompt is empty",
            where=target.name,
            found="no tokens",
            expected="at least one token",
            do="give it some text",
        )
    if bad := [token for token in prompt if not 0 <= token < shape.vocab_size]:
        raise SpecctlError(
            "the prompt has a token outside the target's vocabulary",
            where=target.name,
            found=str(bad[0]),
            expected=f"0 to {shape.vocab_size - 1}",
            do="encode the prompt with the target's own tokenizer",
        )
    if len(prompt) + new > shape.max_positions:
        raise SpecctlError(
            "prompt and answer do not fit the canvas of the target",
            where=target.name,
            found=f"{len(prompt):,} tokens of the prompt and {new:,} new ones",
            expected=f"at most {shape.max_positions:,} in all",
            do="give a shorter prompt, or a smaller --max-new-tokens",
        )
