"""StateLM: a transformers model with recurrent layers, run in rounds.

Hybrids of attention and linear attention, state spaces or short convolutions, and models of these
alone. Attention is read as in `HfLM`; recurrent layers read the states of the slots and leave what
each token would add to them (`state_mixers`). Whole documents are read one by one, as in
`ReadingLM`: no mask keeps a state from running from one into the next.
Letters: B rows, D hidden width, L positions, T fed tokens.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specctl.core.errors import IncompatibleError
from specctl.core.forward.slot_state import RowShape, StateKV
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut, Masks, RunMasks
from specctl.models.hf.hf_lm import HfLM, SlotLayer
from specctl.models.hf.hf_spec import STATE_KINDS
from specctl.models.hf.read_only import ReadingLM
from specctl.models.recurrent.state_forms import FedTokens
from specctl.models.recurrent.state_mixers import (
    StateCacheLayer,
    StateForward,
    at_hand,
    install,
    running,
)


class _BothLayer(StateCacheLayer, SlotLayer):
    """A layer with keys and values and a recurrent state."""

    def __init__(self, forward: StateForward, num_convs: int, *where: Any) -> None:
        SlotLayer.__init__(self, *where)
        StateCacheLayer.__init__(self, forward, where[1], num_convs)


class StateLM(ReadingLM):
    """A transformers causal LM with recurrent states."""

    can_run = True
    may_hold_states: ClassVar[bool] = True

    def __init__(self, model: Any, eos_ids: tuple[int, ...] = ()) -> None:
        if getattr(model, "use_kernels", False):
            raise IncompatibleError(
                f"{type(model).__name__} runs kernels that keep its states to themselves",
                found="use_kernels=True",
                expected="recurrent layers as transformers computes them",
                do="load it without use_kernels",
            )
        install(model)
        takes = signature(type(model).forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in takes else "cache_params"
        self._takes_positions = "position_ids" in takes
        self.reason = ""
        HfLM.__init__(self, model, eos_ids)

    def check_lending(self) -> None:
        raise IncompatibleError(
            f"{type(self.module).__name__} does not lend its layers",
            found="layers with recurrent states, which move once a round",
            expected="a target of attention alone",
            do="choose a drafter that runs none of its layers, e.g. eagle3, medusa, prompt-lookup",
        )

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        return self.cache_of(num_slots, max_len, self.dtype)

    def cache_of(self, num_slots: int, max_len: int, dtype: torch.dtype) -> SlotKV:
        size = num_slots, max_len, dtype, self.device, self.kv_devices
        return StateKV.with_states(self.kv_layers, self.states, *size)

    def run_width(self, num_rows: int, width: int) -> int:
        """On a CPU as wide as it is: the state behind a run is at hand where all of it is kept."""
        return width if self.device.type == "cpu" else super().run_width(num_rows, width)

    @property
    def row_shape(self) -> RowShape:
        return RowShape(self.kv_layers, self.states)

    @property
    def state_bytes(self) -> int:
        return self.row_shape.state_bytes(self.dtype)

    @property
    def pending_bytes(self) -> int:
        return self.row_shape.pending_bytes(self.dtype)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        return super().run(feed, None) if kv is None else HfLM.run(self, feed, kv)

    def _run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        assert isinstance(kv, StateKV), "documents are read without a cache"
        if feed.parts is not None or feed.residual_BTD is not None:
            self.check_lending()
        with running(StateForward(kv.state, _fed_tokens(feed.masks, kv))):
            return super()._run(feed, kv)

    def _context(self, feed: Feed, kv: SlotKV | None) -> dict[str, Any]:
        assert isinstance(kv, StateKV), "documents are read without a cache"
        forward, span = at_hand(), kv.aim.span
        where = span - feed.ids_BT.shape[1], span
        layers: list[Any] = []
        for layer, (shape, held) in enumerate(zip(self.states, self.kv_layers, strict=True)):
            convs = len(shape.convs)
            if not convs:
                layers.append(SlotLayer(kv, layer, *where))
            elif held.size:
                layers.append(_BothLayer(forward, convs, kv, layer, *where))
            else:
                layers.append(StateCacheLayer(forward, layer, convs))
        found = {"attention_mask": self._masks(feed.masks), self._cache_name: Cache(layers=layers)}
        return found | ({"position_ids": feed.position_BT} if self._takes_positions else {})

    def _masks(self, masks: Masks) -> dict[str, Tensor | None] | None:
        """Masks by kind of layer. Recurrent layers need none: their padding is in no path."""
        if not any(shape.size for shape in self.kv_layers):
            return None
        full = self._form(masks.full)
        found: dict[str, Tensor | None] = dict.fromkeys(STATE_KINDS) | {"full_attention": full}
        window = self.windows[0] if self.windows else None
        sliding = full if window is None else self._form(masks.windows[window])
        return found | {"sliding_attention": sliding}


def _fed_tokens(masks: Masks, kv: StateKV) -> FedTokens:
    """Which fed token stands on the path to which: read off the mask, but of runs."""
    if isinstance(masks, RunMasks):
        return FedTokens(None)
    mask_BTL, start_B1 = masks.full[:, 0], kv.aim.start_B1
    T = mask_BTL.shape[1]
    at_BT = start_B1 + torch.arange(T, device=start_B1.device)
    return FedTokens(mask_BTL.gather(2, at_BT[:, None].expand(-1, T, -1)))
