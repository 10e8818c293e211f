"""Jakiro (arXiv 2502.06282): EAGLE's layer with a mixture of two experts, whose contrast drafts the
last token for free.

The MLP of the layer is two experts X; a router gives weights w and v, a softmax of a pair of scores
each, and a is the expert with the larger w:
  mixture   m = w_a X_a + w_b X_b    added to the residual stream: the next feature, as in EAGLE
  contrast  c = v_a X_a - v_b X_b    added to it, too: the feature after that one
so where drafting ends, one pass gives two tokens. Loss: mixture + `decay` times contrast.
After `passes` tokens the contrast predicts; drafts are best `passes` + 1 tokens deep.

The published code reads all children of a node from the one mixture. With `decoupled` each expert
speaks for itself, as the paper argues for (section 3.1: candidates of one representation are
alike), and siblings come from both:
  q = w_1 softmax(W (h + X_1)) + w_2 softmax(W (h + X_2))
with W the LM head and h the residual stream, for a second product with the LM head; what is fed
back stays the mixture.
Letters: B rows, D hidden width, O output width (2 D and more), Q picked rows, T fed tokens, X any
axes, Y carry (D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.drafters.frames.feature_drafter import AxesOptions, FeatureDrafter
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, Mlp
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.option_checks import Count
from specctl.models.sliced_head import Head

LEAST = 1e-6  # of a weight, before its logarithm


@dataclass(frozen=True, slots=True)
class JakiroOptions(AxesOptions):
    """`decay` is the weight of the contrast. `contrast` False drafts every token by a pass.
    `decoupled`: the children of a node come from both experts' own distributions."""

    decay: float = 0.5
    noise: float = 0.1
    passes: Count = 4
    contrast: bool = True
    decoupled: bool = field(default=False, metadata=ADDED)

    @property
    def num_heads(self) -> int:
        """Distributions that a row is trained on."""
        return self.ttt_steps + self.contrast


class Experts(nn.Module):
    """Two MLPs and a router. [X, O]: mixture and contrast side by side; `apart`: behind them each
    expert's own output, and log w of both."""

    def __init__(self, shape: LayerShape, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        width, inner = shape.hidden_size, shape.intermediate_size
        experts = [Mlp(width, inner) for _ in range(2)]
        for expert in experts:
            nn.init.zeros_(expert.down_proj.weight)
        self.experts = nn.ModuleList(experts)
        self.router = nn.Linear(width, 4, bias=False)

    def forward(self, x_XD: Tensor) -> Tensor:
        mixing_X2, contrasting_X2 = (s.softmax(-1) for s in self.router(x_XD).chunk(2, dim=-1))
        first_XD, second_XD = (expert(x_XD) for expert in self.experts)
        sign_X1 = torch.where(mixing_X2[..., :1] >= mixing_X2[..., 1:], 1.0, -1.0).to(x_XD.dtype)
        mixture_XD = mixing_X2[..., :1] * first_XD + mixing_X2[..., 1:] * second_XD
        contrast_XD = contrasting_X2[..., :1] * first_XD - contrasting_X2[..., 1:] * second_XD
        found = [mixture_XD, sign_X1 * contrast_XD]
        if self.apart:
            found += [first_XD, second_XD, mixing_X2.clamp(min=LEAST).log()]
        return torch.cat(found, dim=-1)


class ExpertLayer(DecoderLayer):
    """A decoder layer whose MLP is the experts; its output is two states, or four and log w."""

    def __init__(self, shape: LayerShape, apart: bool) -> None:
        super().__init__(shape, input_norm=False)
        del self.mlp
        self.moe = Experts(shape, apart)

    def finish(self, h_BTD: Tensor) -> Tensor:
        added_BTO: Tensor = self.moe(self.post_attention_layernorm(h_BTD))
        count, rest = divmod(added_BTO.shape[-1], h_BTD.shape[-1])
        return F.pad(h_BTD.repeat(1, 1, count), (0, rest)) + added_BTO


class JakiroNet(TrunkNet):
    """The layers' output is mixture and contrast; the contrast is the parallel head."""

    def __init__(self, shape: LayerShape, options: JakiroOptions) -> None:
        self.is_decoupled = options.decoupled
        super().__init__(shape)
        if options.contrast:
            self.num_parallel, self.passes = 1, options.passes

    def make_layer(self, index: int) -> DecoderLayer:
        return ExpertLayer(self.shape, self.is_decoupled)

    def fed_back(self, out_XO: Tensor) -> Tensor:
        return out_XO[..., : self.shape.hidden_size]

    def ready(self, out_XO: Tensor) -> Tensor:
        return (
            out_XO[..., 2 * self.shape.hidden_size :]
            if self.is_decoupled
            else self.fed_back(out_XO)
        )

    def logits(self, ready_XO: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        width = self.shape.hidden_size
        if ready_XO.shape[-1] == width:  # of the contrast, or of a mixture
            return read(ready_XO)
        parts = [ready_XO[..., :width], ready_XO[..., width : 2 * width]]
        logw_X2 = ready_XO[..., 2 * width :].float()
        each = [
            read(part).float().log_softmax(-1) + logw_X2[..., i, None]
            for i, part in enumerate(parts)
        ]
        return torch.logaddexp(*each)

    def handed(self, before_XD: Tensor, x_XD: Tensor, out_XO: Tensor) -> Tensor:
        width = self.shape.hidden_size
        return out_XO[..., width : 2 * width]

    def parallel(self, index: int, carry_XY: Tensor) -> Tensor:
        return carry_XY


class Jakiro(FeatureDrafter):
    """EAGLE's loss on both branches."""

    family = "jakiro"
    splits_rows = True
    options: JakiroOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return JakiroNet(shape, self.options)

    def head(self) -> Head:
        plain, net = super().head(), self.module
        if not self.options.decoupled:
            return plain
        return lambda ready_QO: net.logits(ready_QO, plain)


FAMILY = Family(
    name="jakiro",
    summary=(
        "EAGLE's decoder layer with two experts in place of its MLP. Their weighted sum drafts the "
        "next token, their contrast the one after it, so the last level of a tree costs no pass "
        "through the layer. Take it where a pass of the drafter is dear beside its LM head."
    ),
    paper="https://arxiv.org/abs/2502.06282",
    options=JakiroOptions,
    build=Jakiro,
    trainable=True,
    policies=("dynamic-tree", "chain"),
)
