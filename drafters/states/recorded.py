"""What a feature-level drafter does in a round, recorded as CUDA graphs: its newest rows, a node of
a chain, a whole chain.

On a GPU a layer of a drafter takes less time than the host needs to ask for its 40 kernels one by
one. A call whose tensors have the same shapes as before is recorded when it was made `patience`
times, and replayed from then on. Rows are padded and spans rounded up, so that a long text has few
shapes; what lies behind the newest row is masked.
Letters: B rows, E head width, J key/value heads, L positions, T fed tokens, X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specctl.core.cuda_graph import CudaGraph
from specctl.core.kv_cache import Aim, SlotKV

PATIENCE: int | None = 3  # None: nothing is recorded
SPAN = 1024  # of one layer or two; to read it whole costs less than to record it more often
MOST_BYTES = 1 << 30  # of what the recordings return: the logits of long chains of many texts
Record = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]


@dataclass
class RecordedCall:
    """One call: its own input buffers, and the graph over them. `inputs` are fed ids [B, T], the
    states beside them, and what else the call reads."""

    inputs: tuple[Tensor, ...]
    aim: Aim
    at_BT: Tensor
    replay: Callable[[], tuple[Tensor, ...]] | None = None
    num_bytes: int = 0

    def __call__(self, inputs: Sequence[Tensor], aim: Aim) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.aim.slot_B1.copy_(aim.slot_B1)
        self.aim.start_B1.copy_(aim.start_B1)
        assert self.replay is not None
        return self.replay()


Call = Callable[[SlotKV, RecordedCall], tuple[Tensor, ...]]


@dataclass
class RecordedCalls:
    """The recordings over one cache. `call(kv, recorded)` runs the call on a cache that is aimed
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

    def run(self, name: str, kv: SlotKV, call: Call, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """What the call returns, overwritten by the next of this shape; None where it is not
        recorded (yet)."""
        aim = kv.aim
        if self.patience is None:
            return None
        if self._store is not kv.key_ZJLE:
            self.forget()
            self._store = kv.key_ZJLE
        span = min(-(-aim.span // SPAN) * SPAN, kv.max_len)
        key = (name, len(inputs), *inputs[0].shape, span, aim.is_whole)
        found = self._recorded.pop(key, None)
        if found is None:
            times = self._made[key] = self._made.get(key, 0) + 1
            if times < self.patience:
                return None
            found = self._new(kv, span, inputs, call)
        self._recorded[key] = found
        out = found(inputs, aim)
        if found.num_bytes == 0:
            found.num_bytes = sum(x.nbytes for x in out)
            self._make_room(key)
        return out

    def _make_room(self, newest: tuple[Any, ...]) -> None:
        """Those that were longest not asked for go."""
        held = sum(each.num_bytes for each in self._recorded.values())
        for key in [*self._recorded]:
            if held <= MOST_BYTES or key == newest:
                break
            held -= self._recorded.pop(key).num_bytes
            del self._made[key]

    def _new(self, kv: SlotKV, span: int, inputs: tuple[Tensor, ...], call: Call) -> RecordedCall:
        ids_BT, aim = inputs[0], kv.aim
        own = Aim(aim.slot_B1.clone(), aim.start_B1.clone(), span, aim.is_whole)
        buffers = tuple(x.clone() for x in inputs)
        recorded = RecordedCall(buffers, own, torch.empty_like(ids_BT))
        index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)

        def forward() -> tuple[Tensor, ...]:
            torch.add(own.start_B1, index_T, out=recorded.at_BT)
            return call(kv.aimed(own, recorded.at_BT), recorded)

        recorded.replay = self.record(forward, ids_BT.device)
        return recorded
