"""DFlare (arXiv 2606.02091): DFlash's block whose layers read depths of the target of their own.

The matrix that joins the depths goes. Layer l reads a mixture of them instead, and has projections
of its own for the keys and values of what it reads, apart from those of the block's rows:

    context_l = norm(sum_t softmax(w_l)_t depth_t),   K_l, V_l = [W'_l context_l; W_l block]

The norm is one for all layers. w_l begins at the depth that lies as far up as the layer does and
falls off around it. The paper takes nine depths and seven layers.
Letters: B rows, D hidden width, E head width, I input width, S sequence, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.blocks.dflash import STD, DFlash, DFlashOptions, InjectedNet
from specctl.drafters.nets.blocks import Eagle3Attention, LayerShape, rotate

NEAR = 2.0  # how fast a layer's first mixture falls off around the depth that is its own


@dataclass(frozen=True, slots=True)
class DFlareOptions(DFlashOptions):
    """DFlash's options."""


class SplitAttention(Eagle3Attention):
    """With projections of its own for injected features; the norm of keys is one for both."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__(shape, input_width, qk_norm=True)
        kv_width = shape.num_kv_heads * shape.head_dim
        self.k_proj_target = nn.Linear(input_width, kv_width, bias=False)
        self.v_proj_target = nn.Linear(input_width, kv_width, bias=False)

    def injected(self, x_BSI: Tensor, rope_BS2E: Tensor) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj_target(x_BSI))), rope_BS2E)
        return key, self._heads(self.v_proj_target(x_BSI))


class FlareNet(InjectedNet):
    """DFlash's module with the mixtures `fusion` [layers, taps] in place of `fc`."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DFlareOptions) -> None:
        super().__init__(spec, num_taps, options)
        del self.fc
        for layer in self.net.layers:
            layer.self_attn = SplitAttention(self.net.shape, spec.hidden_size)
            for linear in layer.self_attn.children():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=STD)
        self.fusion = nn.Parameter(nearest(options.layers, num_taps))


def nearest(num_layers: int, num_taps: int) -> Tensor:
    """[layers, taps]: mixtures that begin at the depth as far up as the layer is: -2 |t - t*|."""
    own = torch.linspace(0, num_taps - 1, num_layers)
    return -NEAR * (torch.arange(num_taps) - own[:, None]).abs()


def mixtures(fusion: Tensor, state_BTD: Tensor) -> Tensor:
    """[B, T, layers, D]: of the depths that stand one after another, each layer's own."""
    taps = torch.unflatten(state_BTD, -1, (fusion.shape[1], -1))
    return fusion.softmax(-1).to(taps) @ taps


class DFlare(DFlash):
    """Slots are filled in as DFlash's."""

    family = "dflare"
    module: FlareNet

    def make_net(self, rows: int) -> FlareNet:
        return FlareNet(self.spec, len(self.own_taps), self.options)

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        net = self.module
        fused: Tensor = net.fc_norm(mixtures(net.fusion, state_BTD))
        return fused.flatten(-2)


FAMILY = Family(
    name="dflare",
    summary=(
        "DFlash's block of masked places, filled in one pass, whose layers read depths of the "
        "target of their own: lower layers lower ones. Features have keys and values of their own, "
        "so it has more to train than dflash and costs the same pass."
    ),
    paper="https://arxiv.org/abs/2606.02091",
    options=DFlareOptions,
    build=DFlare,
    trainable=True,
    policies=("direct", "chain", "static-tree", "marginal-tree"),
)
