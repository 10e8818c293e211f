"""The two calls of a feature-level drafter's chain, recorded as CUDA graphs.

On a GPU a layer of a drafter takes less time than the host needs to ask for its 40 kernels one by
one. A call whose tensors have the same shapes as before is recorded when it was made `patience`
times (8 cost about as much as to record it), and replayed from then on. Spans are rounded up, so
that a long text has few of them; what lies behind the newest row is masked. It is off (`PATIENCE`):
the one GPU that ran it found a fault (a graph read memory that had been freed), and none has run it
since that was mended. `benchmarks/gpu_checks.py` turns it on.
Letters: B rows, D hidden width, E head width, J key/value heads, L positions, T fed tokens, Z
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specctl.core.cuda_graph import CudaGraph
from specctl.core.kv_cache import Aim, SlotKV

PATIENCE: int | None = None
SPAN = 256
Record = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]


@dataclass
class RecordedCall:
    """One call: its own input buffers, and the graph over them."""

    ids_BT: Tensor
    state_BTD: Tensor
    aim: Aim
    at_BT: Tensor
    replay: Callable[[], tuple[Tensor, ...]] | None = None

    def __call__(self, ids_BT: Tensor, state_BTD: Tensor, aim: Aim) -> tuple[Tensor, ...]:
        self.fill(ids_BT, state_BTD, aim)
        assert self.replay is not None
        return self.replay()

    def fill(self, ids_BT: Tensor, state_BTD: Tensor, aim: Aim) -> None:
        self.ids_BT.copy_(ids_BT)
        self.state_BTD.copy_(state_BTD)
        self.aim.slot_B1.copy_(aim.slot_B1)
        self.aim.start_B1.copy_(aim.start_B1)


@dataclass
class RecordedCalls:
    """The recordings over one cache. `calls(kv, recorded)` runs the call on a cache that is aimed
    for good and on the buffers of `recorded`."""

    record: Record = CudaGraph
    patience: int | None = field(default_factory=lambda: PATIENCE)
    _made: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _recorded: dict[tuple[Any, ...], RecordedCall] = field(default_factory=dict)
    _store: list[Tensor] | None = None

    def forget(self) -> None:
        """The weights or the cache are others now."""
        self._made.clear()
        self._recorded.clear()

    def run(
        self,
        name: str,
        kv: SlotKV,
        ids_BT: Tensor,
        state_BTD: Tensor,
        call: Callable[[SlotKV, RecordedCall], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...] | None:
        """What the call returns, overwritten by the next of this shape; None where it is not
        recorded (yet)."""
        aim = kv.aim
        if self.patience is None or not aim.is_whole:
            return None
        if self._store is not kv.key_ZJLE:
            self.forget()
            self._store = kv.key_ZJLE
        span = min(-(-aim.span // SPAN) * SPAN, kv.max_len)
        key = (name, *ids_BT.shape, span)
        found = self._recorded.get(key)
        if found is None:
            times = self._made[key] = self._made.get(key, 0) + 1
            if times < self.patience:
                return None
            found = self._recorded[key] = self._new(kv, span, ids_BT, state_BTD, aim, call)
        return found(ids_BT, state_BTD, aim)

    def _new(
        self,
        kv: SlotKV,
        span: int,
        ids_BT: Tensor,
        state_BTD: Tensor,
        aim: Aim,
        call: Callable[[SlotKV, RecordedCall], tuple[Tensor, ...]],
    ) -> RecordedCall:
        own = Aim(aim.slot_B1.clone(), aim.start_B1.clone(), span, aim.is_whole)
        recorded = RecordedCall(ids_BT.clone(), state_BTD.clone(), own, torch.empty_like(ids_BT))
        index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)

        def forward() -> tuple[Tensor, ...]:
            torch.add(own.start_B1, index_T, out=recorded.at_BT)
            return call(kv.aimed(own, recorded.at_BT), recorded)

        recorded.replay = self.record(forward, ids_BT.device)
        return recorded
