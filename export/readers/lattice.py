"""LiLiCorr's lattice over named tensors in float64, as SGLang 0.5.23 computes it
(models/lilicorr.py): all candidates of all slots together, each ending in two unit vectors.
Letters: C candidates, D hidden width, H query heads, I input width (of the lattice), M new nodes
(P C), N nodes, O output width (of a vector), P path, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_layers import Params
from specctl.export.readers.layers import rms_norm

PREFIX, NUM_FEATURES, MOST = "lilicorr.", 5, 16
WHOLE = ("candidate_topk", "hidden_size", "num_layers", "num_heads", "factor_dim")
BROKEN = ("mlp_ratio", "vector_eps", "logit_scale")
KEYS = tuple(f"lilicorr_{key}" for key in (*WHOLE, *BROKEN))  # none has a default in an engine


@dataclass(frozen=True, slots=True)
class LatticeSizes:
    """What `dflash_config` says of it, beside a stack of that `context` width with so many drafted
    slots."""

    context: int
    slots: int
    count: int
    width: int
    layers: int
    heads: int
    factor: int
    ratio: float
    eps: float
    scale: float
    norm_eps: float

    @classmethod
    def of(
        cls, nested: Mapping[str, Any], context: int, slots: int, norm_eps: float
    ) -> LatticeSizes:
        missing = [key for key in KEYS if key not in nested]
        if missing or not nested.get("lilicorr_enabled", True):
            found = f"no {missing[0]}" if missing else "lilicorr_enabled: false"
            raise gate(found, ", ".join(KEYS))
        count, width, layers, heads, factor = (int(nested[f"lilicorr_{key}"]) for key in WHOLE)
        if count > MOST or count < 1 or count & (count - 1):
            raise gate(f"lilicorr_candidate_topk {count}", f"a power of two up to {MOST}")
        ratio, eps, scale = (float(nested[f"lilicorr_{key}"]) for key in BROKEN)
        sizes = (count, width or context, layers, heads, factor)
        return cls(context, slots, *sizes, ratio, eps, scale, norm_eps)

    def shapes(self) -> dict[str, list[int]]:
        """Every parameter."""
        width, inner = self.width, int(self.width * self.ratio)
        linears = {
            "pass_hidden_proj": (width, self.context),
            "context_proj": (width, self.context),
            "feature_mlp.up_proj": (width, NUM_FEATURES),
            "feature_mlp.down_proj": (width, width),
            "factor_input_proj": (width, 3 * width),
            "out_head": (self.factor, width),
            "in_head": (self.factor, width),
            "anchor_out_head": (self.factor, width),
        }
        if width != self.context:
            linears["token_proj"] = (width, self.context)
        shapes: dict[str, list[int]] = {
            "feature_norm.weight": [NUM_FEATURES],
            "feature_norm.bias": [NUM_FEATURES],
            "slot_embedding": [1, 1, self.slots, 1, width],
            "rank_embedding": [1, 1, 1, self.count, width],
            "relative_slot_bias": [self.heads, 2 * self.slots + 1],
            "same_slot_bias": [self.heads],
            "output_norm.weight": [width],
            "anchor_norm.weight": [width],
        }
        for layer in range(self.layers):
            own = f"layers.{layer}"
            shapes |= {f"{own}.attn.in_proj_weight": [3 * width, width]}
            shapes |= {f"{own}.attn.in_proj_bias": [3 * width]}
            shapes |= {f"{own}.{norm}.weight": [width] for norm in ("attn_norm", "mlp_norm")}
            linears[f"{own}.attn.out_proj"] = (width, width)
            linears[f"{own}.mlp.up_proj"] = (inner, width)
            linears[f"{own}.mlp.down_proj"] = (width, inner)
        for name, (rows, columns) in linears.items():
            shapes |= {f"{name}.weight": [rows, columns], f"{name}.bias": [rows]}
        return {PREFIX + name: shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class LatticeReader:
    """The parameters and their sizes."""

    params: Params
    sizes: LatticeSizes

    def links(
        self, tokens: list[int], said_NV: Tensor, state_ND: Tensor, rows_VD: Tensor, last_D: Tensor
    ) -> Tensor:
        """[N, V]: scores of each place's candidates behind the token before it (the root, then
        those drafted, each a candidate of its place), -inf elsewhere. `rows_VD` is the target's
        embedding, `last_D` the features of the newest token that has any."""
        logp_NC, ids_NC = said_NV.log_softmax(-1).topk(self.sizes.count)
        leave_NCO, enter_NCO, root_O = self._vectors(rows_VD[ids_NC], logp_NC, state_ND, last_D)
        out_NV = torch.full_like(said_NV, -torch.inf)
        for place, token in enumerate(tokens):
            from_O = root_O
            if place:
                at = (ids_NC[place - 1] == token).nonzero()
                assert len(at), "a draft holds candidates only"
                from_O = leave_NCO[place - 1, at[0, 0]]
            out_NV[place, ids_NC[place]] = self.sizes.scale * (enter_NCO[place] @ from_O)
        return out_NV

    def _linear(self, x: Tensor, name: str) -> Tensor:
        name = PREFIX + name
        return F.linear(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.params[f"{PREFIX}{name}.weight"], self.sizes.norm_eps)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        return self._linear(F.silu(self._linear(x, f"{name}.up_proj")), f"{name}.down_proj")

    def _vectors(
        self, token_PCD: Tensor, logp_PC: Tensor, state_PD: Tensor, last_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Leave and enter [P, C, O], and the root's leave [O]."""
        P, C = logp_PC.shape
        x_PCI = self._nodes(token_PCD, logp_PC, state_PD)
        x_MI, bias_HMM = x_PCI.reshape(P * C, -1), self._bias(P, C)
        for layer in range(self.sizes.layers):
            own = f"layers.{layer}"
            x_MI = x_MI + self._attention(self._norm(x_MI, f"{own}.attn_norm"), own, bias_HMM)
            x_MI = x_MI + self._mlp(self._norm(x_MI, f"{own}.mlp_norm"), f"{own}.mlp")
        x_MI = self._norm(x_MI, "output_norm")
        beside_I = self._norm(self._linear(last_D, "context_proj"), "anchor_norm")
        read = torch.cat([x_MI, beside_I.expand_as(x_MI), x_MI * beside_I], dim=-1)
        made_MI = F.silu(self._linear(read, "factor_input_proj"))
        leave = self._unit(self._linear(made_MI, "out_head")).view(P, C, -1)
        enter = self._unit(self._linear(made_MI, "in_head")).view(P, C, -1)
        return leave, enter, self._unit(self._linear(beside_I, "anchor_out_head"))

    def _nodes(self, token_PCD: Tensor, logp_PC: Tensor, state_PD: Tensor) -> Tensor:
        """[P, C, I]: what the layers read."""
        P, C = logp_PC.shape
        rank_C = torch.arange(C, dtype=logp_PC.dtype) / max(C - 1, 1)
        first_C = torch.zeros(C, dtype=logp_PC.dtype)
        first_C[0] = 1.0
        gap_PC = logp_PC - logp_PC.max(-1, keepdim=True).values
        columns = [logp_PC, logp_PC.exp(), gap_PC, rank_C.expand(P, C), first_C.expand(P, C)]
        normed = F.layer_norm(
            torch.stack(columns, dim=-1),
            (NUM_FEATURES,),
            self.params[f"{PREFIX}feature_norm.weight"],
            self.params[f"{PREFIX}feature_norm.bias"],
        )
        is_wide = self.sizes.width != self.sizes.context
        x_PCI = self._linear(token_PCD, "token_proj") if is_wide else token_PCD
        x_PCI = x_PCI + self._linear(state_PD, "pass_hidden_proj")[:, None]
        x_PCI = x_PCI + self._mlp(normed, "feature_mlp")
        slots, ranks = (self.params[f"{PREFIX}{n}_embedding"][0, 0] for n in ("slot", "rank"))
        return x_PCI + slots[:P] + ranks[:, :C]

    def _bias(self, num_slots: int, count: int) -> Tensor:
        """[heads, M, M]: by the slots of the node that looks and of the one looked at."""
        same_H = self.params[f"{PREFIX}same_slot_bias"]
        relative = self.params[f"{PREFIX}relative_slot_bias"]
        rows = []
        for query in range(num_slots):
            blocks = []
            for key in range(num_slots):
                bias_H = relative[:, query - key + self.sizes.slots] + same_H * (query == key)
                blocks.append(bias_H[:, None, None].expand(-1, count, count))
            rows.append(torch.cat(blocks, dim=2))
        return torch.cat(rows, dim=1)

    def _attention(self, x_MI: Tensor, own: str, bias_HMM: Tensor) -> Tensor:
        name = f"{PREFIX}{own}.attn.in_proj"
        made = F.linear(x_MI, self.params[f"{name}_weight"], self.params[f"{name}_bias"])
        query, key, value = (
            part.view(len(x_MI), self.sizes.heads, -1).transpose(0, 1) for part in made.chunk(3, -1)
        )
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 + bias_HMM
        out = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(x_MI), -1)
        return self._linear(out, f"{own}.attn.out_proj")

    def _unit(self, x: Tensor) -> Tensor:
        unit: Tensor = x / x.norm(dim=-1, keepdim=True).clamp(min=self.sizes.eps)
        return unit
