"""TrunkNet: the module of feature-level drafters that predict the target's own features (EAGLE-1).

x = fc(cat(embedding of token t + 1, f_t)) goes through decoder layers, the first one without an
input norm; their output stands for f_{t+1} and is fed back in its place when drafting goes on. The
f are states after the target's final norm, so its own LM head reads them. A family may change what
is mixed, what is fed back and what the LM head reads; and after some passes through the layers it
may hand over to *parallel* heads, which guess further tokens without another pass.
Letters: B rows, D hidden width, E head width, O output width, S sequence, T fed tokens, X any axes,
Y carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specctl.drafters.attention.seen import KeySet, Seen, SeenPart, SeenWindow
from specctl.drafters.nets.blocks import (
    Attending,
    DecoderLayer,
    LayerShape,
    attend_chains,
    rotary,
    sink_pair,
)


class TrunkNet(nn.Module):
    """EAGLE-1's module: `fc` and `layers`, parameter names of its public format. Fresh, it passes
    the target's feature through."""

    num_parallel: int = 0
    passes: int | None = None  # drafted tokens that go through the layers; None = all of them

    def __init__(self, shape: LayerShape, num_layers: int = 1) -> None:
        super().__init__()
        width = shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(num_layers))
        with torch.no_grad():
            self.fc.bias.zero_()
            self.fc.weight.normal_(std=0.1 * self.fc.in_features**-0.5)
            self.fc.weight[:, width:] += torch.eye(width)

    def make_layer(self, index: int) -> DecoderLayer:
        return DecoderLayer(self.shape, input_norm=index > 0)

    def mix(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        """[X, D]: what the layers read of a token and of the feature before it."""
        out_XD: Tensor = self.fc(torch.cat([embedding_XD, state_XD], dim=-1))
        return out_XD

    def through(
        self, x_BTD: Tensor, rope_BT2E: Tensor, attending: Callable[[int], Attending]
    ) -> Tensor:
        """[B, T, O]: what the layers make of it; `attending` gives by layer what they attend to."""
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rope_BT2E, attending(index))
        return x_BTD

    def fed_back(self, out_XO: Tensor) -> Tensor:
        """[X, D]: what stands for the target's next feature."""
        return out_XO

    def ready(self, out_XO: Tensor) -> Tensor:
        """[X, D]: what the LM head reads."""
        return out_XO

    def logits(self, ready_XO: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """[X, K]: what `read`, the LM head, makes of that."""
        return read(ready_XO)

    def handed(self, before_XD: Tensor, x_XD: Tensor, out_XO: Tensor) -> Tensor:
        """[X, Y]: what the parallel heads read behind a token that went through no layer: what was
        mixed one token before, what is mixed now, and the layers' output between."""
        raise AssertionError(f"{type(self).__name__} has no parallel heads")

    def parallel(self, index: int, carry_XY: Tensor) -> Tensor:
        """[X, D]: what the LM head reads of parallel head `index`."""
        raise AssertionError(f"{type(self).__name__} has no parallel heads")

    def rope(self, position: Tensor) -> Tensor:
        return rotary(position, self.shape.head_dim, self.shape.rope_theta)


@dataclass(slots=True)
class Chains:
    """Keys and values of one layer while training unrolls its own drafting: at step j a row sees
    the true rows before it and its own j entries (see `attend_chains`). One writer: `attending`."""

    seen: Seen | SeenPart | SeenWindow
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attending(
        self, query: Tensor, key: Tensor, value: Tensor, has_sink: bool = False
    ) -> Tensor:
        beside = (KeySet(*sink_pair(key, key.shape[2]), None),) if has_sink else ()
        if not self.keys:  # later steps have entries of their own
            key, value = self.seen.gathered(key), self.seen.gathered(value)
        self.keys.append(key)
        self.values.append(value)
        return attend_chains(query, self.keys, self.values, self.seen, *beside)
