"""Gumiho (arXiv 2503.10135): a serial transformer for the first drafted tokens, parallel MLPs for
the later ones.

An early wrong token ends the draft, so early tokens deserve the most care: `serial` passes through
two decoder layers in EAGLE's manner draft them. Head i then guesses the token after them from
cat(fc(e, f)) of the last two positions, all heads at once: a linear map 2 D -> D, residual blocks,
the target's LM head. Loss: EAGLE's; a serial step weighs 1, head i (from 0) decay^(i + 1) / 9, as
in the published trainer, so that what the heads want moves the serial layers little. Our own
choices: training feeds the serial outputs back as drafting does, where the published code reads
them from true features; the heads' map starts as "pass on the newest", and no width of the tree is
set apart for them.

Full tree attention is not copied. As published, the last node of a short path is let see a deeper
node of another path, whose row then speaks for the short path as well: the target's own
distribution is to be had at neither, so that what is emitted is no longer the target's. What it is
for is had without: heads do not look at what heads have drafted, so behind one serial beginning
every path goes on with the same tokens, and a dynamic tree weighs all of them, each in a row of its
own.
Letters: D hidden width, O output width, X any axes, Y carry (2 D).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.drafters.frames.feature_drafter import AxesOptions, FeatureDrafter
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.heads import ResBlock
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.option_checks import Count, Within


@dataclass(frozen=True, slots=True)
class GumihoOptions(AxesOptions):
    """`ttt_steps` tokens are drafted serially by `layers` layers, `mlp_heads` more in parallel, by
    `num_blocks` residual blocks each. `head_weight` times decay^(i + 1) is what head i weighs in
    the loss beside 1 of a serial step; None: step or head j weighs decay^j."""

    ttt_steps: int = 2
    decay: float = 0.8
    layers: Count = 2
    mlp_heads: Count = 5
    num_blocks: Count = 5
    head_weight: Annotated[float, Within(0, 1_000)] | None = field(
        default=1.0 / 9.0, metadata=ADDED
    )

    @property
    def num_heads(self) -> int:
        """Distributions that a row is trained on."""
        return self.ttt_steps + self.mlp_heads


class MlpHead(nn.Sequential):
    """[X, 2 D] -> [X, D]: fresh, it passes the second half on."""

    def __init__(self, width: int, num_blocks: int) -> None:
        first = nn.Linear(2 * width, width)
        with torch.no_grad():
            first.bias.zero_()
            first.weight.normal_(std=0.1 * first.in_features**-0.5)
            first.weight[:, width:] += torch.eye(width)
        super().__init__(first, *(ResBlock(width) for _ in range(num_blocks)))


class GumihoNet(TrunkNet):
    """Decoder layers, then the heads."""

    def __init__(self, shape: LayerShape, options: GumihoOptions) -> None:
        super().__init__(shape, options.layers)
        self.num_parallel, self.passes = options.mlp_heads, options.ttt_steps
        self.heads = nn.ModuleList(
            MlpHead(shape.hidden_size, options.num_blocks) for _ in range(options.mlp_heads)
        )

    def handed(self, before_XD: Tensor, x_XD: Tensor, out_XO: Tensor) -> Tensor:
        return torch.cat([before_XD, x_XD], dim=-1)

    def parallel(self, index: int, carry_XY: Tensor) -> Tensor:
        out_XD: Tensor = self.heads[index](carry_XY)
        return out_XD


class Gumiho(FeatureDrafter):
    """Serial steps that learn to serve the heads as well, so gradients pass between them."""

    family = "gumiho"
    splits_rows = True
    options: GumihoOptions
    detach = False

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return GumihoNet(shape, self.options)

    def step_weight(self, step: int) -> float:
        options = self.options
        if options.head_weight is None:
            return super().step_weight(step)
        head = step - options.ttt_steps
        return 1.0 if head < 0 else float(options.head_weight * options.decay ** (head + 1))


FAMILY = Family(
    name="gumiho",
    summary=(
        "Two decoder layers draft the first two tokens one by one, as EAGLE does; small MLP heads "
        "guess all later ones at once from what those layers saw. Early tokens decide how much of "
        "a draft is kept, so they get the transformer, and depth beyond them is nearly free. Take "
        "it for deep drafts where passes of the drafter are dear."
    ),
    paper="https://arxiv.org/abs/2503.10135",
    options=GumihoOptions,
    build=Gumiho,
    trainable=True,
    policies=("dynamic-tree", "chain"),
)
