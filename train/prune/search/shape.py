"""DraftShape: depth and width of a draft model that might be cut out of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.models.llama import LlamaShape


@dataclass(frozen=True, slots=True, order=True)
class DraftShape:
    """Depth and width of a candidate; heads and MLP keep the target's proportions."""

    layers: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"

    def options(self, target: LlamaShape) -> dict[str, Any]:
        """Options of a small-lm: whole key/value groups, the target's head width."""
        share = self.width / target.hidden_size
        groups = max(1, round(target.num_kv_heads * share))
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": groups * (target.num_heads // target.num_kv_heads),
            "kv_heads": groups,
            "head_dim": target.head_dim,
            "intermediate": max(8, round(target.intermediate_size * share)),
        }

    def layer_parameters(self, target: LlamaShape) -> int:
        own = self.options(target)
        heads = 2 * (own["heads"] + own["kv_heads"]) * own["head_dim"]
        return self.width * int(heads + 3 * own["intermediate"])

    def body_parameters(self, target: LlamaShape) -> int:
        """Parameters of the layers, which is what shapes are compared at."""
        return self.layers * self.layer_parameters(target)
