"""What a feature-level drafter does in a round, recorded as CUDA graphs: its newest rows, a node of
a chain, a whole chain.

On a GPU a layer of a drafter takes less time than the host needs to ask for its 40 kernels one by
one. A call whose tensors have the same shapes as before is recorded when it was made `patience`
times, and replayed from then on. Rows are padded and spans rounded up, so that a long text has few
shapes; what lies behind the newest row is masked.
Letters: B rows, E head width, J key/value heads, L positions, T fed tokens, X any axes, Z slots.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specctl.core.device.cuda_graph import CudaGraph
from specctl.core.kv_cache import Aim, SlotKV

PATIENCE: int | None = 3  # None: nothing is recorded
SPAN = 1024  # of one layer or two; to read it whole costs less than to record it more often
MOST = 32  # recordings that are kept,
MOST_BYTES = 1 << 30  # and of what they return: the logits of long chains of many texts
Record = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The buffers that one recording reads: fed ids [B, T], the states beside them, and what else
    its call takes; where the cache is aimed; and the positions of the fed tokens."""

    inputs: tuple[Tensor, ...]
    aim: Aim
    at_BT: Tensor


@dataclass(slots=True)
class Recording:
    """A call that is replayed on its own buffers."""

    own: RecordedCall
    replay: Callable[[], tuple[Tensor, ...]]
    num_bytes: int = 0

    def __call__(self, inputs: tuple[Tensor, ...], aim: Aim) -> tuple[Tensor, ...]:
        for mine, given in zip(self.own.inputs, inputs, strict=True):
            mine.copy_(given)
        self.own.aim.slot_B1.copy_(aim.slot_B1)
        self.own.aim.start_B1.copy_(aim.start_B1)
        out = self.replay()
        self.num_bytes = sum(x.nbytes for x in out)
        return out


@dataclass
class RecordedCalls:
    """The recordings over one cache, of methods of the state that holds them: `method(*more, kv,
    own)` computes with a cache that is aimed for good and on the buffers `own`. They do not hold
    the state, so that all of it goes with its engine."""

    record: Record = CudaGraph
    patience: int | None = field(default_factory=lambda: PATIENCE)
    _made: dict[Key, int] = field(default_factory=dict)
    _recorded: dict[Key, Recording] = field(default_factory=dict)
    _store: list[Tensor] | None = None

    def forget(self) -> None:
        """The weights or the cache are others now."""
        self._made.clear()
        self._recorded.clear()

    def run(
        self,
        name: str,
        kv: SlotKV,
        method: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        more: tuple[Any, ...] = (),
    ) -> tuple[Tensor, ...] | None:
        """What the method returns, overwritten by the next of this shape; None where it is not
        recorded (yet)."""
        if self.patience is None:
            return None
        if self._store is not kv.key_ZJLE:
            self.forget()
            self._store = kv.key_ZJLE
        aim = kv.aim
        span = min(-(-aim.span // SPAN) * SPAN, kv.max_len)
        key = (name, len(inputs), *inputs[0].shape, span, aim.is_whole)
        found = self._recorded.pop(key, None)
        if found is None:
            times = self._made[key] = self._made.get(key, 0) + 1
            if times < self.patience:
                return None
            found = self._new(kv, span, method, inputs, more)
            if found is None:
                return None
        self._recorded[key] = found
        out = found(inputs, aim)
        self._make_room()
        return out

    def _make_room(self) -> None:
        """Those that were longest not asked for go."""
        held = sum(each.num_bytes for each in self._recorded.values())
        while len(self._recorded) > (1 if held > MOST_BYTES else MOST):
            oldest = next(iter(self._recorded))
            held -= self._recorded.pop(oldest).num_bytes
            del self._made[oldest]

    def _new(
        self,
        kv: SlotKV,
        span: int,
        method: Callable[..., tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        more: tuple[Any, ...],
    ) -> Recording | None:
        """None where the GPU cannot record it: nothing is from then on."""
        ids_BT, aim, weak = inputs[0], kv.aim, weakref.WeakMethod(method)
        own_aim = Aim(aim.slot_B1.clone(), aim.start_B1.clone(), span, aim.is_whole)
        own = RecordedCall(tuple(x.clone() for x in inputs), own_aim, torch.empty_like(ids_BT))
        index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        aimed = kv.aimed(own_aim, own.at_BT)

        def forward() -> tuple[Tensor, ...]:
            call = weak()
            assert call is not None, "its state is gone"
            torch.add(own_aim.start_B1, index_T, out=own.at_BT)
            return call(*more, aimed, own)

        try:
            return Recording(own, self.record(forward, ids_BT.device))
        except RuntimeError as error:  # of CUDA, out of memory among them
            self.patience = None
            self.forget()
            warnings.warn(f"the drafter is not recorded, and slower: {error}", stacklevel=2)
            return None
