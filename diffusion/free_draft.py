"""FreeDave (https://arxiv.org/abs/2510.00294): steps of the plain schedule drafted for free, and
verified in one pass.

The plain schedule is a function: the canvas after step k + 1 follows from the canvas after step k
by one pass. A pass over canvas k also guesses what the next steps will keep: the drafts take its
next most confident positions. The next pass reads the canvas and all drafts as one batch. Its first
row gives the true canvas k + 1; where that is the first draft, the second row gives the true canvas
k + 2, and so on. So every canvas that decoding goes on from was computed as the plain schedule
computes it: the text is the same, in fewer passes over more rows.
Letters: L positions, Q picked rows, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specctl.diffusion.canvas import Canvas, CanvasGuess
from specctl.diffusion.passes import Passes
from specctl.diffusion.unmask.base import BlockStep
from specctl.diffusion.unmask.static import StaticUnmask

Ended = Callable[[Canvas, int], bool]  # whether decoding ends with a block that is complete


def free_draft(
    canvas: Canvas, plan: Sequence[BlockStep], ahead: int, passes: Passes, ended: Ended
) -> Canvas:
    """Follow the plan with up to `ahead` drafted canvases in a pass; the last canvas."""
    done, drafts = 0, list[Canvas]()
    while done < len(plan):
        rows = [canvas, *drafts]
        # a row's guess also drafts for the steps behind its own
        ends = [plan[min(done + index + ahead, len(plan) - 1)].last for index in range(len(rows))]
        firsts = [plan[done + index].first for index in range(len(rows))]
        triples = zip(rows, firsts, ends, strict=True)
        guesses = passes.guesses(rows, [row.masked(first, end) for row, first, end in triples])
        for index, guess in enumerate(guesses):
            step = plan[done]
            canvas, done = _kept(rows[index], guess, step), done + 1
            is_over = step.last != plan[done].last if done < len(plan) else True
            if is_over and ended(canvas, step.last):
                return canvas
            is_next = index + 1 < len(rows) and torch.equal(canvas.ids_L, rows[index + 1].ids_L)
            if not is_next:
                # the canvas behind the last step is the text: nothing is to be read of it
                drafts = _drafted(canvas, guess, plan[done : min(done + ahead, len(plan) - 1)])
                break
    return canvas


def _kept(canvas: Canvas, guess: CanvasGuess, step: BlockStep) -> Canvas:
    keep = StaticUnmask().keep(guess, step)
    return canvas.with_tokens(guess.place_Q[keep], guess.token_Q[keep])


def _drafted(canvas: Canvas, guess: CanvasGuess, steps: Sequence[BlockStep]) -> list[Canvas]:
    """The canvases that these steps would lead to if every pass guessed as this one did."""
    drafts = list[Canvas]()
    for step in steps:
        left = (canvas.ids_L[guess.place_Q] == canvas.mask_id).nonzero()[:, 0]
        rest = CanvasGuess(guess.place_Q[left], guess.token_Q[left], guess.logits_QV[left])
        if not rest.within(step.first, step.last).any():
            break
        canvas = _kept(canvas, rest, step)
        drafts.append(canvas)
    return drafts
