"""CrossDrafter: a small language model that looks at the target's features through cross-attention.

The token at position s attends to the tokens before it and to features of the target up to t < s,
where t is the newest position that the target had read when the draft began. Head i is the model at
depth i of a draft: its token is t + 1 + i, it predicts t + 2 + i, and it sees no feature behind t.
That bound is what makes training as hard as drafting (GliDe's block mask, the T-step bound of
Mixture of Attentions). Every depth is trained behind each anchor, where the papers draw one. What
is attended to there are keys and values of one vector per position, by projections of the drafter's
own, or, for a family that overrides `seen`, what the target's cache holds.
Letters: A anchors, B rows, D hidden width, E head width, H query heads, I input width, M new nodes,
P path, S sequence, T fed tokens, W window, X any axes, Y carry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import DraftState, Space
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.seen import Seen
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.losses.align import AlignedRows, aim, behind, random_anchors
from specctl.drafters.nets.blocks import (
    DecoderLayer,
    LayerShape,
    Mlp,
    RmsNorm,
    attending,
    rotate,
)
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.target_cache import TargetCache
from specctl.drafters.option_checks import Count
from specctl.drafters.states.path_state import Nodes, PathState


@dataclass(frozen=True, slots=True)
class CrossOptions(HeadOptions):
    """Trained `num_heads` tokens deep behind `anchors` positions of each row. `strict`: False shows
    every token all features before it while training, which no draft has (an ablation)."""

    num_heads: int = 5
    anchors: Count = 64
    strict: bool = True


class AttentionLayer(DecoderLayer):
    """A decoder layer without its MLP."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        del self.mlp, self.post_attention_layernorm

    def finish(self, h_BTD: Tensor) -> Tensor:
        return h_BTD


class CrossLayer(DecoderLayer):
    """A decoder layer whose queries are of tokens and whose keys and values are of features."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.feature_norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        nn.init.normal_(self.self_attn.o_proj.weight, std=0.5 * shape.hidden_size**-0.5)

    def seen(self, feature_BTD: Tensor, rope_BT2E: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of features."""
        return self.self_attn.key_value(self.feature_norm(feature_BTD), rope_BT2E)

    def look(
        self, x_BTD: Tensor, rope_BT2E: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | Seen
    ) -> Tensor:
        """The tokens after attending to them."""
        query = self.self_attn.query(self.input_layernorm(x_BTD), rope_BT2E)
        return self.finish(x_BTD + self.self_attn.o_proj(attending(mask)(query, *seen)))


class GlimpseLayer(nn.Module):
    """A decoder layer whose keys and values are the target's: `far` is the shape of their heads,
    `shape` that of the drafter. Of an attention it has the query and the output projection alone
    (GliDe, section 3.1)."""

    def __init__(self, shape: LayerShape, far: LayerShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, far.num_heads * far.head_dim
        self.far = far
        self.input_layernorm = RmsNorm(width, shape.norm_eps)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.post_attention_layernorm = RmsNorm(width, shape.norm_eps)
        self.mlp = Mlp(width, shape.intermediate_size)
        nn.init.normal_(self.o_proj.weight, std=0.5 * inner**-0.5)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def look(
        self, x_BTD: Tensor, rope_BT2E: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | Seen
    ) -> Tensor:
        """The tokens after attending to them."""
        B, T, _ = x_BTD.shape
        heads = self.q_proj(self.input_layernorm(x_BTD)).view(B, T, -1, self.far.head_dim)
        query_BHTE = rotate(heads.transpose(1, 2), rope_BT2E)
        h_BTD = x_BTD + self.o_proj(attending(mask)(query_BHTE, *seen))
        out: Tensor = h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))
        return out


class CrossNet(nn.Module):
    """A self-attention layer, a cross-attention layer, the last norm."""

    def __init__(self, own: DecoderLayer, cross: CrossLayer | GlimpseLayer) -> None:
        super().__init__()
        self.own, self.cross = own, cross
        width, eps = own.self_attn.shape.hidden_size, own.self_attn.shape.norm_eps
        self.norm = RmsNorm(width, eps)


class CrossDrafter(HeadDrafter):
    """What a family leaves to the frame. Its options have `num_heads`, `anchors` and `strict`."""

    _cache: TargetCache | None = None

    @property
    def cache(self) -> TargetCache:
        """What the target's cache holds, of a family that took it up in `bind`."""
        assert self._cache is not None, "bind() the target's cache first"
        return self._cache

    def trimmed(self, vocab: VocabMap) -> Any:
        small = super().trimmed(vocab)
        small._cache = self._cache
        return small

    @property
    def num_features(self) -> int:
        return self.spec.hidden_size

    @property
    @abstractmethod
    def net(self) -> CrossNet: ...

    def summary(self, features_XI: Tensor) -> Tensor:
        """[X, D]: what cross-attention reads of one position."""
        return features_XI

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        ready_XD: Tensor = self.net.norm(carry_XY)
        return ready_XD

    def tokens(self, ids_X: Tensor) -> Tensor:
        """[X, D]: what the first layer reads of tokens."""
        return self.embed(ids_X)

    @property
    def shape(self) -> LayerShape:
        """Of the layer that attends to tokens."""
        return self.net.own.self_attn.shape

    def rope(self, position: Tensor) -> Tensor:
        return self.shape.rope(position)

    # -- what is looked at ------------------------------------------------------------------------

    @property
    def far(self) -> KVShape:
        """Heads of the keys and values of features."""
        return self.shape.kv

    def far_rope(self, position: Tensor) -> Tensor:
        """[..., 2, E]: the rotation of queries for them."""
        return self.rope(position)

    def seen(self, features_BTI: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of features."""
        assert isinstance(self.net.cross, CrossLayer), "who has other layers says what they read"
        return self.net.cross.seen(self.summary(features_BTI), self.rope(position_BT))

    # -- serving --------------------------------------------------------------------------------

    @property
    def stores(self) -> tuple[KVShape, ...]:
        return (self.shape.kv, self.far)

    def open(self, space: Space) -> DraftState:
        return PathState(self, space)

    def stored(
        self, ids_BW: Tensor, features_BWI: Tensor, position_BW: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of known tokens, and of their features."""
        rope, own = self.rope(position_BW), self.net.own
        token = own.self_attn.key_value(own.input_layernorm(self.tokens(ids_BW)), rope)
        return [token, self.seen(features_BWI, position_BW)]

    def grown(self, nodes: Nodes, kv: SlotKV) -> Tensor:
        """[B, M, D]: what the LM head reads behind nodes."""
        return self.ready(0, self.looked(nodes, kv))

    def looked(self, nodes: Nodes, kv: SlotKV) -> Tensor:
        """[B, M, D]: nodes after both layers."""
        position_BM, token_BM = nodes.place.position_BM, nodes.path_BMP[:, :, -1]
        look = attending(nodes.place.mask, kv, 0)
        x_BMD = self.net.own(self.tokens(token_BM), self.rope(position_BM), look)
        far_rope = self.far_rope(position_BM)
        return self.net.cross.look(x_BMD, far_rope, kv.read(1), nodes.known_mask)

    # -- training -------------------------------------------------------------------------------

    def anchors(self, batch: TrainBatch) -> Tensor:
        return random_anchors(batch, self.options.anchors)

    def aimed(self, index: int, batch: TrainBatch, anchor_BA: Tensor | None) -> AlignedRows:
        rows = aim(batch, 2 + index)
        return rows if anchor_BA is None else behind(rows, batch, anchor_BA)

    def is_staircase(self, batch: TrainBatch) -> bool:
        """Whether drafted tokens attend to drafted tokens alone in this batch: to nothing before
        the draft, where drafts of other lengths would have been accepted."""
        return False

    def _since(self, anchor_BA: Tensor, at_BA: Tensor, batch: TrainBatch) -> Tensor:
        """[B, A, D]: what the first layer makes of tokens that see the draft since its root."""
        own, ids_BS = self.net.own, batch.ids_BS
        token = own.input_layernorm(self.tokens(ids_BS))
        pair = own.self_attn.key_value(token, self.rope(batch.position_BS))
        x_BAD = self.tokens(ids_BS.gather(1, at_BA))
        rope = self.rope(batch.position_BS.gather(1, at_BA))
        query = own.self_attn.query(own.input_layernorm(x_BAD), rope)
        since = Seen((anchor_BA + 1).clamp(max=ids_BS.shape[1] - 1), at_BA)
        out_BAD: Tensor = own.finish(x_BAD + own.self_attn.o_proj(attending(since)(query, *pair)))
        return out_BAD

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        """[B, S, D] per depth of a draft, zero where none begins."""
        anchor_BA = self.anchors(batch) if anchor_BA is None else anchor_BA
        for ready_BAD in self.finished(self._looks(batch, anchor_BA), batch, anchor_BA):
            yield self.placed(ready_BAD, batch, anchor_BA)

    def finished(
        self, looks: Iterator[Tensor], batch: TrainBatch, anchor_BA: Tensor
    ) -> Iterator[Tensor]:
        """[B, A, D] per depth: what the LM head reads, of tokens after both layers."""
        for depth, x_BAD in enumerate(looks):
            yield self.ready(depth, x_BAD)

    def placed(self, x_BAD: Tensor, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        """[B, S, D]: at the positions of the anchors, zero elsewhere."""
        nothing_BSD = x_BAD.new_zeros(*batch.ids_BS.shape, x_BAD.shape[-1])
        return nothing_BSD.scatter(1, anchor_BA[:, :, None].expand_as(x_BAD), x_BAD)

    def _looks(self, batch: TrainBatch, anchor_BA: Tensor) -> Iterator[Tensor]:
        """[B, A, D] per depth: the drafts' tokens after both layers."""
        net, rope, last = self.net, self.rope(batch.position_BS), batch.ids_BS.shape[1] - 1
        visible = Seen.text(batch.document_BS)
        x_BSD = net.own(self.tokens(batch.ids_BS), rope, attending(visible))
        seen = self.seen(self.gathered(batch.taps), batch.position_BS)
        is_staircase = self.is_staircase(batch)
        for depth in range(self.options.num_heads):
            at_BA = (anchor_BA + 1 + depth).clamp(max=last)
            until_BA = anchor_BA if self.options.strict else (at_BA - 1)
            to_BAD = anchor_BA[:, :, None].expand(-1, -1, x_BSD.shape[-1])
            query_BAD = x_BSD.gather(1, at_BA[:, :, None].expand_as(to_BAD))
            if is_staircase:
                query_BAD = self._since(anchor_BA, at_BA, batch)
            at_rope = self.far_rope(batch.position_BS.gather(1, at_BA))
            yield net.cross.look(query_BAD, at_rope, seen, visible.rows(until_BA))
