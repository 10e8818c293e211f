"""Prefill: read the prompts of joining rows.

The last prompt token is the root of the row's first round, so that round may draft already and
the invariant kept_len == len(tokens) - 1 holds from the start. Where nothing can be drafted the
roots are read with the prompts, and the first round needs no forward of its own. Letters: B joining
rows, T tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.parts.lm import Feed, LmOut
from specctl.drafters.parts.slots import SlotKV
from specctl.runtime.session import Row
from specctl.runtime.target import Target

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Each row's taps, [kept_len, D]; of whole prompts also what a forward of the roots returns."""

    taps: list[dict[int, Tensor]]
    roots: LmOut | None


def prefill(
    target: Target, kv: SlotKV, rows: Sequence[Row], taps: tuple[int, ...], whole: bool = False
) -> Prefilled:
    """Fill the cache with the prompts up to their last tokens, or with those too if `whole`."""
    ends = [row.kept_len + whole for row in rows]
    outs = list(_read(target, kv, rows, ends, taps, whole))
    found = [_taps_of(outs, b, row.kept_len, taps) for b, row in enumerate(rows)]
    if not whole:
        return Prefilled(found, None)
    last = [outs[(end - 1) // CHUNK].logits_BTV for end in ends]
    logits = [logits_B1V[b] for b, logits_B1V in enumerate(last) if logits_B1V is not None]
    return Prefilled(found, LmOut(torch.stack(logits)))


def _read(
    target: Target,
    kv: SlotKV,
    rows: Sequence[Row],
    ends: Sequence[int],
    taps: tuple[int, ...],
    logits: bool,
) -> Iterator[LmOut]:
    """One forward per chunk, with logits at a row's last token. Rows are right-padded; what padding
    writes lies beyond the kept length and is never seen."""
    slots = tuple(row.slot for row in rows)
    slot_B = torch.tensor(slots, device=target.device)
    for start in range(0, max(ends), CHUNK):
        stop = min(start + CHUNK, max(ends))
        width = stop - start
        chunks = [row.tokens[start : min(stop, end)] for row, end in zip(rows, ends, strict=True)]
        ids_BT = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=target.device)
        start_B = torch.full_like(slot_B, start)
        position_BT = start_B[:, None] + torch.arange(width, device=target.device)
        kv.begin(slots, slot_B, start_B, width, stop, uniform_start=start)
        masks = target.lm.chain_masks(start_B, width, stop)
        only = tuple(max(len(chunk), 1) - 1 for chunk in chunks)
        yield target.lm.run(Feed(ids_BT, position_BT, masks, taps, logits, only), kv)


def _taps_of(
    outs: Sequence[LmOut], b: int, length: int, taps: tuple[int, ...]
) -> dict[int, Tensor]:
    if not outs:
        return {}
    return {tap: torch.cat([out.taps[tap][b] for out in outs])[:length] for tap in taps}
