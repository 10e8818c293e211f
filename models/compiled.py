"""CompiledLM: a round's forward in few fixed shapes, replayed as a CUDA graph or compiled code.

A round feeds T tokens per row against a span of cache positions. Both are rounded up, so that a
whole generation has a handful of shapes, and each shape is recorded once: as a CUDA graph on
CUDA, by torch.compile elsewhere. The wrapped model stays the oracle and does all that is no round
(prefills, training). Tokens of the padding see position 0 alone and are written behind the real
ones, where the next round writes anyway.
Letters: B rows, D hidden width, E head width, J key/value heads, L positions, T fed tokens, V
target vocabulary, W window, Z slots.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from specctl.core.device.cuda_graph import CudaGraph
from specctl.core.forward.exit_states import ExitStates
from specctl.core.kv_cache import Aim, KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
SPAN = 256
MOST_SHAPES = 96  # kept; each holds the logits of its round
PATIENCE = 3  # where nobody asked for recordings


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What one recording serves."""

    rows: int
    width: int
    span: int
    is_whole: bool
    taps: tuple[int, ...]

    @classmethod
    def of(cls, feed: Feed, aim: Aim) -> RoundShape:
        rows, num_fed = feed.ids_BT.shape
        width = next(width for width in WIDTHS if width >= num_fed)
        return cls(rows, width, -(-aim.span // SPAN) * SPAN, aim.is_whole, feed.taps)


class CompiledLM(LanguageModel):
    """A language model whose rounds are recorded; `backend` is torch.compile's. A shape is recorded
    when it is asked for the `patience`-th time: to record costs about three forwards."""

    def __init__(self, lm: LanguageModel, backend: str = "inductor", patience: int = 1) -> None:
        assert not lm.state_bytes, "states move beside the recorded step"
        self.lm, self.backend, self.patience = lm, backend, patience
        self.spec, self.module, self.windows = lm.spec, lm.module, lm.windows
        self._recorded: dict[RoundShape, Recorded] = {}
        self._asked: dict[RoundShape, int] = {}
        self._weights: object = None
        self._store: SlotKV | None = None
        self._is_lent = False

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self.lm.kv_layers

    @property
    def num_shapes(self) -> int:
        """Shapes recorded so far."""
        return len(self._recorded)

    def is_recorded_upon(self, kv: SlotKV) -> bool:
        """Whether rounds with this cache are replayed."""
        return self._store is not None and kv.key_ZJLE is self._store.key_ZJLE

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        if kv is None or not self.is_recorded_upon(kv):
            return self.lm.run(feed, kv)
        is_plain = feed.logits and feed.only is None and feed.parts is None and not feed.added
        is_round = is_plain and feed.residual_BTD is None and feed.ids_BT.shape[1] <= WIDTHS[-1]
        if torch.is_grad_enabled() or not is_round:
            return self.lm.run(feed, kv)
        if (weights := self.lm.read_weights()) is not self._weights:
            self._recorded.clear()
            self._weights = weights
        shape = RoundShape.of(feed, kv.aim)
        recorded = self._recorded.get(shape)
        if recorded is None:
            times = self._asked[shape] = self._asked.get(shape, 0) + 1
            if times < self.patience:
                return self.lm.run(feed, kv)
            if len(self._recorded) == MOST_SHAPES:  # the one that was longest not asked for goes
                oldest = next(iter(self._recorded))
                del self._recorded[oldest], self._asked[oldest]
            recorded = Recorded(self.lm, kv, shape, self.backend)
        else:
            del self._recorded[shape]
        self._recorded[shape] = recorded
        return recorded(feed, kv.aim)

    def resume(self, feed: Feed, exits: ExitStates, kv: SlotKV) -> LmOut | None:
        """What is recorded are whole forwards, faster than a part of one that is not."""
        return None

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        """A cache with space for padding. One store at a time is recorded upon: the last engine's
        is lent again once that engine is gone, with its recordings, if it is large enough."""
        size = -(-(max_len + WIDTHS[-1]) // SPAN) * SPAN
        if self._is_lent:
            return self.lm.new_kv(num_slots, size)
        store = self._store
        if store is not None and not self._fits(store, num_slots, size):
            self._recorded.clear()
            self._asked.clear()
            store = self._store = None
            gc.collect()  # recordings hold each other and the cache they were made on
        if store is None:
            self._store = store = self.lm.new_kv(num_slots, size)
        lent, self._is_lent = copy.copy(store), True
        weakref.finalize(lent, self._take_back)
        return lent

    def _fits(self, store: SlotKV, num_slots: int, size: int) -> bool:
        keys = store.key_ZJLE[0]
        is_alike = keys.dtype == self.lm.dtype and keys.device == self.lm.device
        return is_alike and store.num_slots == num_slots and store.max_len >= size

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLM:
        """Without what is recorded."""
        return CompiledLM(copy.deepcopy(self.lm, memo), self.backend, self.patience)

    def _take_back(self) -> None:
        self._is_lent = False

    def check_unchanged(self) -> None:
        self.lm.check_unchanged()

    def borrowed(self) -> Borrowed:
        return self.lm.borrowed()


class Recorded:
    """One shape's forward with its own input buffers. What it returns is overwritten by the next
    call, but for the taps, which drafters keep."""

    def __init__(self, lm: LanguageModel, kv: SlotKV, shape: RoundShape, backend: str) -> None:
        B, W, L = shape.rows, shape.width, shape.span
        device = kv.key_ZJLE[0].device
        with torch.inference_mode(False):

            def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
                return torch.zeros(size, dtype=dtype, device=device)

            masks = Masks(
                zeros(B, 1, W, L, dtype=torch.bool),
                {w: zeros(B, 1, W, L, dtype=torch.bool) for w in lm.windows},
            )
            self.feed = Feed(zeros(B, W), zeros(B, W), masks, shape.taps)
            self.aim = Aim(zeros(B, 1), zeros(B, 1), L, shape.is_whole)
            self.at_BW = zeros(B, W)
            self.index_W = torch.arange(W, device=device)
        own = kv.aimed(self.aim, self.at_BW)

        def forward() -> LmOut:
            return lm.run(self.feed, own)

        assert isinstance(forward, FunctionType)
        self.forward, self.backend = forward, backend
        self.replay: Callable[[], LmOut] | None = None

    def __call__(self, feed: Feed, aim: Aim) -> LmOut:
        num_fed = feed.ids_BT.shape[1]
        self._fill(feed, aim, num_fed)
        if self.replay is None:
            self.replay = record(self.forward, self.aim.slot_B1.device, self.backend)
        out = self.replay()
        assert out.logits_BTV is not None
        taps = {tap: value[:, :num_fed].clone() for tap, value in out.taps.items()}
        return LmOut(out.logits_BTV[:, :num_fed], taps)

    def _fill(self, feed: Feed, aim: Aim, num_fed: int) -> None:
        self.aim.slot_B1.copy_(aim.slot_B1)
        self.aim.start_B1.copy_(aim.start_B1)
        torch.add(aim.start_B1, self.index_W, out=self.at_BW)
        for mine, given in (
            (self.feed.ids_BT, feed.ids_BT),
            (self.feed.position_BT, feed.position_BT),
        ):
            mine[:, :num_fed] = given
        _pad(self.feed.masks.full, feed.masks.full)
        for window, mask in feed.masks.windows.items():
            _pad(self.feed.masks.windows[window], mask)


def _pad(mine_B1WL: Tensor, mask_B1TL: Tensor) -> None:
    """Copy a mask; the padding sees position 0, so that what it computes is finite."""
    _, _, T, L = mask_B1TL.shape
    mine_B1WL[:, :, :T, L:] = False
    mine_B1WL[:, :, :T, :L] = mask_B1TL
    mine_B1WL[:, :, T:, 1:] = False
    mine_B1WL[:, :, T:, 0] = True


def record(forward: FunctionType, device: torch.device, backend: str) -> Callable[[], LmOut]:
    """A faster `forward`: its inputs are the tensors it closes over, refilled between calls. It
    runs before, so that fused weights and tables of positions are there."""
    if device.type == "cuda":
        return CudaGraph(forward, device)
    forward()
    code = forward.__code__.replace(co_name="round")  # torch limits the compilations of one code
    own = FunctionType(code, forward.__globals__, "round", None, forward.__closure__)
    compiled: Callable[[], LmOut] = torch.compile(own, dynamic=False, backend=backend)
    return compiled
