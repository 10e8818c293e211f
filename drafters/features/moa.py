"""Mixture of Attentions (arXiv 2410.03804): attention over layers, over the text, and across.

What the target made of a token is summed up once per verification: the keys and values that its
layers have cached of it, one vector of both for every layer, attend to each other along the depth
in both directions; their mean, through a linear layer, is what cross-attention reads (layer
self-attention). Drafted tokens go through a causal layer over the text, then through a layer that
attends to those summaries, of which a draft sees the ones up to its beginning (`strict`, the T-step
bound). What comes out is the target's state in front of its last N layers (`target_layers`, target
layer inference): the target's own frozen layers, norm and LM head make the draft of it, and their
attention sees what the target has cached of the text and the drafted tokens of the path. With N = 0
it is the last state itself. The loss is

    SmoothL1(f^, f) + 0.1 D(p, q)          with N > 0: (SmoothL1(f^, f) + SmoothL1(h^, h)) / 2 + ...

with f the last state and h the one in front of those layers. Sizes follow the paper's at 8B: half
the target's key/value heads and an MLP of 1.5 widths in both layers; the layer attention is as wide
as the keys and values of one layer (2048 there, of 4096), its MLP 1.5 times that.
Letters: A anchors, B rows, D hidden width, E head width, I input width (taps x D), J key/value
heads, L positions (one per layer), M new nodes, O output width, P path, R flat rows, S sequence, T
fed tokens, W window, X any axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Family, Needs, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Borrowed, Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.frames.cross_drafter import CrossDrafter, CrossLayer, CrossNet, CrossOptions
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.head_losses import feature_loss, joined
from specctl.drafters.nets.blocks import DecoderLayer, LayerShape, attending, rotary
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.target_cache import TargetCache
from specctl.drafters.option_checks import CountOrZero
from specctl.drafters.states.borrowed_state import groups_behind
from specctl.drafters.states.path_state import Nodes, PathState

CHUNK = 4096  # tokens whose depths are summed up at once, where that is computed again
OTHERWISE = "choose a family that reads states, such as eagle3"


@dataclass(frozen=True, slots=True)
class MoaOptions(CrossOptions):
    """`layer_attention`: False takes the mean of the keys and values as they are (an ablation).
    `feature_weight`: of the distance to the target's states, beside 1 of the distributions (the
    paper's 1 and 0.1). `staircase`: in the first half of training some batches, all at the
    beginning and fewer and fewer, hide the text before a draft from its tokens' own attention, as
    the paper's do. `target_layers`: N above; the paper's are 0, 1 and 3."""

    layer_attention: bool = True
    feature_weight: float = 10.0
    staircase: bool = field(default=False, metadata=ADDED)
    target_layers: CountOrZero = field(default=0, metadata=ADDED)


def fewer_keys(spec: ModelSpec) -> int:
    """Half the target's key/value heads, if they have a half."""
    return spec.num_kv_heads if spec.num_kv_heads % 2 else spec.num_kv_heads // 2


def token_shape(spec: ModelSpec) -> LayerShape:
    """Of the layers that tokens go through."""
    whole = LayerShape.of(spec, 3 * spec.hidden_size // 2)
    return replace(whole, num_kv_heads=fewer_keys(spec))


def depth_shape(spec: ModelSpec) -> LayerShape:
    """Of the layer along the depth, whose entries are keys and values side by side."""
    heads = 2 * spec.num_kv_heads
    width = heads * spec.head_dim
    whole = replace(token_shape(spec), hidden_size=width, intermediate_size=3 * width // 2)
    return replace(whole, num_heads=heads, num_kv_heads=fewer_keys(spec))


class MoaNet(CrossNet):
    """The three attentions, and what makes a summary as wide as the model."""

    def __init__(self, spec: ModelSpec, has_layer_attention: bool) -> None:
        super().__init__(DecoderLayer(token_shape(spec)), CrossLayer(token_shape(spec)))
        depth = depth_shape(spec)
        self.along = DecoderLayer(depth) if has_layer_attention else None
        self.join = nn.Linear(depth.hidden_size, spec.hidden_size, bias=False)


class Moa(CrossDrafter):
    """Reads what every layer of the target has cached."""

    family = "moa"
    module: MoaNet

    def __init__(self, options: MoaOptions, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        if options.target_layers >= spec.num_layers:
            raise RecipeError(
                "target layer inference leaves no layer to be spared",
                where="drafter.options.target_layers",
                found=str(options.target_layers),
                expected=f"0 to {spec.num_layers - 1}, the target having {spec.num_layers} layers",
                do="write target_layers: 1, or leave it out",
            )
        self.layers = tuple(range(spec.num_layers))
        self.lent = self.layers[spec.num_layers - options.target_layers :]
        self._drafted: list[Tensor] = []  # [B, S, D] per depth, in front of the target's layers

    def make_net(self, rows: int) -> MoaNet:
        return MoaNet(self.spec, self.options.layer_attention)

    def is_staircase(self, batch: TrainBatch) -> bool:
        """The share of batches that see the whole text rises linearly to 1 at mid-training."""
        if not (self.options.staircase and torch.is_grad_enabled()):
            return False
        return bool(torch.rand(()) >= 2 * batch.progress)

    def needs(self) -> Needs:
        taps = (*self.layers, self.spec.num_layers)
        return Needs(taps, teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        self._cache = TargetCache(borrowed, self.spec, self.layers, OTHERWISE)
        super().bind(borrowed)

    @property
    def lm(self) -> LanguageModel:
        """The model whose last layers finish a draft."""
        return self.cache.lm

    # -- what is looked at ------------------------------------------------------------------------

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return torch.cat([taps[layer].to(self.dtype) for layer in self.layers], dim=-1)

    @property
    def num_features(self) -> int:
        return len(self.layers) * self.spec.hidden_size

    def residuals(self, features_BTI: Tensor) -> dict[int, Tensor]:
        """[B, T, D] in front of each layer."""
        each = features_BTI.chunk(len(self.layers), dim=-1)
        return dict(zip(self.layers, each, strict=True))

    def seen(self, features_BTI: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        found = self.cache.read(self.residuals(features_BTI), position_BT, self.dtype)
        both = [[x.transpose(1, 2).flatten(2) for x in found[layer]] for layer in self.layers]
        depth_BTLD = torch.stack([torch.cat(pair, dim=-1) for pair in both], dim=2)
        assert isinstance(self.net.cross, CrossLayer)
        return self.net.cross.seen(self.summed_up(depth_BTLD), self.rope(position_BT))

    def summed_up(self, depth_XLD: Tensor) -> Tensor:
        """[X, D]: one vector of the keys and values of all layers."""
        depth_RLD = depth_XLD.flatten(0, -3)
        along = self.module.along
        if along is not None:
            shape = along.self_attn.shape
            at_L = torch.arange(depth_RLD.shape[1], device=depth_RLD.device)
            rope_1L2E = rotary(at_L[None], shape.head_dim, shape.rope_theta)
            num_rows, inner = depth_RLD[..., 0].numel(), shape.intermediate_size
            again = is_large(num_rows, 1, shape.hidden_size, inner)

            def mixed(part_RLD: Tensor) -> Tensor:
                rope = rope_1L2E.expand(len(part_RLD), -1, -1, -1)
                out_RLD: Tensor = along(part_RLD, rope, attending(None))
                return out_RLD.mean(1)

            parts = torch.split(depth_RLD, CHUNK) if again else (depth_RLD,)
            mean_RD = torch.cat([run(again, mixed, part) for part in parts])
        else:
            mean_RD = depth_RLD.mean(1)
        joined_RD: Tensor = self.module.join(mean_RD)
        return joined_RD.view(*depth_XLD.shape[:-2], -1)

    # -- target layer inference -------------------------------------------------------------------

    def inferred(self, feed: Feed, kv: Any) -> Tensor:
        """The last state [B, T, D] of tokens whose states in front of the target's last layers
        `feed` holds."""
        last, parts = self.spec.num_layers, SubLayers(self.lent, self.lent)
        assert feed.residual_BTD is not None
        given = feed.residual_BTD.to(self.lm.dtype)
        feed = replace(feed, taps=(last,), logits=False, parts=parts, residual_BTD=given)
        with torch.autocast(given.device.type, enabled=False):
            return self.lm.run(feed, kv).taps[last].to(self.dtype)

    def finished(
        self, looks: Iterator[Tensor], batch: TrainBatch, anchor_BA: Tensor
    ) -> Iterator[Tensor]:
        if not self.lent:
            yield from super().finished(looks, batch, anchor_BA)
            return
        drafted = list(looks)
        self._drafted = [self.placed(x_BAD, batch, anchor_BA) for x_BAD in drafted]
        state_BAPD = self._behind(torch.stack(drafted, dim=2), batch, anchor_BA)
        yield from state_BAPD.unbind(2)

    def _behind(self, x_BAPD: Tensor, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        """[B, A, P, D]: last states of whole drafts. Each sees what the target has cached of the
        text up to its anchor, and its own tokens up to itself."""
        B, A, P, _ = x_BAPD.shape
        groups = groups_behind(self.lm, self.lent, batch, anchor_BA, P, replaces_anchor=False)
        none_BM, x_BMD = torch.zeros_like(groups.position_BM), x_BAPD.flatten(1, 2)
        feed = Feed(none_BM, groups.position_BM, groups.masks, residual_BTD=x_BMD)
        return self.inferred(feed, groups.kv).view(B, A, P, -1)

    def loss(self, batch: TrainBatch) -> LossOut:
        out = super().loss(batch)
        self._drafted = []  # nothing of a batch outlives its loss
        return out

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """With target layer inference half of the distance is that of the states in front of the
        target's layers."""
        if not self.lent or self.feature_weight == 0:
            return super().beside(out, learned, batch)
        state_RD = batch.taps[self.spec.num_layers].flatten(0, 1)
        below_RD = batch.taps[self.lent[0]].flatten(0, 1)
        drafted_RD = self._drafted[learned.index].flatten(0, 1)
        lower = feature_loss(drafted_RD, learned.rows, below_RD)
        named = {f"{name}_below": pair for name, pair in lower.metrics.items()}
        half = self.feature_weight / 2
        out = joined(out, feature_loss(learned.ready_RO, learned.rows, state_RD), half)
        return joined(out, replace(lower, metrics=named), half)

    # -- serving --------------------------------------------------------------------------------

    def open(self, space: Space) -> DraftState:
        return InferringState(self, space) if self.lent else PathState(self, space)

    @property
    def net(self) -> MoaNet:
        return self.module


class InferringState(PathState):
    """Beside the drafter's stores, what the target's last layers have cached."""

    drafter: Moa

    def __init__(self, drafter: Moa, space: Space) -> None:
        super().__init__(drafter, space)
        self.far = drafter.lm.borrowed_kv(drafter.lent, space.num_slots, self.kv.max_len)

    def learn(self, ids_BW: Tensor, features_BWI: Tensor, start_B: Tensor) -> None:
        super().learn(ids_BW, features_BWI, start_B)
        self.far.follow(self.kv)
        states = self.drafter.residuals(features_BWI)
        given = {layer: states[layer].to(self.drafter.lm.dtype) for layer in self.drafter.lent}
        position_BW = start_B[:, None] + torch.arange(ids_BW.shape[1], device=ids_BW.device)
        self.drafter.lm.write_kv(given, self._within(position_BW), self.far)

    def grown(self, nodes: Nodes) -> Tensor:
        place, lm = nodes.place, self.drafter.lm
        x_BMD = self.drafter.looked(nodes, self.kv)
        self.far.follow(self.kv)
        masks = nodes.layout.masks(place, lm.windows)
        token_BM, position_BM = nodes.path_BMP[:, :, -1], self._within(place.position_BM)
        return self.drafter.inferred(
            Feed(token_BM, position_BM, masks, residual_BTD=x_BMD), self.far
        )

    def _within(self, position_BX: Tensor) -> Tensor:
        """Positions of the context; those of padding may lie beyond it."""
        return position_BX.clamp(max=self.drafter.spec.max_positions - 1)


FAMILY = Family(
    name="moa",
    summary=(
        "A small causal layer over the text, and beside it a layer that attends to what every "
        "layer of the target has cached of each token, summed up by attention along the depth once "
        "per round; the target's own last layers may finish the draft. Sees more of the target "
        "than drafters that read a few depths, and costs no more per drafted token."
    ),
    paper="https://arxiv.org/abs/2410.03804",
    options=MoaOptions,
    build=Moa,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
    borrows_layers=True,
)
