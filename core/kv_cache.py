"""SlotKV: keys and values of live rows in fixed slots; tree nodes are written, paths are kept.

Rejected entries are never erased: they lie beyond the kept length, masks hide them, the next write
covers them. So rows of different lengths need no realignment.
Letters: B rows, E head width, J key/value heads, L positions, P path, T fed tokens, Z slots.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Aim:
    """Slots and first written positions of the rows, positions read, and whether the rows are the
    first slots in order (then nothing is gathered)."""

    slot_B1: Tensor
    start_B1: Tensor
    span: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of a token. Latent attention keeps one compressed head as its keys and
    rotated positions as its values; layers that read another's cache keep nothing."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def size(self) -> int:
        """Numbers kept of a token."""
        return self.key_heads * self.key_width + self.value_heads * self.value_width


Pointers = ctypes.Array[ctypes.c_void_p]


def _pointers(tensors: Sequence[Tensor]) -> Pointers:
    return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))


class SlotKV:
    """Key/value store of one model. One writer: whoever runs the model's forward.

    A forward is `begin(slot_B, kept_len_B, num_fed, span)`, then an `update` per layer; fed token i
    of row b lands at position kept_len_B[b] + i of its slot. `keep` compacts the accepted path.
    `is_as_read`: what attention reads lies in `key_ZJLE` and `value_ZJLE`.
    """

    is_as_read: ClassVar[bool] = True
    holds_state: ClassVar[bool] = False  # see `slot_state`

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        alike = KVShape(num_kv_heads, head_dim, num_kv_heads, head_dim)
        self._fill([alike] * num_layers, num_slots, max_len, dtype, device)

    @classmethod
    def of(
        cls,
        layers: Sequence[KVShape],
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        devices: Sequence[torch.device] = (),
    ) -> SlotKV:
        """A store whose layers need not be alike, nor on one device (`devices`, one a layer)."""
        kv = cls.__new__(cls)
        kv._fill(layers, num_slots, max_len, dtype, device, devices)
        return kv

    def _fill(
        self,
        layers: Sequence[KVShape],
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        devices: Sequence[torch.device] = (),
    ) -> None:
        def zeros(layer: int, heads: int, width: int) -> Tensor:
            where = devices[layer] if devices else device
            return torch.zeros(num_slots, heads, max_len, width, dtype=dtype, device=where)

        shapes = list(enumerate(layers))
        self.key_ZJLE = [zeros(i, each.key_heads, each.key_width) for i, each in shapes]
        self.value_ZJLE = [zeros(i, each.value_heads, each.value_width) for i, each in shapes]
        self.num_slots, self.max_len, self.num_layers = num_slots, max_len, len(layers)
        self._slot_B1 = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._start_B1 = self._at_BT = self._slot_B1
        self._span, self._whole, self._contiguous = 0, False, -1
        self._addresses: tuple[list[Tensor], tuple[Pointers, Pointers]] | None = None

    @property
    def addresses(self) -> tuple[Pointers, Pointers]:
        """Where each layer's keys and values lie."""
        if self._addresses is None or self._addresses[0] is not self.key_ZJLE:
            both = _pointers(self.key_ZJLE), _pointers(self.value_ZJLE)
            self._addresses = self.key_ZJLE, both
        return self._addresses[1]

    def begin(
        self,
        slots: tuple[int, ...],
        slot_B: Tensor,
        kept_len_B: Tensor,
        num_fed: int,
        span: int,
        uniform_start: int | None = None,
    ) -> None:
        """Aim the coming forward. `span` = host bound on kept_len + num_fed of the rows; attention
        sees that many positions. `uniform_start`: every row's kept length, when the host knows they
        are equal (then the write is a slice copy)."""
        assert span <= self.max_len, f"{span} positions do not fit the cache of {self.max_len}"
        self._slot_B1, self._start_B1 = slot_B[:, None], kept_len_B[:, None]
        self._span = span
        self._whole = slots == tuple(range(len(slots)))
        self._contiguous = -1 if uniform_start is None else uniform_start
        self._at_BT = self._start_B1[:, :0]  # made when asked for
        if not self._whole or uniform_start is None:
            self.places(num_fed)

    @property
    def aim(self) -> Aim:
        """Where the coming forward writes and what it reads."""
        return Aim(self._slot_B1, self._start_B1, self._span, self._whole)

    def aimed(self, aim: Aim, at_BT: Tensor) -> SlotKV:
        """The same store, aimed for good: fed token i of row b is written at at_BT[b, i]. For a
        forward that is recorded with these very tensors."""
        fixed = copy.copy(self)
        fixed._slot_B1, fixed._start_B1, fixed._at_BT = aim.slot_B1, aim.start_B1, at_BT
        fixed._span, fixed._whole, fixed._contiguous = aim.span, aim.is_whole, -1
        return fixed

    def behind(self, num_fed: int) -> SlotKV:
        """The same store, aimed at the fed tokens behind the first `num_fed`."""
        rest = copy.copy(self)
        rest._start_B1, rest._at_BT = self._start_B1 + num_fed, self._at_BT[:, num_fed:]
        if self._contiguous >= 0:
            rest._contiguous = self._contiguous + num_fed
        return rest

    def reserve(self, max_len: int) -> None:
        """Be at least so long; what is stored stays."""
        if (extra := max_len - self.max_len) > 0:
            self.key_ZJLE = [F.pad(key, (0, 0, 0, extra)) for key in self.key_ZJLE]
            self.value_ZJLE = [F.pad(value, (0, 0, 0, extra)) for value in self.value_ZJLE]
            self.max_len = max_len

    def follow(self, other: SlotKV) -> None:
        """Aim as that store is aimed, and be as long."""
        self.reserve(other.max_len)
        self._slot_B1, self._start_B1, self._at_BT = other._slot_B1, other._start_B1, other._at_BT
        self._span, self._whole, self._contiguous = other._span, other._whole, other._contiguous

    def update(self, layer: int, key_BJTE: Tensor, value_BJTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return what attention reads, [B, J, span, E]."""
        keys, values = self.key_ZJLE[layer], self.value_ZJLE[layer]
        B, _, T, _ = key_BJTE.shape
        if self._whole and self._contiguous >= 0:
            at = slice(self._contiguous, self._contiguous + T)
            keys[:B, :, at] = key_BJTE
            values[:B, :, at] = value_BJTE
        else:
            slot_B1, at_BT = self._slot_B1.to(keys.device), self._at_BT.to(keys.device)
            keys[slot_B1, :, at_BT] = key_BJTE.transpose(1, 2)
            values[slot_B1, :, at_BT] = value_BJTE.transpose(1, 2)
        return self.read(layer)

    def places(self, num_fed: int) -> tuple[Tensor, Tensor]:
        """Where `update` writes: slots [B, 1], and the position of every fed token [B, T]."""
        if self._at_BT.shape != (len(self._slot_B1), num_fed):
            self._at_BT = self._start_B1 + torch.arange(num_fed, device=self._start_B1.device)
        return self._slot_B1, self._at_BT

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """What attention reads of one layer, [B, J, span, E], where nothing is written to it."""
        keys, values, slot_B = self.key_ZJLE[layer], self.value_ZJLE[layer], self._slot_B1[:, 0]
        if self._whole:
            return keys[: len(slot_B), :, : self._span], values[: len(slot_B), :, : self._span]
        slot_B = slot_B.to(keys.device)
        return keys[:, :, : self._span][slot_B], values[:, :, : self._span][slot_B]

    def clear(self, slot: int) -> None:
        """Zeros in a slot: what masks hide still counts where it is NaN."""
        for store in (*self.key_ZJLE, *self.value_ZJLE):
            store[slot] = 0

    def keep(self, slot_B: Tensor, kept_len_B: Tensor, path_BP: Tensor) -> None:
        """Move the entries of the accepted path (fed indices, -1 = padding) to the front of the
        round's writes, so that position kept_len + j holds path[j]. Padding moves nothing."""
        to_BP = kept_len_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        from_BP = torch.where(path_BP >= 0, kept_len_B[:, None] + path_BP, to_BP)
        to_BP, from_BP = to_BP.clamp(max=self.max_len - 1), from_BP.clamp(max=self.max_len - 1)
        indices = {slot_B.device: (slot_B[:, None], to_BP, from_BP)}
        for store in (*self.key_ZJLE, *self.value_ZJLE):
            if store.device not in indices:
                own = tuple(index.to(store.device) for index in indices[slot_B.device])
                indices[store.device] = (own[0], own[1], own[2])
            slot_B1, to_BP, from_BP = indices[store.device]
            store[slot_B1, :, to_BP] = store[slot_B1, :, from_BP]
