"""FSPAD (arXiv 2408.15562): feature sampling and partial alignment distillation, on EAGLE's layer.

Feature sampling: f_t does not tell which token was drawn from it. In a space `expand` times wider
it is combined with the token t + 1 and keeps what belongs to it, f' = f + W_down(W_up f * gate(W_e
e_{t+1})), which goes into EAGLE's fc in place of f. Partial alignment: one vector need not be both
the next feature and what the LM head reads. Two linear maps of the layer's output, one compared
with f_{t+1} and fed back, the other read by the LM head. Our own choices, where the paper leaves
them open: a sigmoid gate, the residual f, and maps added to the identity, so that fresh weights are
EAGLE's.
Letters: D hidden width, I input width, O output width, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.drafters.frames.feature_drafter import AxesOptions, FeatureDrafter
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.option_checks import Count


@dataclass(frozen=True, slots=True)
class FspadOptions(AxesOptions):
    """`feature_sampling` and `split_readout` may each be switched off (both off: EAGLE)."""

    noise: float = 0.1
    feature_sampling: bool = True
    expand: Count = 2
    split_readout: bool = True


class Sampler(nn.Module):
    """The part of a feature that belongs to the token drawn from it."""

    def __init__(self, width: int, expand: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, expand * width, bias=False)
        self.gate = nn.Linear(width, expand * width)
        self.down = nn.Linear(expand * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        wide_XI = self.up(state_XD) * torch.sigmoid(self.gate(embedding_XD))
        out_XD: Tensor = state_XD + self.down(wide_XI)
        return out_XD


class FspadNet(TrunkNet):
    """EAGLE's module, a sampler before it, and two read-outs behind it."""

    def __init__(self, shape: LayerShape, options: FspadOptions) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.sampler = Sampler(width, options.expand) if options.feature_sampling else None
        self.is_split = options.split_readout
        if self.is_split:
            self.feature_out = nn.Linear(width, width, bias=False)
            self.logit_out = nn.Linear(width, width, bias=False)
            for read_out in (self.feature_out, self.logit_out):
                nn.init.zeros_(read_out.weight)

    def mix(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        if self.sampler is not None:
            state_XD = self.sampler(embedding_XD, state_XD)
        return super().mix(embedding_XD, state_XD)

    def fed_back(self, out_XO: Tensor) -> Tensor:
        return out_XO + self.feature_out(out_XO) if self.is_split else out_XO

    def ready(self, out_XO: Tensor) -> Tensor:
        return out_XO + self.logit_out(out_XO) if self.is_split else out_XO


class Fspad(FeatureDrafter):
    """EAGLE's loss: the feature read-out against f, the logit read-out against the distribution."""

    family = "fspad"
    splits_rows = True
    options: FspadOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return FspadNet(shape, self.options)


FAMILY = Family(
    name="fspad",
    summary=(
        "EAGLE's decoder layer, which first picks out of the target's feature what belongs to the "
        "token that was drawn, and afterwards reads the next feature and the next token from two "
        "different maps. A few matrices more than EAGLE; meant for sampling, where the feature "
        "alone leaves open which token followed it."
    ),
    paper="https://arxiv.org/abs/2408.15562",
    options=FspadOptions,
    build=Fspad,
    trainable=True,
    policies=("dynamic-tree", "chain"),
)
