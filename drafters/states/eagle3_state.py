"""Eagle3State: how an EAGLE-3 drafter serves, with its weights fused.

Letters: B rows, S slots, T tokens, M nodes, L key positions, D width, H query heads, K key/value
heads or draft vocabulary, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Space
from specctl.drafters.nets.blocks import FeatureNet, attend, rotate
from specctl.drafters.nets.routed import RoutedHead, read_head
from specctl.drafters.states.feature_state import FeatureState, Fed
from specctl.drafters.states.tree_layout import Place
from specctl.models.kernels import Weight, can_pack, linear, pack, rms_norm


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Inference copies: projections joined, the two input norms folded into the first one."""

    fc: Weight
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    head: Weight | RoutedHead

    @classmethod
    def of(cls, net: FeatureNet) -> FusedWeights:
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


class Eagle3State(FeatureState):
    """Memory of one engine. `embed` maps target ids to embeddings in the drafter's dtype."""

    def __init__(self, net: FeatureNet, embed: Callable[[Tensor], Tensor], space: Space) -> None:
        self.net, self.embed = net, embed
        super().__init__(net.shape, 1, net.fc.weight, space)

    def weights_version(self) -> int:
        return sum(parameter._version for parameter in self.net.parameters())

    def fuse_weights(self) -> None:
        self._fused = FusedWeights.of(self.net)

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return linear(self.net.gathered(taps), self._fused.fc)

    def fill(self, fed: Fed) -> None:
        self._project(fed.ids_BT, fed.state_BTD, fed.turn_BT2E)

    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        query, key, value = self._project(fed.ids_BT, fed.state_BTD, fed.turn_BT2E)
        assert self._growth is not None
        mask = None
        if self._growth.uniform is None:
            at_L = torch.arange(key.shape[2], device=self.device)
            mask = (at_L < kept_B[:, None])[:, None, None]
        state_BTD, counts = fed.state_BTD, fed.counts
        if min(counts) == max(counts):
            query, state_B1D = query[:, :, -1:], state_BTD[:, -1:]
        else:
            row_B = torch.arange(len(counts), device=self.device)
            at_B = torch.tensor(counts, device=self.device) - 1
            query, state_B1D = query[row_B, :, at_B][:, :, None], state_BTD[row_B, at_B][:, None]
        return self._finish(state_B1D, attend(query, key, value, mask))

    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        state_BMD = self.of_parents(self._states, parent_BM, place)
        turn_BM2E = self._turn_P2E[place.position_BM]
        query, key, value = self._project(token_BM, state_BMD, turn_BM2E)
        return self._finish(state_BMD, attend(query, key, value, place.mask))

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
        if layer.norm_before_residual:
            state_BMD = rms_norm(state_BMD, layer.hidden_norm.weight, shape.norm_eps)
        h = state_BMD + linear(attended_BMI, fused.output)
        flat = rms_norm(h, layer.post_attention_layernorm.weight, shape.norm_eps)
        gate, up = linear(flat, fused.gate_up).chunk(2, dim=-1)
        out = h + linear(F.silu(gate) * up, fused.down)
        normed = rms_norm(out, self.net.norm.weight, shape.norm_eps)
        self._states.append(normed if self.net.norm_output else out)
        return read_head(normed, fused.head)
