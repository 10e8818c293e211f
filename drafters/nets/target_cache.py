"""TargetCache: what the target's KV cache holds, for a drafter that attends to it.

A layer's cached keys and values are a function of the residual that reaches it, so a drafter that
reads that residual (tap k for layer k) has them by the target's own norm and projections, rotated
as the target rotates them: the numbers of the cache itself, in training as in serving, and no
weights of the drafter's.
Letters: B rows, D hidden width, E head width, J key/value heads, T fed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.forward.only_shapes import has_only_shapes
from specctl.core.kv_cache import KVShape
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.drafters.nets.blocks import LayerShape, rotary, rotate
from specctl.models.rope import rope_of


class TargetCache:
    """Keys and values of the target's `layers`, all with the spec's heads, or of the `widths` that
    a drafter has for them, as many heads as there are. `instead`: what to do about a target that
    has none to show."""

    def __init__(
        self,
        borrowed: Borrowed,
        spec: ModelSpec,
        layers: tuple[int, ...],
        instead: str,
        widths: Mapping[int, int] | None = None,
    ) -> None:
        if borrowed.lm is None:
            raise IncompatibleError(
                "the target's cache cannot be read",
                found="a target whose layers are not in this process",
                expected="a target that is loaded here",
                do=f"load the target here, or {instead}",
            )
        self.shape, self.layers = LayerShape.of(spec), layers
        self.lm: LanguageModel = borrowed.layers() if widths is None else borrowed.showing(layers)
        for layer in layers:
            found, wanted = self.lm.kv_shape(layer), self.shape.kv
            if widths is not None:
                wanted = KVShape(found.key_heads, widths[layer], found.key_heads, widths[layer])
            if found != wanted:
                raise IncompatibleError(
                    "the target's cache does not hold keys and values that a drafter can attend to",
                    found=f"layer {layer} keeps {found.key_heads} keys of {found.key_width} and "
                    f"{found.value_heads} values of {found.value_width} numbers a token",
                    expected=f"{wanted.key_heads} of {wanted.key_width} each",
                    do=instead,
                )
        rope = rope_of(spec, spec.head_dim, spec.rope_theta)
        is_plain = spec.rope_scaling is None
        self._inv_freq = None if is_plain else tuple(float(one) for one in rope.inv_freq)
        self._scale = rope.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetCache:
        """A copied drafter looks at the same target."""
        return self

    def rope(self, position: Tensor) -> Tensor:
        """[..., 2, E]: the target's own rotation of queries."""
        spec = self.shape
        return self._scale * rotary(position, spec.head_dim, spec.rope_theta, self._inv_freq)

    @torch.no_grad()
    def check_rope(self, do: str) -> None:
        """Raise IncompatibleError where the keys of `layers` are not rotated as `rope` says: where
        the target turns a part of a head or other pairs, or has another base, or none, in some
        layers. One residual at several places shows it. `do`: what helps."""
        if has_only_shapes() or self.lm.device.type == "meta":
            return
        generator, at_1T = torch.Generator().manual_seed(0), torch.tensor([[0, 1, 40]])
        x_11D = torch.randn(1, 1, self.lm.spec.hidden_size, generator=generator)
        given = dict.fromkeys(self.layers, x_11D.repeat(1, 3, 1).to(self.lm.device))
        position_1T = at_1T.clamp(max=self.lm.spec.max_positions - 1).to(self.lm.device)
        for layer, (key_1J3E, _) in self.read(given, position_1T, torch.float32).items():
            off = math.inf  # heads of another width than the positions are made for
            if key_1J3E.shape[-1] == self.shape.head_dim:
                turned_1J3E = rotate(key_1J3E[:, :, :1], self.rope(position_1T) / self._scale)
                off = float((turned_1J3E - key_1J3E).abs().max())
            if not off <= 0.05 * float(key_1J3E.abs().max()):
                raise IncompatibleError(
                    "queries of the drafter would be rotated otherwise than the target's keys",
                    found=f"layer {layer} turns a part of its heads, other pairs, or none",
                    expected=f"whole heads turned by halves, with base {self.shape.rope_theta:,g}",
                    do=do,
                )

    def read(
        self, state: Mapping[int, Tensor], position_BT: Tensor, dtype: torch.dtype
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """[B, J, T, E] keys and values of each layer whose incoming residual [B, T, D] is given."""
        given = {layer: x.to(self.lm.dtype) for layer, x in state.items()}
        with torch.autocast(position_BT.device.type, enabled=False):
            found = self.lm.key_value(given, position_BT)
        return {layer: (key.to(dtype), value.to(dtype)) for layer, (key, value) in found.items()}
