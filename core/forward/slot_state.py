"""What recurrent layers remember of the text in each slot, and a cache that holds it.

A recurrent state sums up all tokens before it and cannot be rolled back, so it never runs ahead. A
forward leaves what its tokens would add to the states as *pending*, and `advance` adds the tokens
of the accepted path. Rejected nodes and padding stand in no path, so they touch no state.
Letters: B rows, I input width (channels of a convolution), L positions, P path, T fed tokens, W
window (inputs of a convolution in front of the current one), X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.kv_cache import Aim, KVShape, SlotKV

Place = tuple[int, int]  # a layer, and which of its convolutions or of the heads of its state
PENDING = 2048  # prompt tokens at most that are read at once, since what they add waits until then
WHOLE = -1  # all heads of a state
TORN = -1  # position of a slot whose layers do not stand at one token


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer remembers beside keys and values. `convs`: channels and kept inputs of each of
    its convolutions; `recurrent`: the shape of its state, () where it has none; `added`: numbers
    that say what a token adds to that state."""

    convs: tuple[tuple[int, int], ...] = ()
    recurrent: tuple[int, ...] = ()
    added: int = 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one slot: convolutions in the model's `dtype`, the state in float32."""
        inputs = sum(channels * kept for channels, kept in self.convs)
        return inputs * dtype.itemsize + (4 * prod(self.recurrent) if self.recurrent else 0)

    def pending_bytes(self, dtype: torch.dtype) -> int:
        """Memory of a fed token until its path is known."""
        return sum(channels for channels, _ in self.convs) * dtype.itemsize + 4 * self.added


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a model with recurrent layers keeps of a row, by layer."""

    layers: tuple[KVShape, ...]
    states: tuple[StateShape, ...]

    def position_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the keys and values of a token."""
        return sum(layer.size for layer in self.layers) * dtype.itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the states of a row, however long it is."""
        return sum(shape.num_bytes(dtype) for shape in self.states)

    def pending_bytes(self, dtype: torch.dtype) -> int:
        """Memory of a fed token until its path is known."""
        return sum(shape.pending_bytes(dtype) for shape in self.states)


class PendingState(Protocol):
    """What the tokens of a forward would add to the states in front of them."""

    def after(self, state_BX: Tensor, path_BP: Tensor) -> Tensor:
        """The states behind the tokens of each row's path (fed indices, -1 = padding at the end)
        if `state_BX` stood in front of it."""


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The states of one slot behind its first `position` tokens."""

    position: int
    conv: Mapping[Place, Tensor]
    recurrent: Mapping[int, Tensor]


class SlotState:
    """States of one model, by layer and slot. One writer: whoever runs the model's forward.

    `position_Z` counts the tokens that the states of a slot have read. A forward begins where they
    stand, or at zero, which empties them: what a slot held before would be read otherwise, since no
    mask hides a state.
    """

    def __init__(
        self,
        layers: Sequence[StateShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.conv: dict[Place, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        for layer, shape in enumerate(layers):
            where = devices[layer] if devices else device
            for idx, (channels, kept) in enumerate(shape.convs):
                inputs = torch.zeros(num_slots, channels, kept, dtype=dtype, device=where)
                self.conv[layer, idx] = inputs
            if shape.recurrent:  # 8 bits of mantissa lose what a state sums up over a text
                size = num_slots, *shape.recurrent
                self.recurrent[layer] = torch.zeros(size, dtype=torch.float32, device=where)
        self.position_Z = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._slot_B = self.position_Z[:0]
        self._inputs: dict[Place, Tensor] = {}
        self._pending: dict[Place, PendingState] = {}

    def begin(self, slot_B: Tensor, kept_len_B: Tensor) -> None:
        """Aim the coming forward; an error where a row's kept length is not where its states stand.
        What is pending of a forward before is dropped. Lengths are compared on the host, which
        waits for a GPU."""
        self._slot_B = slot_B
        self._inputs, self._pending = {}, {}
        both = torch.stack([slot_B, kept_len_B, self.position_Z[slot_B]])
        for slot, kept, position in both.T.tolist():
            if kept == position:
                continue
            if kept:
                raise _misplaced(slot, kept, position)
            self.clear(slot)

    def conv_of(self, place: Place) -> Tensor:
        """The inputs [B, I, W] in front of the fed tokens, the oldest first."""
        held = self.conv[place]
        return held[self._slot_B.to(held.device)]

    def state_of(self, layer: int) -> Tensor:
        """The states [B, ...] in front of the fed tokens, float32."""
        held = self.recurrent[layer]
        return held[self._slot_B.to(held.device)]

    def leave_inputs(self, place: Place, input_BIT: Tensor) -> None:
        """What the fed tokens give a convolution to read. A part of a larger tensor is copied, or
        it would keep the whole until the path is known."""
        is_part = input_BIT.untyped_storage().nbytes() > input_BIT.nbytes
        self._inputs[place] = input_BIT.clone() if is_part else input_BIT

    def leave(self, place: Place, pending: PendingState) -> None:
        """What the fed tokens add to a state, `WHOLE` or the head that the place names."""
        self._pending[place] = pending

    def advance(self, slot_B: Tensor, path_BP: Tensor) -> None:
        """Add each row's path (fed indices, the root first, -1 = padding at the end) of the last
        forward to its states. Only once: nothing is pending afterwards."""
        assert self._inputs or self._pending, "no forward is pending: its path is kept already"
        assert slot_B.shape == self._slot_B.shape, f"{slot_B.shape} rows of {self._slot_B.shape}"
        end_B = self.position_Z[slot_B] + (path_BP >= 0).sum(1)
        self.position_Z[slot_B] = TORN  # until the last layer has moved: memory may run out
        for place, input_BIT in self._inputs.items():
            held = self.conv[place]
            at_B, own_BP = slot_B.to(held.device), path_BP.to(held.device)
            held[at_B] = _last_inputs(held[at_B], input_BIT, own_BP)
        for (layer, head), pending in self._pending.items():
            held = self.recurrent[layer] if head == WHOLE else self.recurrent[layer][:, head]
            at_B, own_BP = slot_B.to(held.device), path_BP.to(held.device)
            if len(at_B) == 1 and held.device.type == "cpu":  # in place: a state may be megabytes
                held = held[int(at_B) :][:1]
                held.copy_(pending.after(held, own_BP))
            else:
                held[at_B] = pending.after(held[at_B], own_BP)
        self.position_Z[slot_B] = end_B
        self._inputs, self._pending = {}, {}

    def position(self, slot: int) -> int:
        """Of how many tokens a slot's states are."""
        return int(self.position_Z[slot])

    def snapshot(self, slot: int) -> StateSnapshot:
        """A copy of the states of a slot."""
        conv = {place: held[slot].clone() for place, held in self.conv.items()}
        recurrent = {layer: held[slot].clone() for layer, held in self.recurrent.items()}
        return StateSnapshot(self.position(slot), conv, recurrent)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Have a slot stand where the snapshot was taken."""
        self.position_Z[slot] = TORN
        for place, value in snapshot.conv.items():
            self.conv[place][slot] = value
        for layer, value in snapshot.recurrent.items():
            self.recurrent[layer][slot] = value
        self.position_Z[slot] = snapshot.position

    def clear(self, slot: int) -> None:
        """Empty states in a slot, of no token."""
        for held in (*self.conv.values(), *self.recurrent.values()):
            held[slot] = 0
        self.position_Z[slot] = 0


class StateKV(SlotKV):
    """Keys and values of the layers that attend, states of those that do not.

    `begin`, a forward, then `keep` with a path per row, or `advance` where the path is a run: its
    keys and values lie where they belong."""

    holds_state: ClassVar[bool] = True
    state: SlotState

    @classmethod
    def with_states(
        cls,
        layers: Sequence[KVShape],
        states: Sequence[StateShape],
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        devices: Sequence[torch.device] = (),
    ) -> StateKV:
        """An empty store of that many slots; a layer may have keys, states, both or neither."""
        kv = cls.__new__(cls)
        kv._fill(layers, num_slots, max_len, dtype, device, devices)
        kv.state = SlotState(states, num_slots, dtype, device, devices)
        return kv

    def begin(
        self, slots: tuple[int, ...], slot_B: Tensor, kept_len_B: Tensor, *how: Any, **more: Any
    ) -> None:
        super().begin(slots, slot_B, kept_len_B, *how, **more)
        self.state.begin(slot_B, kept_len_B)

    def keep(self, slot_B: Tensor, kept_len_B: Tensor, path_BP: Tensor) -> None:
        super().keep(slot_B, kept_len_B, path_BP)
        self.advance(slot_B, path_BP)

    def advance(self, slot_B: Tensor, path_BP: Tensor) -> None:
        """Add each row's path to its states; keys and values stay where they are."""
        self.state.advance(slot_B, path_BP)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.state.clear(slot)

    def aimed(self, aim: Aim, at_BT: Tensor) -> SlotKV:
        self._refuse("a recorded forward")

    def behind(self, num_fed: int) -> SlotKV:
        self._refuse("a forward in two parts")

    def follow(self, other: SlotKV) -> None:
        self._refuse("a cache beside another")

    def _refuse(self, what: str) -> NoReturn:
        raise SpecctlError(
            f"{what} cannot read a target with recurrent states",
            found="states that move once a round, by its accepted path",
            expected="a target of attention alone",
            do="decode this target without it",
        )


def _last_inputs(held_BIW: Tensor, input_BIT: Tensor, path_BP: Tensor) -> Tensor:
    """The last inputs [B, I, W] of each row: of its path, and of what stood in front of it."""
    B, width, kept = held_BIW.shape
    at_BIP = path_BP.clamp(min=0)[:, None].expand(B, width, -1)
    read_BIL = torch.cat([held_BIW, input_BIT.gather(2, at_BIP).to(held_BIW.dtype)], dim=2)
    first_B1 = (path_BP >= 0).sum(1, keepdim=True)
    last_BW = first_B1 + torch.arange(kept, device=path_BP.device)
    return read_BIL.gather(2, last_BW[:, None].expand(B, width, kept))


def _misplaced(slot: int, kept: int, position: int) -> SpecctlError:
    return SpecctlError(
        "the recurrent states of a slot are not those of its text",
        found=f"states behind {position:,} tokens in slot {slot}",
        expected=f"states behind the {kept:,} tokens that are kept",
        do="report this as a bug: the text would have been wrong from here on",
    )
