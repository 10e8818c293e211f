"""PlaneKV: a KV cache of two 4-bit planes, the newest tokens in full (QuantSpec, arXiv 2502.10424).

Keys are rounded by channel over the tokens of a group, values by token over the head (section 4.2).
The upper plane is the nearest of 16 values between the smallest and the largest; the lower one
rounds what is left to sixteenths of a step: upper plane x ~ 4 bits, both together x ~ 8 bits,

    x = (upper + lower / 16) scale + low,   lower = -8 .. 7

The newest known tokens and all drafted ones are in full, in a buffer of `recent` groups (the
paper's double buffer: 2). When it is full, its oldest group moves into the planes; a token that was
rejected never was in them. With `recent` 0 the buffer is rounded as well, anew whenever it is read.
Letters: B rows, E head width, J key/value heads, L positions, P path, T fed tokens, X any axes, Z
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.kv_cache import KVShape, SlotKV

LEVELS, LOWER = 15, 16  # steps of the upper plane; lower steps of one of them
STEP = torch.float16  # of scales and smallest values


@dataclass(frozen=True, slots=True)
class Planes:
    """Rounded numbers: codes [..., E / 2], two a byte, and scale and smallest value, which
    broadcast over the axis that they were taken of. `lower` is None where it is not kept."""

    upper: Tensor
    lower: Tensor | None
    scale: Tensor
    low: Tensor

    def read(self, dtype: torch.dtype) -> Tensor:
        """[..., E]."""
        code = _unpacked(self.upper).float()
        if self.lower is not None:
            code += (_unpacked(self.lower).float() - 8) / LOWER
        return (code * self.scale.float() + self.low.float()).to(dtype)


def rounded(x: Tensor, dim: int, has_lower: bool, mask: Tensor | None = None) -> Planes:
    """Planes of x [..., E], one scale along `dim` each; `mask` says what counts for them."""
    wide, least, most = x.float(), x, x
    if mask is not None:
        least, most = x.masked_fill(~mask, torch.inf), x.masked_fill(~mask, -torch.inf)
    low = least.float().amin(dim, keepdim=True).to(STEP)
    high = most.float().amax(dim, keepdim=True)
    scale = ((high - low.float()) / LEVELS).clamp(min=1e-5).to(STEP)
    left = (wide - low.float()) / scale.float()
    upper = left.round().clamp(0, LEVELS)
    lower = None
    if has_lower:
        lower = _packed(((left - upper) * LOWER).round().clamp(-8, 7) + 8)
    return Planes(_packed(upper), lower, scale, low)


def _packed(code: Tensor) -> Tensor:
    code = code.to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4


def _unpacked(code: Tensor) -> Tensor:
    return torch.stack([code & 15, code >> 4], -1).flatten(-2)


class Stored:
    """The planes of one layer's keys or values, by slot and position. Scales are one a token
    (`per` 1), or one a channel and `per` tokens."""

    def __init__(
        self, shape: tuple[int, int, int, int], per: int, has_lower: bool, device: torch.device
    ) -> None:
        Z, J, L, E = shape
        self.per = per

        def zeros(length: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(Z, J, length, width, dtype=dtype, device=device)

        self.upper = zeros(L, E // 2, torch.uint8)
        self.lower = zeros(L, E // 2, torch.uint8) if has_lower else None
        width = 1 if per == 1 else E
        self.scale, self.low = zeros(L // per, width, STEP), zeros(L // per, width, STEP)

    def parts(self) -> list[Tensor]:
        return [each for each in (self.upper, self.lower, self.scale, self.low) if each is not None]

    def reserve(self, extra: int) -> None:
        def longer(part: Tensor, more: int) -> Tensor:
            return F.pad(part, (0, 0, 0, more))

        self.upper = longer(self.upper, extra)
        self.lower = None if self.lower is None else longer(self.lower, extra)
        self.scale = longer(self.scale, extra // self.per)
        self.low = longer(self.low, extra // self.per)

    def write(self, slot: int, first: int, x_JXE: Tensor) -> None:
        """Positions from `first` on, whole groups of them."""
        J, count, E = x_JXE.shape
        groups = x_JXE.reshape(J, -1, self.per, E)
        planes = rounded(groups, -1 if self.per == 1 else -2, self.lower is not None)
        here, at = slice(first, first + count), first // self.per
        self.upper[slot, :, here] = planes.upper.flatten(1, 2)
        if self.lower is not None and planes.lower is not None:
            self.lower[slot, :, here] = planes.lower.flatten(1, 2)
        many = slice(at, at + count // self.per)
        self.scale[slot, :, many], self.low[slot, :, many] = (
            planes.scale[:, :, 0],
            planes.low[:, :, 0],
        )

    def read(self, slot_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """[B, J, length, E] of those slots; whole groups."""
        many = length // self.per

        def steps(part: Tensor) -> Tensor:
            found = part[:, :, :many][slot_B]
            return found if self.per == 1 else found.repeat_interleave(self.per, dim=2)

        lower = None if self.lower is None else self.lower[:, :, :length][slot_B]
        upper = self.upper[:, :, :length][slot_B]
        return Planes(upper, lower, steps(self.scale), steps(self.low)).read(dtype)


class PlaneKV(SlotKV):
    """`group` tokens share a key's scale; `room` more fit behind the buffer in one write. Whoever
    writes known tokens says so (`settle`), and when a slot begins anew (`forget`)."""

    is_as_read = False

    def __init__(
        self,
        layers: Sequence[KVShape],
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        group: int,
        recent: int,
        has_lower: bool,
        room: int,
    ) -> None:
        self.group, self.recent = group, recent
        self._fill(layers, num_slots, group * max(recent, 1) + room, dtype, device)
        self.max_len = whole = -(-max_len // group) * group

        def stored(heads: int, width: int, per: int) -> Stored:
            return Stored((num_slots, heads, whole, width), per, has_lower, device)

        self.keys = [stored(each.key_heads, each.key_width, group) for each in layers]
        self.values = [stored(each.value_heads, each.value_width, 1) for each in layers]
        self.num_rounded = [0] * num_slots
        self._rounded_B1, self._most, self._num_fed = self._slot_B1, 0, 0
        self._is_level = True

    def begin(
        self,
        slots: tuple[int, ...],
        slot_B: Tensor,
        kept_len_B: Tensor,
        num_fed: int,
        span: int,
        uniform_start: int | None = None,
    ) -> None:
        super().begin(slots, slot_B, kept_len_B, num_fed, span, uniform_start)
        counts = [self.num_rounded[slot] for slot in slots]
        self._most, self._is_level = max(counts), min(counts) == max(counts)
        self._rounded_B1 = torch.tensor(counts, device=slot_B.device)[:, None]
        self._num_fed = num_fed
        at_T = torch.arange(num_fed, device=slot_B.device)
        self._at_BT = self._start_B1 + at_T - self._rounded_B1

    def reserve(self, max_len: int) -> None:
        if max_len <= self.max_len:
            return
        extra = -(-(max_len - self.max_len) // self.group) * self.group
        self.key_ZJLE = [F.pad(key, (0, 0, 0, extra)) for key in self.key_ZJLE]
        self.value_ZJLE = [F.pad(value, (0, 0, 0, extra)) for value in self.value_ZJLE]
        for each in (*self.keys, *self.values):
            each.reserve(extra)
        self.max_len += extra

    def update(self, layer: int, key_BJTE: Tensor, value_BJTE: Tensor) -> tuple[Tensor, Tensor]:
        for store, new_BJTE in ((self.key_ZJLE, key_BJTE), (self.value_ZJLE, value_BJTE)):
            store[layer][self._slot_B1, :, self._at_BT] = new_BJTE.transpose(1, 2)
        return self.read(layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        key = self._joined(self.key_ZJLE[layer], self.keys[layer], dim=-2)
        return key, self._joined(self.value_ZJLE[layer], self.values[layer], dim=-1)

    def _joined(self, recent_ZJXE: Tensor, stored: Stored, dim: int) -> Tensor:
        """[B, J, span, E]: what is rounded, then what is in full, of rows of any lengths."""
        slot_B = self._slot_B1[:, 0]
        recent_BJXE = recent_ZJXE[slot_B]
        if self.recent == 0:
            length_B1 = self._start_B1 + self._num_fed - self._rounded_B1
            at_X = torch.arange(recent_BJXE.shape[2], device=slot_B.device)
            here_B1X1 = (at_X < length_B1)[:, None, :, None] if dim == -2 else None
            planes = rounded(recent_BJXE, dim, stored.lower is not None, here_B1X1)
            recent_BJXE = planes.read(recent_BJXE.dtype)
        most, span = min(self._most, self._span), self._span
        old_BJLE = stored.read(slot_B, most, recent_BJXE.dtype)
        if self._is_level:
            return torch.cat([old_BJLE, recent_BJXE[:, :, : span - most]], dim=2)
        at_BL = torch.arange(span, device=slot_B.device) - self._rounded_B1
        is_new_BL = at_BL >= 0
        index_BL = at_BL.clamp(0, recent_BJXE.shape[2] - 1)
        shape = (*recent_BJXE.shape[:2], span, recent_BJXE.shape[3])
        new_BJLE = recent_BJXE.gather(2, index_BL[:, None, :, None].expand(shape))
        old_BJLE = F.pad(old_BJLE, (0, 0, 0, span - most))
        return torch.where(is_new_BL[:, None, :, None], new_BJLE, old_BJLE)

    def keep(self, slot_B: Tensor, kept_len_B: Tensor, path_BP: Tensor) -> None:
        raise AssertionError("known tokens are written anew, drafted ones are not kept")

    def forget(self, slot: int) -> None:
        """A new text begins in this slot."""
        self.num_rounded[slot] = 0

    def settle(self, slot: int, num_known: int) -> None:
        """So many tokens are known: round those that the buffer no longer holds."""
        first, held = self.num_rounded[slot], self.group * max(self.recent, 1)
        count = max(0, num_known - first - held + self.group) // self.group * self.group
        if not count:
            return
        stores = (*zip(self.key_ZJLE, self.keys, strict=True),)
        for recent, stored in (*stores, *zip(self.value_ZJLE, self.values, strict=True)):
            stored.write(slot, first, recent[slot, :, :count])
            recent[slot] = recent[slot].roll(-count, dims=1)
        self.num_rounded[slot] = first + count

    @property
    def num_bytes(self) -> int:
        """Of planes and buffers."""
        kept = [part for each in (*self.keys, *self.values) for part in each.parts()]
        return sum(part.nbytes for part in (*kept, *self.key_ZJLE, *self.value_ZJLE))
