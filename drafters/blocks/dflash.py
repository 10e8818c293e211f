"""DFlash (arXiv 2602.06036): a block of masked slots, filled in one pass of a few layers.

Features of several depths of the target, joined by a matrix and a norm, are *injected*: every layer
attends from the block to keys and values that it makes of them itself. Slot 0 holds the root, every
other slot the same mask; inside the block attention goes both ways, and slot k predicts the token
that stands there. One denoising step, so a draft of any length costs one pass. The embedding and
the LM head are the target's; the mask is a learned vector, or the row of a reserved id (`mask_id`).
With `causal` a slot sees only those before it, as in JetSpec (arXiv 2606.18394), which trains such
a block by KL(target || draft) of equal weight at every depth (loss kl, decay 1) and drafts trees
from it (policy marginal-tree). Its slots are masks in training as in drafting.
Letters: B rows, D hidden width, T fed tokens, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.frames.block_drafter import TappedBlocks
from specctl.drafters.nets.block_net import BlockNet
from specctl.drafters.nets.blocks import LayerShape, RmsNorm
from specctl.drafters.nets.options import ADDED, SERVED, HeadOptions
from specctl.drafters.nets.taps import even_taps
from specctl.drafters.option_checks import MOST_IDS, Count, CountOrZero, Within

STD = 0.02  # of the first weights, as checkpoints of Qwen3's shape begin


@dataclass(frozen=True, slots=True)
class DFlashOptions(HeadOptions):
    """`num_heads` tokens are drafted by `layers` layers. `taps` are hidden_states indices, None
    chooses five of them, evenly. `anchors`: blocks per row of a training batch. `mask_id`: the
    token whose row of the target's embedding every mask is, as engines have it; None learns a
    vector for it. Sizes of the layers that are left None are those of the target, and so is
    `rope_theta`, the base of their rotary positions. `causal`: a slot sees only those before it.
    `window`: a slot sees the features less than so many positions before it, and the first `sink`;
    None: all."""

    decay: float = 0.78
    num_heads: int = 5
    layers: Count = 5
    taps: tuple[int, ...] | None = None
    anchors: Count = 64
    mask_id: Annotated[int, Within(0, MOST_IDS)] | None = field(default=None, metadata=ADDED)
    heads: Count | None = field(default=None, metadata=ADDED)
    kv_heads: Count | None = field(default=None, metadata=ADDED)
    head_dim: Annotated[int, Within(2, 1 << 16)] | None = field(default=None, metadata=ADDED)
    intermediate: Count | None = field(default=None, metadata=ADDED)
    rope_theta: Annotated[float, Within(most=1e12)] | None = field(default=None, metadata=ADDED)
    causal: bool = field(default=False, metadata=ADDED)
    window: Annotated[int, Within(1, 1 << 20)] | None = field(default=None, metadata=SERVED)
    sink: CountOrZero = field(default=0, metadata=SERVED)

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)
        is_seeing = self.window is None or self.window >= self.num_heads + 2
        if not is_seeing or (self.sink and self.window is None):
            raise RecipeError(
                "every slot of a block sees a feature of the text through its window, and only a "
                "window has sinks",
                where="drafter.options.window",
                found=f"window: {self.window}, sink: {self.sink}, num_heads: {self.num_heads}",
                expected=f"window: {self.num_heads + 2} or more, or window: null and sink: 0",
                do="--set drafter.options.window=2048",
            )

    @property
    def seen(self) -> AttentionWindow | None:
        """What a slot sees of the features; None: all."""
        return None if self.window is None else AttentionWindow(self.window, self.sink)

    def shape(self, spec: ModelSpec) -> LayerShape:
        """One layer beside that target."""
        return LayerShape(
            spec.hidden_size,
            self.heads or spec.num_heads,
            self.kv_heads or (self.heads or spec.num_kv_heads),
            self.head_dim or spec.head_dim,
            self.intermediate or spec.intermediate_size,
            spec.norm_eps,
            self.rope_theta or spec.rope_theta,
        )


class InjectedNet(nn.Module):
    """The joined features, the mask, the layers, the last norm."""

    def __init__(self, spec: ModelSpec, num_taps: int, options: DFlashOptions) -> None:
        super().__init__()
        width = spec.hidden_size
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.fc_norm = RmsNorm(width, spec.norm_eps)
        self.mask: nn.Parameter | None = None
        if options.mask_id is None:
            self.mask = nn.Parameter(torch.randn(width) * 0.02)
        else:
            Within(0, spec.vocab_size - 1).check("mask_id", options.mask_id)
        self.net = BlockNet(
            spec, options.layers, is_injected=True, qk_norm=True, shape=options.shape(spec)
        )
        self.norm = RmsNorm(width, spec.norm_eps)
        for parameter in self.net.parameters():  # no slot proposes anything before it has attended
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=STD)


class InjectedBlocks(TappedBlocks):
    """Blocks whose layers read injected features."""

    chosen_taps = staticmethod(even_taps)
    module: InjectedNet

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.is_causal = self.options.causal

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        rows_BTD: Tensor = self.module.fc_norm(self.module.fc(state_BTD))
        return rows_BTD

    def slot(self, index: int, token_X: Tensor) -> Tensor:
        if index == 0:
            return self.embed(token_X)
        if self.module.mask is None:
            return self.embed(torch.full_like(token_X, self.options.mask_id))
        return self.module.mask.expand(*token_X.shape, -1)


class DFlash(InjectedBlocks):
    """Slot 0 is the root, whose output nobody reads."""

    family = "dflash"
    splits_rows = True
    first_slot = 1

    def make_net(self, rows: int) -> InjectedNet:
        return InjectedNet(self.spec, len(self.own_taps), self.options)


FAMILY = Family(
    name="dflash",
    summary=(
        "A few layers fill a block of masked places in one pass: the whole draft costs one drafter "
        "call, however long it is. Features of several depths of the target stand as keys and "
        "values in every layer. The places do not see each other's tokens, so take it where a "
        "drafter call is dear, and a drafter that drafts token by token where it is cheap."
    ),
    paper="https://arxiv.org/abs/2602.06036",
    options=DFlashOptions,
    build=DFlash,
    trainable=True,
    policies=("direct", "chain", "static-tree", "marginal-tree"),
)
