"""ZipAR (arXiv 2412.04062): rows of a picture's grid are decoded at once, each a window behind.

The tokens of a row wait for those above them, not for the end of the row above: as soon as the
first `window` tokens of a row are there, the next row begins, and every pass decodes one token of
every open row. Token (r, c) of W columns is drawn in pass r * window + c, so a picture of R rows
takes (R - 1) * window + W passes instead of R * W. A token attends to what is before it in raster
order and is already there, at its own position, and is not computed again when more is there.

The first token of a row is predicted behind the last of the row above. Where that is not there yet,
the newest token of the row before it, which lies above that place or nearest to it, is read there,
for this prediction alone (as in the published code for LlamaGen; the second row has no such row,
and the newest of the first is read). `window` = W is plain decoding, token by token; any smaller
one is approximate.
Letters: B rows, L positions, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.language_model import LanguageModel, Masks
from specctl.runtime.sampling.noise import RoundNoise

MARK = "zipar"


@dataclass(frozen=True, slots=True)
class ZippedGrids:
    """`ids_BL`: the grids' tokens in raster order; `passes` of the target over all rows together,
    that over the prompts included, and the tokens that they read of each row."""

    ids_BL: Tensor
    passes: int
    read: int


def verification_of(window: int, grid: int) -> str:
    """What results say of a picture of `grid` columns."""
    return "plain" if window == grid else f"approximate:{MARK}"


@torch.inference_mode()
def zip_grids(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    grid: int,
    window: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int],
) -> ZippedGrids:
    """Grids of `grid` x `grid` tokens behind prompts of one length. The noise of a token depends on
    its seed and position alone, as in plain decoding."""
    check(lm, prompts, grid, window)
    start, device = len(prompts[0]), lm.device
    count, places = len(prompts), grid * grid
    slot_B = torch.arange(count, device=device)
    kv = lm.new_kv(count, start + places + 1)
    noise = RoundNoise(seeds, [0] * count, [0] * count, device)
    ids_BL = torch.zeros(count, places, dtype=torch.long, device=device)
    kept_L = torch.empty(0, dtype=torch.long, device=device)  # positions, in the order of the cache
    fed_BT = torch.tensor([list(prompt) for prompt in prompts], device=device)
    at_T, passes, read = torch.arange(start, device=device), 0, 0
    last = (grid - 1) * window + grid
    for step in range(last):
        drawn = _places(step, grid, window)
        behind_T = torch.tensor([start + place - 1 for place in drawn], device=device)
        standing = drawn[-1] % grid == 0 and drawn[-1] > 0 and window < grid
        num_real = len(at_T)
        if standing:  # the row above has no end yet
            newest = stand_in(drawn[-1] // grid, grid, window)
            fed_BT = torch.cat([fed_BT, ids_BL[:, newest, None]], 1)
            at_T = torch.cat([at_T, behind_T[-1:]])
        kept, num_fed = len(kept_L), len(at_T)
        kept_B = torch.full_like(slot_B, kept)
        kv.begin(tuple(range(count)), slot_B, kept_B, num_fed, kept + num_fed, kept)
        # what stands in lies behind all that is read with it, so that nothing else attends to it
        mask_TL = torch.cat([kept_L, at_T]) <= at_T[:, None]
        masks = Masks(mask_TL.expand(count, 1, -1, -1))
        found = lm.forward(fed_BT, at_T.expand(count, -1), masks, kv).logits_BTV
        assert found is not None
        passes, read = passes + 1, read + num_fed
        from_T = [int((at_T == at).nonzero()[0, 0]) for at in behind_T]
        logits_BTV = found[:, from_T].float()
        if temperature > 0:
            depth_BT = behind_T.expand(count, -1)
            token_BT = noise.target_draw_BT(logits_BTV / temperature, depth_BT)
        else:
            token_BT = logits_BTV.argmax(-1)
        ids_BL[:, drawn] = token_BT
        kept_L = torch.cat([kept_L, at_T[:num_real]])
        fed_BT, at_T = token_BT, behind_T + 1
    return ZippedGrids(ids_BL, passes, read)


def stand_in(row: int, grid: int, window: int) -> int:
    """The place whose token is read where the row above `row` has no end yet: the newest of the row
    before it, which is two windows ahead of `row`."""
    if row == 1:
        return window - 1
    return (row - 2) * grid + min(2 * window, grid) - 1


def _places(step: int, grid: int, window: int) -> list[int]:
    """The places in raster order that a pass draws: one of every open row."""
    rows = range(max(0, -(-(step - grid + 1) // window)), min(grid - 1, step // window) + 1)
    return [row * grid + step - row * window for row in rows]


def check(lm: LanguageModel, prompts: Sequence[Sequence[int]], grid: int, window: int) -> None:
    """Refuse what cannot be decoded so."""
    if not 1 <= window <= grid:
        raise RecipeError(
            "the window of ZipAR is not one of this picture",
            where="picture.window",
            found=str(window),
            expected=f"1 to {grid}, the tokens of a row; {grid} is plain decoding",
            do=f"--set picture.window={grid}",
        )
    if lm.windows or lm.state_bytes:
        raise IncompatibleError(
            "rows of a picture cannot be decoded at once by this target",
            where="picture.window",
            found="recurrent layers" if lm.state_bytes else "layers with a sliding window",
            expected="a model whose layers all attend to the whole text",
            do="leave out picture.window",
        )
    if prompts and max(map(len, prompts)) + grid * grid > lm.spec.max_positions:
        raise IncompatibleError(
            "a prompt and its picture do not fit the target's context",
            where="the prompts",
            found=f"{max(map(len, prompts)):,} tokens, and {grid * grid:,} of the picture",
            expected=f"at most {lm.spec.max_positions:,} in all",
            do="give a shorter prompt",
        )
    if len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
        raise RecipeError(
            "pictures that are decoded together begin behind prompts of one length",
            where="the prompts",
            found=str(sorted({len(prompt) for prompt in prompts})),
            expected="the same number of tokens, at least one",
            do="decode them one by one",
        )
