"""P-EAGLE (arXiv 2602.01469): EAGLE-3's reading of the target, a whole draft in one pass.

True rows are EAGLE-3's: (embedding of token t + 1, features at t), of which the last predicts token
t + 2. Behind it stand rows for what is not known yet: at position t + d the pair (mask embedding,
mask features), both learned, which predicts token t + 2 + d from all true rows up to t and from the
rows before it in the same draft. The first layer is EAGLE-3's, whose attention reads both halves of
a pair; ordinary layers follow. Training keeps only a share of the drafts at each depth (`keep`^d,
at least `keep_least`; a draft that has a row at depth d has all before it), so that memory grows
with the sum of the shares and not with the depth.
Letters: B rows, D hidden width, E head width, I input width, T fed tokens, X any axes, Y carry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.block_drafter import TappedBlocks
from specctl.drafters.nets.block_net import BlockNet
from specctl.drafters.nets.blocks import Attending, Eagle3Layer, LayerShape, RmsNorm
from specctl.drafters.nets.options import ADDED, HeadOptions
from specctl.drafters.option_checks import Count, Within

FEWEST = 16  # drafts of a row of text that are never thinned out


@dataclass(frozen=True, slots=True)
class PEagleOptions(HeadOptions):
    """`num_heads` tokens are drafted by `layers` layers. `taps` are hidden_states indices, None
    chooses them. `anchors`: drafts per row of a training batch, of which `keep`^d and at least
    `keep_least` reach depth d."""

    decay: float = 0.8
    num_heads: Annotated[int, Within(2)] = 5
    layers: Count = 2
    taps: tuple[int, ...] | None = None
    anchors: Count = 128
    keep: float = 0.8
    keep_least: float = 0.2
    d_pace: None = field(default=None, metadata=ADDED)  # depths that are thinned out say nothing


class PairLayer(Eagle3Layer):
    """EAGLE-3's layer on rows that carry both halves, embedding and features. Fresh, it passes the
    features through."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(LayerShape.of(spec))
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, pair_BT2D: Tensor, rope_BT2E: Tensor, attending: Attending) -> Tensor:
        embedding_BTD, state_BTD = pair_BT2D.chunk(2, dim=-1)
        attention, x_BT2D = self.self_attn, self.mix(embedding_BTD, state_BTD)
        key, value = attention.key_value(x_BT2D, rope_BT2E)
        return self.finish(state_BTD, attending(attention.query(x_BT2D, rope_BT2E), key, value))


class PairNet(nn.Module):
    """What joins the features, the two halves of a masked row, the layers, the last norm and the LM
    head. The highest tap passes through at first, as in EAGLE-3."""

    def __init__(self, spec: ModelSpec, num_taps: int, layers: int, rows: int) -> None:
        super().__init__()
        width = spec.hidden_size
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.mask = nn.Parameter(torch.randn(width))
        self.mask_hidden = nn.Parameter(torch.randn(num_taps * width))
        self.net = BlockNet(spec, layers, is_injected=False)
        self.net.layers[0] = PairLayer(spec)
        self.norm = RmsNorm(width, spec.norm_eps)
        self.lm_head = nn.Linear(width, rows, bias=False)
        with torch.no_grad():
            self.fc.weight.normal_(std=0.1 * self.fc.in_features**-0.5)
            self.fc.weight[:, -width:] += torch.eye(width)

    def forward(self, embedding_XD: Tensor, features_XI: Tensor) -> Tensor:
        return torch.cat([embedding_XD, self.fc(features_XI)], dim=-1)


class PEagle(TappedBlocks):
    """Head 0 reads the newest true row, head d the masked row d behind it."""

    family = "p-eagle"
    splits_rows = True
    module: PairNet
    first_slot = -1
    is_causal = True

    def make_net(self, rows: int) -> PairNet:
        return PairNet(self.spec, len(self.own_taps), self.options.layers, rows)

    def own_heads(self) -> list[nn.Linear]:
        return [self.module.lm_head]

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        pair_BT2D: Tensor = self.module(self.embed(next_ids_BT), state_BTD)
        return pair_BT2D

    def slot(self, index: int, token_X: Tensor) -> Tensor:
        pair_Y: Tensor = self.module(self.module.mask, self.module.mask_hidden)
        return pair_Y.expand(*token_X.shape, -1)

    def counts(self, num_anchors: int) -> list[int]:
        options = self.options
        shares = [max(options.keep**d, options.keep_least) for d in range(1, options.num_heads)]
        return [min(num_anchors, max(math.ceil(num_anchors * s), FEWEST)) for s in shares]


FAMILY = Family(
    name="p-eagle",
    summary=(
        "EAGLE-3's features with learned masks in the places that are not known yet: all tokens of "
        "a draft come from one pass instead of one pass each. A little less is accepted than of a "
        "draft made token by token; take it where the drafter's own passes are a good part of a "
        "round."
    ),
    paper="https://arxiv.org/abs/2602.01469",
    options=PEagleOptions,
    build=PEagle,
    trainable=True,
    policies=("direct", "chain", "static-tree", "marginal-tree"),
)
