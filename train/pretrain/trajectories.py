"""Texts of a masked diffusion model itself: prompts of training text, continued by its own plain
schedule. It learns from them what it would have written, in fewer passes.

Letters: B rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.diffusion.canvas import Canvas
from specctl.diffusion.engine import check_prompt
from specctl.diffusion.folder import DiffusionTarget
from specctl.diffusion.passes import Passes
from specctl.diffusion.unmask.base import BlockStep
from specctl.diffusion.unmask.static import StaticUnmask

LONGEST_TOKEN = 16  # bytes of text that are read for each token of a prompt
TRIES = 20  # for each prompt


def prompt_windows(
    encode: Callable[[str], list[int]], texts: Sequence[str], count: int, tokens: int, seed: int
) -> list[list[int]]:
    """Different prompts of `tokens` tokens, which begin where a line does. Raises RecipeError where
    the texts do not have so many."""
    random, found = Random(seed), dict[tuple[int, ...], None]()
    for _ in range(count * TRIES if texts else 0):
        text = random.choice(texts)
        first = text.rfind("\n", 0, random.randrange(len(text) + 1)) + 1
        ids = encode(text[first : first + LONGEST_TOKEN * tokens])[:tokens]
        if len(ids) == tokens:
            found[tuple(ids)] = None
        if len(found) == count:
            return [list(prompt) for prompt in found]
    raise RecipeError(
        "the training text does not have that many prompts",
        where="dparallel.prompts",
        found=f"{len(found):,} of {tokens:,} tokens",
        expected=f"{count:,}",
        do="raise text_bytes, or lower prompts or prompt_tokens",
    )


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Prompts with what the model wrote behind them, from position `start` on."""

    ids_BS: Tensor
    start: int

    def part(self, rows: Tensor | slice) -> Tensor:
        """Some of the rows."""
        return self.ids_BS[rows]


@torch.no_grad()
def written(
    target: DiffusionTarget,
    prompts: Sequence[Sequence[int]],
    block: int,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Trajectories:
    """Continue prompts of one length by the plain schedule of one token a pass, as `denoise` does;
    a pass reads all of them. What stands behind an end of text is filled up with ends of text."""
    shape, start = target.shape, len(prompts[0])
    assert {len(prompt) for prompt in prompts} == {start}, "a batch has prompts of one length"
    passes, length = Passes(target.model, temperature), start + new_tokens
    canvases = list[Canvas]()
    for index, prompt in enumerate(prompts):
        check_prompt(target, prompt, new_tokens)
        drawn = seed + index if temperature > 0 else None
        canvases.append(Canvas.of(prompt, new_tokens, shape.mask_id, shape.vocab_size, drawn))
    for first in range(start, length, block):
        last = min(first + block, length)
        for step in range(last - first):
            places = [canvas.masked(first, last) for canvas in canvases]
            guesses = passes.guesses(canvases, places)
            for canvas, guess in zip(canvases, guesses, strict=True):
                keep = StaticUnmask().keep(guess, BlockStep(first, last, step, 1))
                canvas.ids_L[guess.place_Q[keep]] = guess.token_Q[keep]
    ids_BS = torch.stack([canvas.ids_L for canvas in canvases])
    return Trajectories(_ended(ids_BS, start, target.eos_ids), start)


def _ended(ids_BS: Tensor, start: int, ends: Sequence[int]) -> Tensor:
    """The same with the first end of text of an answer to its end."""
    if not ends:
        return ids_BS
    is_end_BS = torch.isin(ids_BS, torch.tensor(ends))
    is_end_BS[:, :start] = False
    return ids_BS.masked_fill(is_end_BS.cumsum(-1) > is_end_BS.long(), ends[0])
