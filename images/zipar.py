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

With an adaptive window a row begins where a token more of the row above no longer changes its first
token, by a test as in speculative decoding (`FirstToken`); every row has a window of its own then.
Letters: B rows, L positions, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.language_model import LanguageModel, Masks
from specctl.images.grid_net import DrawnGrids
from specctl.runtime.sampling.noise import RoundNoise

MARK, AUTO = "zipar", "auto:"


@dataclass(frozen=True, slots=True)
class RowWindow:
    """How many tokens of a row there must be before the next begins; where `is_adaptive`, at
    least so many."""

    tokens: int
    is_adaptive: bool = False

    @classmethod
    def read(cls, given: int | str) -> RowWindow:
        """A number, or auto:NUMBER. Raises RecipeError for anything else."""
        number = str(given).removeprefix(AUTO)
        if not number.isascii() or not number.isdecimal() or len(number) > 9 or not int(number):
            raise RecipeError(
                "the window of ZipAR is none",
                where="picture.window",
                found=repr(given)[:60],
                expected=f"a number of tokens, or {AUTO}MIN",
                do=f"--set picture.window={AUTO}3",
            )
        return cls(int(number), str(given).startswith(AUTO))

    def verification(self, grid: int) -> str:
        """What results say of a picture of `grid` columns."""
        if self.tokens == grid:
            return "plain"
        return f"approximate:{MARK}{'-auto' if self.is_adaptive else ''}"


@torch.inference_mode()
def zip_grids(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    grid: int,
    window: RowWindow,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int],
) -> DrawnGrids:
    """Grids of `grid` x `grid` tokens behind prompts of one length; one prompt where the window is
    adaptive, as its pictures take different passes. The noise of a token depends on its seed and
    position alone, as in plain decoding."""
    check(lm, prompts, grid, window)
    start, device = len(prompts[0]), lm.device
    count, places = len(prompts), grid * grid
    slot_B = torch.arange(count, device=device)
    kv = lm.new_kv(count, start + places + 1)
    noise = RoundNoise(seeds, [0] * count, [0] * count, device)
    first = FirstToken(torch.Generator().manual_seed(seeds[0] % 2**63), temperature)
    ids_BL = torch.zeros(count, places, dtype=torch.long, device=device)
    kept_L = torch.empty(0, dtype=torch.long, device=device)  # positions, in the order of the cache
    fed_BT = torch.tensor([list(prompt) for prompt in prompts], device=device)
    at_T, passes, read = torch.arange(start, device=device), 0, 0
    there = [0] * grid  # tokens of each row
    while there[-1] < grid:
        rows = open_rows(there, grid, window.tokens)
        newest_row = rows[-1]
        drawn = [row * grid + there[row] for row in rows]
        behind_T = torch.tensor([start + place - 1 for place in drawn], device=device)
        begins = newest_row > 0 and there[newest_row] == 0
        num_real = len(at_T)
        if begins and there[newest_row - 1] < grid:  # the row above has no end yet
            before = max(newest_row - 2, 0)
            stand_in = before * grid + there[before] - 1
            fed_BT = torch.cat([fed_BT, ids_BL[:, stand_in, None]], 1)
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
        if begins and window.is_adaptive:
            is_whole = there[newest_row - 1] == grid
            token = first.settled(logits_BTV[0, -1], int(token_BT[0, -1]), is_whole)
            if token is None:  # the window is too small so far: the row does not begin yet
                rows, drawn, behind_T = rows[:-1], drawn[:-1], behind_T[:-1]
                token_BT = token_BT[:, :-1]
            else:
                token_BT[0, -1] = token
        ids_BL[:, drawn] = token_BT
        for row in rows:
            there[row] += 1
        kept_L = torch.cat([kept_L, at_T[:num_real]])
        fed_BT, at_T = token_BT, behind_T + 1
    return DrawnGrids(ids_BL, passes, read)


def open_rows(there: Sequence[int], grid: int, window: int) -> list[int]:
    """The rows of which a pass draws a token: those that have begun and have no end, and the next,
    where the row above it has the tokens of a window."""
    begun = [row for row in range(grid) if row == 0 or there[row - 1] >= window]
    return [row for row in begun if there[row] < grid]


@dataclass(slots=True)
class FirstToken:
    """The first token of the row that is to begin, under the adaptive window.

    A token drawn at a window of s tokens, from p_s, is tested when s + 1 are there: it stands with
    probability min(1, p_{s+1}(x) / p_s(x)), and then the row begins with it. Else another is drawn
    from the residual max(0, p_{s+1} - p_s), and tested a pass later again, up to the whole row
    above, whose prediction stands. Greedy: it stands where it is the likeliest again. One writer:
    `settled`."""

    random: torch.Generator
    temperature: float
    token: int | None = None
    before_V: Tensor | None = None

    def settled(self, logits_V: Tensor, drawn: int, is_whole: bool) -> int | None:
        """The token with which the row begins; None where it does not yet. `drawn`: from these
        logits; `is_whole`: whether the row above is."""
        p_V = (logits_V / (self.temperature or 1.0)).softmax(-1).cpu()
        token, stands = self.token, False
        if token is None:
            token = drawn
        elif self.temperature == 0:
            token, stands = drawn, drawn == token
        else:
            assert self.before_V is not None
            ratio = float(p_V[token] / self.before_V[token])
            stands = float(torch.rand((), generator=self.random)) < ratio
            if not stands:
                left_V = (p_V - self.before_V).clamp(min=0)
                token = int(torch.multinomial(left_V, 1, generator=self.random))
        if stands or is_whole:
            self.token = self.before_V = None
            return token
        self.token, self.before_V = token, p_V
        return None


def check(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], grid: int, window: RowWindow
) -> None:
    """Refuse what cannot be decoded so."""
    if not 1 <= window.tokens <= grid:
        raise RecipeError(
            "the window of ZipAR is not one of this picture",
            where="picture.window",
            found=str(window.tokens),
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
    assert len(prompts) == 1 or not window.is_adaptive, "pictures differ in their passes"
