"""M2R2 (arXiv 2502.02040): a faster residual stream beside the target's lower layers drafts.

The residual h^l of a token grows layer by layer to what the LM head reads. A second stream r starts
from the same embedding and is to be as far behind layer E as h is behind layer rate * E, the last:

    r^0 = h^0
    a   = r^l + (h^(l+1) - h^l) + Attend_l(norm(r^l); K_l, V_l)
    r^(l+1) = a + U_l silu(D_l norm(a)),   q_t = softmax(W norm(r^E_t)) against p_t.

Keys and values are the target's own of layer l, made of the slow stream, so that the fast one has
no cache; its queries and its output are low-rank maps, as are D and U ("accelerator adapters"). It
learns the target's distribution and, times `feature_weight`, to be where the target's last state is
(SmoothL1 of what the LM head reads). The paper names these parts; the equations are ours. Its
router for early exits, which answers without verification, and its loading of experts ahead of time
are left out. Letters: B rows, D hidden width, E head width, H query heads, M new nodes, R flat
rows, S sequence, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs, Space
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Borrowed, Feed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.exit_drafter import ExitDrafter, ExitNet, ExitOptions, LowerLayersState
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import feature_loss, joined
from specctl.drafters.nets.blocks import LayerShape, RmsNorm, attending, rotate
from specctl.drafters.nets.routed import read_head
from specctl.drafters.nets.target_cache import TargetCache
from specctl.drafters.option_checks import Count, Within

KeyValue = tuple[Tensor, Tensor]
UNLIKE = "set drafter.options.attends to false, or take kangaroo"


@dataclass(frozen=True, slots=True)
class M2R2Options(ExitOptions):
    """`rate`: how much faster than the target's residual; `layers` None leaves behind 1 / rate of
    the target's layers. `rank` of the adapters. `attends`: False leaves out the queries to the
    target's cache; `adapts`: False all of the fast stream but its norm (both ablations)."""

    rate: Annotated[float, Within(1)] = 4.0
    rank: Count = 64
    feature_weight: Annotated[float, Within(0)] = 0.1
    attends: bool = True
    adapts: bool = True


class LowRankMap(nn.Module):
    """D to `out` through `rank`; zero when fresh if `is_output`."""

    def __init__(self, width: int, rank: int, out: int, is_output: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)
        if is_output:
            nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: Tensor, bends: bool = False) -> Tensor:
        inner = self.down(x_BTD)
        out: Tensor = self.up(F.silu(inner) if bends else inner)
        return out


class FastLayer(nn.Module):
    """What one layer adds to the fast stream beside what it adds to the slow one."""

    def __init__(self, shape: LayerShape, options: M2R2Options) -> None:
        super().__init__()
        width, eps, rank = shape.hidden_size, shape.norm_eps, options.rank
        self.shape, heads = shape, shape.num_heads * shape.head_dim
        if options.attends:
            self.attention_norm = RmsNorm(width, eps)
            self.query = LowRankMap(width, rank, heads)
            self.output = LowRankMap(heads, rank, width, is_output=True)
        self.attends = options.attends
        self.mlp_norm = RmsNorm(width, eps)
        self.mlp = LowRankMap(width, rank, width, is_output=True)

    def forward(self, r_BTD: Tensor, rope_BT2E: Tensor, seen: KeyValue, mask: Tensor) -> Tensor:
        if self.attends:
            B, T, _ = r_BTD.shape
            query = self.query(self.attention_norm(r_BTD)).view(B, T, -1, self.shape.head_dim)
            query_BHTE = rotate(query.transpose(1, 2), rope_BT2E)
            r_BTD = r_BTD + self.output(attending(mask)(query_BHTE, *seen))
        out: Tensor = r_BTD + self.mlp(self.mlp_norm(r_BTD), bends=True)
        return out


class M2R2Net(ExitNet):
    """The layers of the fast stream."""

    def __init__(self, shape: LayerShape, options: M2R2Options, layers: int) -> None:
        super().__init__(shape)
        count = layers if options.adapts else 0
        self.layers = nn.ModuleList(FastLayer(shape, options) for _ in range(count))

    def forward(
        self,
        slow: Mapping[int, Tensor],
        exit_at: int,
        rope_BT2E: Tensor,
        seen: Sequence[KeyValue],
        mask: Tensor,
    ) -> Tensor:
        """[B, T, D]: what the LM head reads. `slow` holds h^0 .. h^E, `seen` keys and values."""
        r_BTD = slow[0 if len(self.layers) else exit_at]
        for at, (layer, key_value) in enumerate(zip(self.layers, seen, strict=False)):
            r_BTD = layer(r_BTD + slow[at + 1] - slow[at], rope_BT2E, key_value, mask)
        out: Tensor = self.norm(r_BTD)
        return out


class M2R2(ExitDrafter):
    """The lower layers, and beside them the fast stream."""

    family = "m2r2"
    module: M2R2Net
    options: M2R2Options
    _cache: TargetCache | None = None

    def make_net(self, shape: LayerShape) -> M2R2Net:
        return M2R2Net(shape, self.options, self.exit)

    def usual_layers(self, spec: ModelSpec) -> int:
        layers = round(spec.num_layers / self.options.rate)
        return min(max(1, layers), spec.num_layers - 1)

    @property
    def cache(self) -> TargetCache:
        assert self._cache is not None, "bind() the target's cache first"
        return self._cache

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._cache = TargetCache(borrowed, self.spec, self.attention, "take kangaroo")
        if self.options.attends:
            self._cache.check_rope(UNLIKE)

    def trimmed(self, vocab: VocabMap) -> Self:
        small = super().trimmed(vocab)
        small._cache = self._cache
        return small

    def needs(self) -> Needs:
        """While drafting in the target's own cache nothing: the rest is for training and copies."""
        needs = super().needs()
        taps = (*needs.taps, *([self.spec.num_layers] if self.options.feature_weight else []))
        return replace(needs, taps=taps, copied=taps if needs.copied else ())

    def ready(self, batch: TrainBatch) -> Tensor:
        position_BS, dtype = batch.position_BS, self.dtype
        slow = {tap: batch.taps[tap].to(dtype) for tap in (*self.attention, self.exit)}
        seen = list[KeyValue]()
        if self.options.attends:
            state = {layer: batch.taps[layer] for layer in self.attention}
            seen = [*self.cache.read(state, position_BS, dtype).values()]
        else:
            seen = [(position_BS, position_BS)] * self.exit
        rope, mask = self.cache.rope(position_BS), document_mask(batch.document_BS)
        out: Tensor = self.module(slow, self.exit, rope, seen, mask)
        return out

    def loss(self, batch: TrainBatch) -> LossOut:
        """What the target says, and where its last state is."""
        ready_RD, rows = self.ready(batch).flatten(0, 1), aim(batch, 1)
        out = self.compared(ready_RD, rows)
        if not self.options.feature_weight:
            return out
        state_RD = batch.taps[self.spec.num_layers].flatten(0, 1)
        return joined(out, feature_loss(ready_RD, rows, state_RD), self.options.feature_weight)

    def open(self, space: Space) -> M2R2State:
        return M2R2State(self, space)


class M2R2State(LowerLayersState):
    """The lower layers' cache, which both streams read."""

    def __init__(self, drafter: M2R2, space: Space) -> None:
        super().__init__(drafter, space)
        self.drafter = drafter

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        drafter, taps = self.drafter, (*self.drafter.attention, self.drafter.exit)
        out = self.lm.run(replace(feed, taps=taps, logits=False), self.kv)
        self._left(out.taps[drafter.exit])
        slow = {tap: out.taps[tap].to(drafter.dtype) for tap in taps}
        seen = [self.lm.read_kv(layer, self.kv) for layer in drafter.attention]
        seen = [(key.to(drafter.dtype), value.to(drafter.dtype)) for key, value in seen]
        rope = drafter.cache.rope(feed.position_BT)
        self._ready_BMD = drafter.module(slow, drafter.exit, rope, seen, feed.masks.full)
        return read_head(self._ready_BMD, self._head)


FAMILY = Family(
    name="m2r2",
    summary=(
        "A second residual stream beside the target's first layers, moved by low-rank adapters, is "
        "where the target's own will be several times as many layers later, and drafts through the "
        "target's LM head. It reads the target's keys and values, so that it needs no cache."
    ),
    paper="https://arxiv.org/abs/2502.02040",
    options=M2R2Options,
    build=M2R2,
    trainable=True,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
