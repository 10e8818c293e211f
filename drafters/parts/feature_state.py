"""FeatureState: the memory of an EAGLE-3 drafter, and the fused weights that it serves with.

Per slot there are true rows (token t + 1 with the target's features at t) and, while a round grows,
drafted rows behind them (a drafted token with the drafter's own output state). The newest true rows
wait as *pending* until the next root feeds them in one ragged call; writing them overwrites what
the last round drafted. rows written + pending = kept length, because the first token has no row.
Letters: B rows, S slots, W pending rows, P path or positions, M nodes, T tokens, D width, H query
heads, K key/value heads or draft vocabulary, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.parts.base import Outcome, RoundView, Space, StepState
from specctl.drafters.parts.blocks import FeatureNet, attend, rotate
from specctl.drafters.parts.growth import Growth, aim_cache
from specctl.drafters.parts.kernels import Weight, can_pack, linear, pack, rms_norm
from specctl.drafters.parts.routed import RoutedHead, read_head
from specctl.drafters.parts.slots import SlotKV


@dataclass(frozen=True, slots=True)
class Fused:
    """Inference copies: projections joined, the two input norms folded into the first one."""

    fc: Weight
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    head: Weight | RoutedHead

    @classmethod
    def of(cls, net: FeatureNet) -> Fused:
        layer, attention = net.layer, net.layer.self_attn

        def lay(weight: Tensor) -> Weight:
            return pack(weight) if can_pack(weight) else weight.detach()

        scale_I = torch.cat([layer.input_layernorm.weight, layer.hidden_norm.weight]).detach()
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        return cls(
            lay(net.fc.weight),
            lay(torch.cat([part.detach() for part in parts]) * scale_I),
            lay(attention.o_proj.weight),
            lay(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).detach()),
            lay(layer.mlp.down_proj.weight),
            lay(net.lm_head.weight)
            if net.router is None
            else RoutedHead.of(net.router, net.lm_head.weight),
        )


class FeatureState(StepState):
    """Memory of one engine. `embed` maps target ids to embeddings in the drafter's dtype."""

    def __init__(self, net: FeatureNet, embed: Callable[[Tensor], Tensor], space: Space) -> None:
        self.net, self.embed = net, embed
        shape, weight = net.shape, net.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.kv = SlotKV(
            1,
            space.num_slots,
            shape.num_kv_heads,
            space.max_len + space.max_nodes + 2,
            shape.head_dim,
            self.dtype,
            self.device,
        )
        width = space.max_nodes + 2
        self.pending_token_SW = torch.zeros(
            space.num_slots, width, dtype=torch.long, device=self.device
        )
        self.pending_SWD = torch.zeros(
            space.num_slots, width, shape.hidden_size, dtype=self.dtype, device=self.device
        )
        self.num_pending = [0] * space.num_slots
        self.num_rows = [0] * space.num_slots
        self._turn_P2E = self._turns()
        self._fused, self._version = Fused.of(net), self._weights_version()
        self._growth: Growth | None = None
        self._states: list[Tensor] = []

    def _weights_version(self) -> int:
        return sum(parameter._version for parameter in self.net.parameters())

    def _turns(self) -> Tensor:
        return self.net.turn(torch.arange(self.kv.max_len, device=self.device)).to(self.dtype)

    # -- rows join ------------------------------------------------------------------------------

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self._weights_version():
            self._fused, self._version = Fused.of(self.net), self._weights_version()
        num_rows = self.num_rows[slot] = len(tokens) - 1
        self.num_pending[slot] = min(num_rows, 1)
        self.pending_token_SW[slot, 0] = tokens[-1]
        self.pending_SWD[slot] = 0.0
        if num_rows == 0:
            return  # no features at all: the first round drafts from a zero row
        state_TD = linear(self.net.gathered(taps), self._fused.fc)
        self.pending_SWD[slot, 0] = state_TD[-1]
        if num_rows > 1:
            ids_1T = torch.tensor([tokens[1:-1]], device=self.device)
            slot_1 = torch.full((1,), slot, device=self.device)
            self.kv.begin((slot,), slot_1, slot_1 * 0, num_rows - 1, num_rows - 1, 0)
            self._project(ids_1T, state_TD[None, :-1], self._turn_P2E[None, : num_rows - 1])

    # -- the layer ------------------------------------------------------------------------------

    def _project(
        self, ids_BT: Tensor, state_BTD: Tensor, turn_BT2E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the fed tokens; keys and values as attention sees them after the write."""
        shape, attention = self.net.shape, self.net.layer.self_attn
        B, T = ids_BT.shape
        H, K, D = shape.num_heads, shape.num_kv_heads, shape.hidden_size
        both_BT2D = torch.stack([self.embed(ids_BT), state_BTD], dim=2)
        x_BTI = rms_norm(both_BT2D, None, shape.norm_eps).view(B, T, 2 * D)
        heads = linear(x_BTI, self._fused.qkv).view(B, T, H + 2 * K, shape.head_dim)
        heads = heads.transpose(1, 2)
        if attention.has_qk_norm:
            query = rotate(attention.q_norm(heads[:, :H]), turn_BT2E)
            key = rotate(attention.k_norm(heads[:, H : H + K]), turn_BT2E)
        else:
            turned = rotate(heads[:, : H + K], turn_BT2E)
            query, key = turned[:, :H], turned[:, H:]
        return query, *self.kv.update(0, key, heads[:, H + K :])

    def _finish(self, state_BMD: Tensor, attended_BMI: Tensor) -> Tensor:
        """The rest of the layer, its state remembered; logits."""
        layer, shape, fused = self.net.layer, self.net.shape, self._fused
        h = state_BMD + linear(attended_BMI, fused.output)
        flat = rms_norm(h, layer.post_attention_layernorm.weight, shape.norm_eps)
        gate, up = linear(flat, fused.gate_up).chunk(2, dim=-1)
        out = h + linear(F.silu(gate) * up, fused.down)
        normed = rms_norm(out, self.net.norm.weight, shape.norm_eps)
        self._states.append(normed if self.net.norm_output else out)
        return read_head(normed, fused.head)

    # -- a round --------------------------------------------------------------------------------

    def root(self, view: RoundView) -> Tensor:
        counts, kept = self._lengths(view)
        kept_B = view.kept_len_B.clamp(min=1)
        ids_BW, state_BWD, turn_BW2E = self._aim_pending(view, counts, kept, kept_B)
        query, key, value = self._project(ids_BW, state_BWD, turn_BW2E)
        self._growth = Growth(view, self.kv, kept, kept_B)
        mask = None
        if self._growth.uniform is None:
            at_L = torch.arange(key.shape[2], device=self.device)
            mask = (at_L < kept_B[:, None])[:, None, None]
        if min(counts) == max(counts):
            query, state_B1D = query[:, :, -1:], state_BWD[:, -1:]
        else:
            row_B = torch.arange(len(counts), device=self.device)
            at_B = torch.tensor(counts, device=self.device) - 1
            query, state_B1D = query[row_B, :, at_B][:, :, None], state_BWD[row_B, at_B][:, None]
        self._states = []
        return self._finish(state_B1D, attend(query, key, value, mask))[:, 0]

    def _lengths(self, view: RoundView) -> tuple[list[int], list[int]]:
        """Pending rows, and true rows with them; a text without features counts its zero row."""
        counts = [max(self.num_pending[slot], 1) for slot in view.slots]
        return counts, [max(self.num_rows[slot], 1) for slot in view.slots]

    def _aim_pending(
        self, view: RoundView, counts: list[int], kept: list[int], kept_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Aim the cache at the pending rows (right-padded) and gather them with their rotations."""
        B, W = len(counts), max(counts)
        before = [k - c for k, c in zip(kept, counts, strict=True)]
        uniform = before[0] if min(before) == max(before) else None
        is_even = min(counts) == W
        start_B = kept_B - (W if is_even else torch.tensor(counts, device=self.device))
        self._aim(view, start_B, W, max(before) + W, uniform)
        if uniform is not None:
            turn = self._turn_P2E[None, uniform : uniform + W]
        else:
            turn = self._turn_P2E[start_B[:, None] + torch.arange(W, device=self.device)]
        if view.slots == tuple(range(B)):
            return self.pending_token_SW[:B, :W], self.pending_SWD[:B, :W], turn
        slot_B = view.slot_B
        return self.pending_token_SW[slot_B, :W], self.pending_SWD[slot_B, :W], turn

    def _aim(
        self, view: RoundView, start_B: Tensor, num_fed: int, span: int, uniform: int | None
    ) -> None:
        aim_cache(self.kv, view, start_B, num_fed, span, uniform)
        if self._turn_P2E.shape[0] < self.kv.max_len:
            self._turn_P2E = self._turns()

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._growth is not None, "root() begins a round"
        place = self._growth.place(parent_BM)
        if self._turn_P2E.shape[0] < self.kv.max_len:
            self._turn_P2E = self._turns()
        if place.is_next:
            state_BMD = self._states[-1]
        else:
            every_BND = torch.cat(self._states, dim=1)
            at_BM1 = (parent_BM + 1)[:, :, None]
            state_BMD = every_BND.gather(1, at_BM1.expand(-1, -1, every_BND.shape[-1]))
        turn_BM2E = self._turn_P2E[place.position_BM]
        query, key, value = self._project(token_BM, state_BMD, turn_BM2E)
        return self._finish(state_BMD, attend(query, key, value, place.mask))

    def hidden(self) -> Tensor:
        return self._states[-1][:, -1]

    def observe(self, outcome: Outcome) -> None:
        view = outcome.view
        if self._growth is None:  # a round without drafting: nothing may pile up
            counts, kept = self._lengths(view)
            self._project(*self._aim_pending(view, counts, kept, view.kept_len_B.clamp(min=1)))
        self._growth, self._states = None, []
        W = max(len(new) for new in outcome.emitted)
        tokens = [[*new, *(0,) * (W - len(new))] for new in outcome.emitted]
        taps = {tap: value[:, :W] for tap, value in outcome.taps.items()}
        at: slice | Tensor = view.slot_B
        if view.slots == tuple(range(len(view.slots))):
            at = slice(len(view.slots))
        self.pending_token_SW[at, :W] = torch.tensor(tokens, device=self.device)
        self.pending_SWD[at, :W] = linear(self.net.gathered(taps), self._fused.fc)
        for slot, new in zip(view.slots, outcome.emitted, strict=True):
            self.num_pending[slot] = len(new)
            self.num_rows[slot] += len(new)
