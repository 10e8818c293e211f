"""Prefill: read the prompts of joining rows, a chunk at a time.

The last prompt token is the root of the row's first round, so that round may draft already and
the invariant kept_len == len(tokens) - 1 holds from the start. Where nothing can be drafted the
roots are read with the prompts, and the first round needs no forward of its own. Rows may stand at
different positions: what a slot still holds of a conversation is not read again. At the
placeholders of images the target reads what its vision has made of these, once, and nothing else
in a row's life differs: rounds hold text alone.
Letters: B rows, D hidden width, P path, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.forward.slot_state import StateKV
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.round_drafter import RoundDrafter
from specctl.runtime.target.target import Target

CHUNK = 512


@dataclass(slots=True, eq=False)
class PrefillProgress:
    """A row whose prompt is being read: positions below `at` are in its slot, those below `end`
    are wanted. `taps` of what was read; `root_1V`: logits at the last token, where it was read;
    `drafter_at`: so many positions the drafter has read, too (None: it has not begun). One writer:
    whoever calls `read`."""

    row: Row
    at: int
    end: int
    taps: list[Mapping[int, Tensor]] = field(default_factory=list)
    root_1V: Tensor | None = None
    drafter_at: int | None = None

    @property
    def is_done(self) -> bool:
        return self.at >= self.end

    def prefill_drafter(self, drafting: RoundDrafter, most: int) -> bool:
        """Have the drafter read up to `most` positions of what the target has read; False where no
        more than so many are left, which it reads as the row starts."""
        if self.drafter_at is None:
            self.drafter_at = 0
            drafting.prefill(self.row, {}, 0, 0)
        if self.is_done and self.end - self.drafter_at <= most:
            return False
        first, self.drafter_at = self.drafter_at, min(self.at, self.drafter_at + most)
        drafting.prefill(self.row, self._taps_of(first, self.drafter_at), first, self.drafter_at)
        return True

    def _taps_of(self, first: int, last: int) -> dict[int, Tensor]:
        """Taps at positions first .. last - 1."""
        found: dict[int, list[Tensor]] = {tap: [] for tap in (self.taps or [{}])[0]}
        for tap, parts in found.items():
            at = 0
            for each in self.taps:
                parts.append(each[tap][max(first - at, 0) : max(last - at, 0)])
                at += len(each[tap])
        return {tap: torch.cat(parts) for tap, parts in found.items()}

    def prompt_taps(self) -> dict[int, Tensor]:
        """[kept_len, D] of each tap."""
        return self._taps_of(0, self.row.kept_len)

    def root_taps(self) -> dict[int, Tensor]:
        """[1, D] of each tap at the last token, where it was read."""
        return self._taps_of(self.row.kept_len, self.row.kept_len + 1)


def roots_of(readings: Sequence[PrefillProgress]) -> LmOut:
    """What the target had at the last tokens of prompts, [B, 1, ...]: a round of their roots."""
    logits = [each.root_1V for each in readings if each.root_1V is not None]
    taps = [each.root_taps() for each in readings]
    stacked = {tap: torch.stack([each[tap] for each in taps]) for tap in taps[0]}
    return LmOut(torch.stack(logits), stacked)


def prefill(target: Target, kv: SlotKV, row: Row, taps: tuple[int, ...] = ()) -> dict[int, Tensor]:
    """Fill the cache with a prompt up to its last token; its taps, [kept_len, D]."""
    reading = PrefillProgress(row, 0, row.kept_len)
    while not reading.is_done:
        read(target, kv, [reading], CHUNK, taps)
    return reading.prompt_taps()


def read(
    target: Target,
    kv: SlotKV,
    readings: Sequence[PrefillProgress],
    num_tokens: int,
    taps: tuple[int, ...] = (),
    logits: bool = False,
) -> None:
    """One forward: up to `num_tokens` more of every row that is not done, with logits at its last
    one. Rows are right-padded; what padding writes lies beyond the kept length and is never seen,
    and within the slot: a row close to its end makes the chunk short."""
    readings = [reading for reading in readings if not reading.is_done]
    if not readings:
        return
    starts = [reading.at for reading in readings]
    longest = max(reading.end - reading.at for reading in readings)
    width = target.lm.run_width(len(readings), min(num_tokens, longest))
    width = min(width, num_tokens, kv.max_len - max(starts))
    chunks = [each.row.tokens[each.at : min(each.at + width, each.end)] for each in readings]
    slots = tuple(reading.row.slot for reading in readings)
    slot_B, start_B = torch.tensor([slots, starts], device=target.device).unbind()
    ids_BT = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=target.device)
    position_BT = start_B[:, None] + torch.arange(width, device=target.device)
    position_BT = position_BT.clamp(max=target.spec.max_positions - 1)
    span, same = max(starts) + width, min(starts) == max(starts)
    kv.begin(slots, slot_B, start_B, width, span, starts[0] if same else None)
    masks = target.lm.chain_masks(start_B, width, span)
    only = tuple(len(chunk) - 1 for chunk in chunks)
    feed = Feed(ids_BT, position_BT, masks, taps, logits, only)
    if any(reading.row.request.images is not None for reading in readings):
        assert target.vision is not None, "whoever makes rows with images checks that"
        feed = target.vision.feed(feed, [each.row.request.images for each in readings], starts)
    if target.row_adapters is not None:
        feed = target.row_adapters.onto(feed, [each.row.request.adapter for each in readings])
    out = target.lm.run(feed, kv)
    if isinstance(kv, StateKV):  # the padding of shorter rows must not be read
        at_BP = torch.arange(width, device=target.device).expand(len(chunks), -1)
        lengths_B1 = torch.tensor([[len(chunk)] for chunk in chunks], device=target.device)
        kv.advance(slot_B, torch.where(at_BP < lengths_B1, at_BP, -1))
    for b, (reading, chunk) in enumerate(zip(readings, chunks, strict=True)):
        reading.at += len(chunk)
        reading.taps.append({tap: out.taps[tap][b, : len(chunk)] for tap in taps})
        if out.logits_BTV is not None and reading.is_done:
            reading.root_1V = out.logits_BTV[b]
