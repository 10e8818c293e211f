"""Chains by the compiled step: a greedy one in a single call, and one that is drawn by temperature,
top-k, top-p and min-p; any other with a short call a token.

Both give the numbers of as many forwards (`NativeStep.run`) bit for bit.
Letters: B rows, D hidden width, E head width, J key/value heads, K draft vocabulary, L positions, N
nodes, R flat rows, T fed tokens, V target vocabulary, Z slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import ChainDraws, ChainRoot, LmOut, WholeChain
from specctl.models.native.library import ChainCall, StepCall, cuts_of
from specctl.models.native.step import RESIDUAL, NativeStep, address
from specctl.models.torch_threads import most_threads

AHEAD = 64  # positions that a `NextToken` is made for


def whole_chain(step: NativeStep, root: ChainRoot, length: int, kv: SlotKV) -> WholeChain | None:
    """`length` tokens behind the root, which `kv` is aimed at and has room for; None where rounding
    decides what is drawn."""
    (B, T), aim, model = root.ids_BT.shape, kv.aim, step.model
    threads, rotary = most_threads(), step.stack.rotary(aim.span + length - 1)
    needed = step.functions.space_needed(ctypes.byref(model), B * T, aim.span + length - 1, threads)
    token_BN, draws, K = torch.empty(B, length, dtype=torch.long), root.draws, root.num_choices
    logits = torch.empty((B, length) if draws is None else (B, length, K))
    fed, space = torch.empty(3, B, dtype=torch.long), step.space(needed)
    logit_rows = [row * T + at for row, at in enumerate(root.at)]
    num_read = B * (T + length - 1)
    held: dict[str, Any] = {  # alive until the chain is drafted
        "ids": root.ids_BT.contiguous(),
        "position": root.position_BT.contiguous(),
        "slot": aim.slot_B1.contiguous(),
        "start": aim.start_B1.contiguous(),
        "rotary": rotary,
        "keys": kv.addresses[0],
        "values": kv.addresses[1],
        "attention": _table([parts.attention for parts in root.parts], model.num_layers),
        "mlp": _table([parts.mlp for parts in root.parts], model.num_layers),
        "logit_rows": (ctypes.c_int32 * B)(*logit_rows),
        "logits": torch.empty(B, model.V),
        "last": torch.empty(num_read, model.D) if root.residuals else None,
        "space": space,
    }
    call = StepCall(
        *(B, T, kv.max_len, aim.span, 0, B, threads),
        *(kv.key_ZJLE[0].shape[0], rotary.shape[0]),
        **{name: address(each) for name, each in held.items()},
    )
    drawing = [] if draws is None else _drawing(draws, K, logits)
    wanted = ChainCall(
        length,
        root.num_choices,
        model.num_embeddings - 1,
        root.last_position,
        *map(address, (root.choice_ids, token_BN, None if draws else logits, fed, *drawing)),
    )
    work = step.num_layers(root.parts[0] if root.parts else None), length, draws is not None
    outside = step.call(step.chain_function, call, work, ctypes.byref(wanted))
    step.spaces.append(space)
    if outside < 0:
        return None
    if outside:
        ids = torch.cat([root.ids_BT, token_BN], 1)
        raise IndexError(step.message(outside, ids, root.position_BT, kv, rotary))
    if not root.residuals:
        return WholeChain(token_BN, logits)
    last_RD = held["last"].to(step.dtype)
    behind_NBD = last_RD[B * T :].view(length - 1, B, model.D)
    residual_NBD = torch.cat([last_RD[logit_rows][None], behind_NBD])
    return WholeChain(token_BN, logits, residual_NBD.transpose(0, 1))


def _drawing(draws: ChainDraws, K: int, logits_BNK: Tensor) -> list[Any]:
    """What a chain is drawn with, in the order of `ChainCall`."""
    B = len(draws.seeds)
    return [
        (ctypes.c_float * B)(*draws.temperatures),
        None if draws.truncations is None else cuts_of(draws.truncations),
        (ctypes.c_int64 * B)(*draws.seeds),
        (ctypes.c_int64 * B)(*draws.rounds),
        draws.codes(K),
        logits_BNK,
        torch.empty(K),
        torch.empty(K),
    ]


def _table(layers: Sequence[tuple[int, ...]], num_layers: int) -> Any:
    """Of each forward, which layers are among its own; None where nothing is said of any."""
    if not layers:
        return None
    flags = [layer in own for own in layers for layer in range(num_layers)]
    return (ctypes.c_uint8 * len(flags))(*flags)


class NextToken:
    """Forwards of one token a row behind each other, by all layers or by some: all that they share
    is prepared once. One round at a time may use it."""

    def __init__(self, step: NativeStep, slots: tuple[int, ...], kv: SlotKV) -> None:
        model, self.step, self.slots = step.model, step, slots
        self.keys, self.slot_B = kv.key_ZJLE, torch.tensor(slots)
        self.B, self.most = len(slots), kv.aim.span + AHEAD
        self.threads, self.rotary = most_threads(), step.stack.rotary(self.most)
        self.tap = (ctypes.c_int32 * 1)(len(step.stack.layers))
        self.tapped = (ctypes.c_void_p * 1)()
        self.tables: dict[SubLayers | None, tuple[Any, Any]] = {None: (None, None)}
        self.stores = kv.addresses
        needed = step.functions.space_needed(ctypes.byref(model), self.B, self.most, self.threads)
        self.memory = torch.empty(needed)
        self.call = StepCall(
            *(self.B, 1, kv.max_len, 0, 1, self.B, self.threads),
            *(self.keys[0].shape[0], self.rotary.shape[0]),
            slot=address(self.slot_B),
            rotary=address(self.rotary),
            keys=address(self.stores[0]),
            values=address(self.stores[1]),
            taps=address(self.tap),
            tapped=address(self.tapped),
            space=address(self.memory),
        )

    def is_current(self, slots: tuple[int, ...]) -> bool:
        """Whether it still reads these slots, by the weights as they are."""
        return slots == self.slots and self.step.is_current

    def is_of(self, kv: SlotKV) -> bool:
        """Whether that is its cache, and not too long for it."""
        return self.keys is kv.key_ZJLE and kv.aim.span <= self.most

    def read(
        self,
        ids_B1: Tensor,
        position_B1: Tensor,
        kv: SlotKV,
        parts: SubLayers | None = None,
        residual: bool = False,
    ) -> LmOut:
        """Logits behind the tokens that `kv` is aimed at, which see all before them, and the state
        in front of the LM head (the last tap); with `residual` also what leaves the last layer
        (tap RESIDUAL)."""
        step, call, aim = self.step, self.call, kv.aim
        logits, state = torch.empty(self.B, step.model.V), torch.empty(self.B, 1, step.model.D)
        last = torch.empty_like(state) if residual else None
        call.attention, call.mlp = map(address, self._tables(parts))
        call.last = address(last)
        held = ids_B1.contiguous(), position_B1.contiguous(), aim.start_B1.contiguous()
        call.ids, call.position, call.start = (each.data_ptr() for each in held)
        call.span, call.logits, self.tapped[0] = aim.span, logits.data_ptr(), state.data_ptr()
        outside = step.call(step.function, call, (step.num_layers(parts),))
        if outside:
            raise IndexError(step.message(outside, ids_B1, position_B1, kv, self.rotary))
        taps = {self.tap[0]: state.to(step.dtype)}
        if last is not None:
            taps[RESIDUAL] = last.to(step.dtype)
        return LmOut(logits.to(step.dtype)[:, None], taps)

    def _tables(self, parts: SubLayers | None) -> tuple[Any, Any]:
        if parts not in self.tables:
            assert parts is not None
            count = self.step.model.num_layers
            self.tables[parts] = _table([parts.attention], count), _table([parts.mlp], count)
        return self.tables[parts]
