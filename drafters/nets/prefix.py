"""Prefix layers: what heads draft from is not the target's last state alone but made, by decoder
layers of the drafter's own, of the last states of the whole text (Hydra++, Clover).

Row t reads what the family makes of f_t and of token t + 1, which is known one step ahead of its
state. The layers run over true rows only, once per round; drafted tokens are the heads' business.
Letters: B rows, D hidden width, E head width, S sequence, T fed tokens, W window, Z slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Outcome, RoundView, Space
from specctl.core.forward.masks import chain_mask
from specctl.core.kv_cache import SlotKV
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.kept_rows import KeptRows
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.attention.seen import AttentionWindow, Seen, SeenPart, seen_text
from specctl.drafters.nets.blocks import (
    Attending,
    DecoderLayer,
    LayerShape,
    attending,
    rotary,
)

Gather = Callable[[Mapping[int, Tensor]], Tensor]  # taps -> states [..., I]
Rows = Callable[[Tensor, Tensor], Tensor]  # (states [B, T, I], next ids [B, T]) -> [B, T, D]


class PrefixNet(nn.Module):
    """`num_layers` decoder layers of the target's shape, or of another."""

    def __init__(self, spec: ModelSpec, num_layers: int, shape: LayerShape | None = None) -> None:
        super().__init__()
        self.shape = shape or LayerShape.of(spec)
        self.layers = nn.ModuleList(DecoderLayer(self.shape) for _ in range(num_layers))

    def forward(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        mask: Tensor | Seen | SeenPart,
        kv: SlotKV | None = None,
    ) -> Tensor:
        """[B, T, D]: the rows after all layers, against the aimed cache or among themselves."""
        rope_BT2E = rotary(position_BT, self.shape.head_dim, self.shape.rope_theta)
        return self.through(x_BTD, rope_BT2E, lambda layer: attending(mask, kv, layer))

    def through(
        self, x_BTD: Tensor, rope_BT2E: Tensor, attending: Callable[[int], Attending]
    ) -> Tensor:
        """[B, T, D]: the rows after all layers; `attending` says by layer what they attend to."""
        again = self.is_large(x_BTD)
        for index, layer in enumerate(self.layers):
            x_BTD = run(again, layer, x_BTD, rope_BT2E, attending(index))
        return x_BTD

    def is_large(self, x_BTD: Tensor) -> bool:
        """Whether to compute the layers again in the backward pass."""
        width, inner = self.shape.hidden_size, self.shape.intermediate_size
        return is_large(x_BTD[..., 0].numel(), len(self.layers), width, inner)

    def over(self, x_BSD: Tensor, batch: TrainBatch) -> Tensor:
        """[B, S, D]: the same over packed rows of text, while training."""
        out_BSD: Tensor = self(x_BSD, batch.own(batch.position_BS), seen_text(batch))
        return out_BSD


class PrefixState:
    """Features of live rows: the output of the newest true row, and the cache of those before it.
    One writer: the DraftState that owns it. Rows cached = kept length, as the newest token has no
    state of the target yet; `extra` more fit behind them. Behind a `window` those that nothing sees
    any more are dropped, so what the layers write of a row must not depend on other rows."""

    def __init__(
        self,
        net: PrefixNet,
        rows: Rows,
        gather: Gather,
        space: Space,
        like: Tensor,
        extra: int = 0,
        window: AttentionWindow | None = None,
    ) -> None:
        self.net, self.rows, self.gather = net, rows, gather
        width = max(space.max_nodes, extra) + 2
        self._kept = None if window is None else KeptRows(window, space.num_slots, width)
        most = space.max_len if self._kept is None else min(space.max_len, self._kept.most)
        layers = [net.shape.kv] * len(net.layers)
        self.kv = SlotKV.of(layers, space.num_slots, most + width, like.dtype, like.device)
        self.state_ZD = torch.zeros(
            space.num_slots, net.shape.hidden_size, dtype=like.dtype, device=like.device
        )
        self.is_known = [False] * space.num_slots
        self.num_rows = [0] * space.num_slots

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        count = self.num_rows[slot] = len(tokens) - 1
        self.is_known[slot] = count > 0
        self.state_ZD[slot] = 0.0
        if self._kept is not None:
            self._kept.forget(slot)
        if count == 0:
            return
        kept, whole, out_1TD = self._kept, [(0, count, 0)], None
        for first, last, at in whole if kept is None else kept.runs(self.kv, slot, 0, count):
            slot_1, at_1, shift_1 = (
                torch.full((1,), n, device=self.state_ZD.device) for n in (slot, at, first - at)
            )
            ids_1T = torch.tensor([list(tokens[first + 1 : last + 1])], device=slot_1.device)
            span = at + last - first
            self.kv.begin((slot,), slot_1, at_1, last - first, span, at)
            state_TD = self.gather({tap: value[first:last] for tap, value in taps.items()})
            out_1TD = self._run(state_TD[None], ids_1T, at_1, span, shift_1)
        assert out_1TD is not None, "a text has rows"
        self.state_ZD[slot] = out_1TD[0, -1]

    def observe(self, outcome: Outcome) -> None:
        """Rows of the accepted path: its states, and the tokens emitted after each."""
        view = outcome.view
        counts = [len(new) for new in outcome.emitted]
        W = max(1, *counts)
        ids = [[*new, *(0,) * (W - len(new))] for new in outcome.emitted]
        ids_BW = torch.tensor(ids, device=self.state_ZD.device)
        if self._kept is not None:
            for slot, count in zip(view.slots, counts, strict=True):
                have = self.num_rows[slot]
                self._kept.make_room(self.kv, slot, have, have + count)
        start_B, most = self._entries(view)
        self.kv.begin(view.slots, view.slot_B, start_B, W, most + W)
        state_BWD, shift_B = self.gather(outcome.taps)[:, :W], view.kept_len_B - start_B
        out_BWD = self._run(state_BWD, ids_BW, start_B, most + W, shift_B)
        row_B = torch.arange(len(counts), device=ids_BW.device)
        at_B = torch.tensor(counts, device=ids_BW.device) - 1
        self.state_ZD[view.slot_B] = out_BWD[row_B, at_B]
        for slot, count in zip(view.slots, counts, strict=True):
            self.is_known[slot] = True
            self.num_rows[slot] += count

    def _entries(self, view: RoundView) -> tuple[Tensor, int]:
        """[B]: how many true rows the cache holds; and the most of them, as the host knows it."""
        if self._kept is None:
            return view.kept_len_B, max(self.num_rows[slot] for slot in view.slots)
        most = max(self.num_rows[slot] - self._kept.dropped[slot] for slot in view.slots)
        return view.kept_len_B - self._kept.shift_B(view.slots, view.kept_len_B.device), most

    def _run(
        self, state_BWD: Tensor, ids_BW: Tensor, start_B: Tensor, span: int, shift_B: Tensor
    ) -> Tensor:
        """[B, W, D]: true rows from entry `start_B` of the cache on, `shift_B` positions ahead."""
        W = ids_BW.shape[1]
        x_BWD = self.rows(state_BWD.to(self.state_ZD.dtype), ids_BW)
        position_BW = (start_B + shift_B)[:, None] + torch.arange(W, device=start_B.device)
        return self._take(x_BWD, position_BW, chain_mask(start_B, W, span))

    def _take(self, x_BWD: Tensor, position_BW: Tensor, mask: Tensor) -> Tensor:
        """[B, W, D]: true rows through the layers, and into the aimed cache."""
        out_BWD: Tensor = self.net(x_BWD, position_BW, mask, self.kv)
        return out_BWD

    def at(self, view: RoundView) -> Tensor:
        return self.state_ZD[view.slot_B]
