"""Prefill: read the prompts of joining rows, all but their last token.

The last prompt token is the root of the row's first round, so that round may draft already and
the invariant kept_len == len(tokens) - 1 holds from the start. Letters: B joining rows, T tokens of
a chunk, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.drafters.parts.slots import SlotKV
from specctl.runtime.session import Row
from specctl.runtime.target import Target

CHUNK = 512


def prefill(
    target: Target, kv: SlotKV, rows: Sequence[Row], taps: tuple[int, ...]
) -> list[dict[int, Tensor]]:
    """Fill the cache and return each row's taps, [kept_len, D]. Rows are right-padded and read in
    chunks; what padding writes lies beyond the kept length and is never seen."""
    longest = max(row.kept_len for row in rows)
    slots = tuple(row.slot for row in rows)
    slot_B = torch.tensor(slots, device=target.device)
    parts: list[dict[int, Tensor]] = []
    for start in range(0, longest, CHUNK):
        width = min(CHUNK, longest - start)
        chunks = [row.tokens[start : min(start + width, row.kept_len)] for row in rows]
        ids_BT = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=target.device)
        start_B = torch.full_like(slot_B, start)
        position_BT = start_B[:, None] + torch.arange(width, device=target.device)
        kv.begin(slots, slot_B, start_B, width, start + width, uniform_start=start)
        masks = target.lm.chain_masks(start_B, width, start + width)
        out = target.lm.forward(ids_BT, position_BT, masks, kv, taps, logits=False)
        parts.append(dict(out.taps))
    return [_taps_of(parts, b, row.kept_len, taps) for b, row in enumerate(rows)]


def _taps_of(
    parts: Sequence[dict[int, Tensor]], b: int, length: int, taps: tuple[int, ...]
) -> dict[int, Tensor]:
    if not parts:
        return {}
    return {tap: torch.cat([part[tap][b] for part in parts])[:length] for tap in taps}
