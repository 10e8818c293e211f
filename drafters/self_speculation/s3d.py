"""S3D (arXiv 2405.20314): the target without its middle layers says several tokens at once.

PaSS's forward (look_ahead_tokens.py) without the layers of a span in the middle: the newest token
and `num_heads` - 1 mask tokens behind it are read by the layers below the span and above it, and
draft `num_heads` tokens in one pass that costs the share of the layers that are left. The whole
target verifies them.

The target stays as it is, to the bit: what is trained are the mask tokens' embeddings and a
low-rank bridge in the place of the span, h + U gelu(D h / rms(h)), zero at first, which only rows
of a draft go through. They learn at random places of the text what the target says there.
Letters: B rows, D hidden width, M new nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.errors import RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import CountOrZero
from specctl.drafters.tokens.look_ahead_tokens import LookAhead, LookAheadNet, LookAheadOptions


@dataclass(frozen=True, slots=True)
class SkippingOptions(LookAheadOptions):
    """Of the target's layers `skip_layers` are left out, from layer `skip_from` on (None: half of
    them, in the middle). `rank` of the bridge in their place; 0 has none."""

    skip_from: int | None = None
    skip_layers: int | None = None
    rank: CountOrZero = 64


class Bridge(nn.Module):
    """What stands for the skipped layers; nothing at first."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, state_BMD: Tensor) -> Tensor:
        """[B, M, D]: the residual with what is added to it."""
        own_BMD = state_BMD.to(self.up.weight.dtype)
        normed_BMD = F.rms_norm(own_BMD, own_BMD.shape[-1:], eps=1e-6)
        added_BMD: Tensor = self.up(F.gelu(self.down(normed_BMD)))
        return state_BMD + added_BMD.to(state_BMD.dtype)


class SkippingNet(LookAheadNet):
    """The embeddings, and the bridge."""

    def __init__(self, count: int, width: int, rank: int) -> None:
        super().__init__(count, width)
        self.bridge = Bridge(width, rank) if rank else None


class Skipping(LookAhead):
    """The layers below the span, the bridge, the layers above it."""

    family = "s3d"
    module: SkippingNet
    options: SkippingOptions

    def __init__(
        self, options: SkippingOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        self.span = skipped(options, spec.num_layers)
        super().__init__(options, spec, vocab)

    def make_net(self) -> SkippingNet:
        options = self.options
        return SkippingNet(options.num_heads - 1, self.spec.hidden_size, options.rank)

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    @property
    def parts(self) -> SubLayers:
        return SubLayers.without(self.spec.num_layers, self.span, self.span)

    def through(self, feed: Feed, kv: SlotKV, lm: LanguageModel) -> Tensor:
        if self.module.bridge is None:
            return super().through(feed, kv, lm)
        first, last = self.span.start, self.spec.num_layers
        below, above = SubLayers.span(0, first), SubLayers.span(self.span.stop, last)
        state_BMD = lm.run(replace(feed, taps=(first,), parts=below), kv).taps[first]
        bridged = replace(feed, residual_BTD=self.module.bridge(state_BMD))
        return lm.run(replace(bridged, taps=(last,), parts=above), kv).taps[last]


def skipped(options: SkippingOptions, num_layers: int) -> range:
    """The layers that are left out; the first one always runs."""
    count = num_layers // 2 if options.skip_layers is None else options.skip_layers
    first = options.skip_from
    if first is None:
        first = max(1, min((num_layers - count + 1) // 2, num_layers - count))
    if not (first >= 1 and 0 <= count <= num_layers - first):
        raise RecipeError(
            "the layers to skip are not in the target, or its first is among them",
            where="drafter.options.skip_layers",
            found=f"{count} layers from layer {first} on",
            expected=f"layers of 1 to {num_layers - 1}, the target having {num_layers}",
            do="leave skip_from and skip_layers out: half of the layers, in the middle",
        )
    return range(first, first + count)


FAMILY = Family(
    name="s3d",
    summary=(
        "The target without its middle layers drafts several tokens in one forward, at mask tokens "
        "whose embeddings are trained beside a small bridge over the gap. Costs half a forward a "
        "draft and next to no memory; the target itself stays as it is. Pays where layers can be "
        "spared, as in large targets."
    ),
    paper="https://arxiv.org/abs/2405.20314",
    options=SkippingOptions,
    build=Skipping,
    trainable=True,
    policies=("chain",),
    borrows_layers=True,
)
