"""GliDe (arXiv 2402.02082): a one-layer language model that glimpses at the target's KV cache.

Its layer attends to the tokens of the text, then to the keys and values that the target's last
layer has cached, then runs its MLP (section 3.1, figure 2):

    h = x + SelfAttention(x);  g = h + W_o Attention(rotate(W_q h), K_target, V_target);  g + MLP(g)

with a query and an output projection of its own and no other weights for what it glimpses at. The
newest tokens of a draft have no cached row; training hides as much (`strict`, the paper's block
mask). The paper grows it into a caterpillar (policy cape): more candidates where it is unsure.
The paper's model has an embedding of its own; ours reads the target's, through a linear layer where
`width` is smaller than the target's, and has an LM head of its own.
Letters: B rows, D hidden width, I input width, K draft vocabulary, T fed tokens, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from specctl.core.drafter import Family, Needs
from specctl.core.kv_cache import KVShape
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.cross_drafter import (
    AttentionLayer,
    CrossDrafter,
    CrossLayer,
    CrossNet,
    CrossOptions,
    GlimpseLayer,
)
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.options import ADDED, added_before
from specctl.drafters.nets.target_cache import TargetCache
from specctl.drafters.option_checks import Count

ROUND = 32  # widths of an MLP come in multiples of this
OWN_KEYS = "set drafter.options.own_keys to true"


@dataclass(frozen=True, slots=True)
class GlideOptions(CrossOptions):
    """`width` of the drafter, None: the target's; `intermediate`: of its MLP, None: as much wider
    as the target's. `own_keys`: True makes keys and values of the target's states by projections of
    the drafter's own instead (ours: for targets whose layers are not in this process). `strict`:
    False is the ablation without the paper's block mask."""

    width: Count | None = field(default=None, metadata=ADDED)
    intermediate: Count | None = field(default=None, metadata=ADDED)
    own_keys: bool = field(default=False, metadata=added_before(True))

    def shape(self, spec: ModelSpec) -> LayerShape:
        """Of the drafter's layer."""
        width = self.width or spec.hidden_size
        wanted = spec.intermediate_size * width // spec.hidden_size
        whole = LayerShape.of(spec, self.intermediate or max(ROUND, wanted // ROUND * ROUND))
        if self.width is None:
            return whole
        heads = max(1, width // spec.head_dim)
        return replace(whole, hidden_size=width, num_heads=heads, num_kv_heads=heads)


class GlideNet(CrossNet):
    """The layer, an LM head of its own and, for another width, what narrows embeddings."""

    def __init__(self, options: GlideOptions, spec: ModelSpec, rows: int) -> None:
        shape, far = options.shape(spec), LayerShape.of(spec)
        cross = CrossLayer(shape) if options.own_keys else GlimpseLayer(shape, far)
        super().__init__(AttentionLayer(shape), cross)
        self.lm_head = nn.Linear(shape.hidden_size, rows, bias=False)
        self.narrow: nn.Linear | None = None
        if shape.hidden_size != spec.hidden_size:
            self.narrow = nn.Linear(spec.hidden_size, shape.hidden_size, bias=False)
            nn.init.orthogonal_(self.narrow.weight)


class Glide(CrossDrafter):
    """Glimpses at what the target's last layer has cached."""

    family = "glide"
    module: GlideNet

    def __init__(
        self, options: GlideOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.last = spec.num_layers - 1

    def make_net(self, rows: int) -> GlideNet:
        return GlideNet(self.options, self.spec, rows)

    def needs(self) -> Needs:
        return Needs((self.last,), teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        if not self.options.own_keys:
            self._cache = TargetCache(borrowed, self.spec, (self.last,), OWN_KEYS)
            self._cache.check_rope(OWN_KEYS)
        super().bind(borrowed)

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.last].to(self.dtype)

    def start_heads(self, rows_KD: Tensor) -> None:
        head, narrow = self.module.lm_head.weight, self.module.narrow
        if narrow is None:
            head.copy_(rows_KD)
        else:  # what is read of an embedding is worth what it was worth
            head.copy_(rows_KD.to(narrow.weight) @ narrow.weight.T)

    def own_heads(self) -> list[nn.Linear]:
        return [self.module.lm_head]

    def tokens(self, ids_X: Tensor) -> Tensor:
        rows_XD = self.embed(ids_X)
        return rows_XD if self.module.narrow is None else self.module.narrow(rows_XD)

    @property
    def far(self) -> KVShape:
        return self.shape.kv if self.options.own_keys else LayerShape.of(self.spec).kv

    def far_rope(self, position: Tensor) -> Tensor:
        return self.rope(position) if self.options.own_keys else self.cache.rope(position)

    def summary(self, features_XI: Tensor) -> Tensor:
        narrow = self.module.narrow
        return features_XI if narrow is None else narrow(features_XI)

    def seen(self, features_BTI: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.own_keys:
            return super().seen(features_BTI, position_BT)
        found = self.cache.read({self.last: features_BTI}, position_BT, self.dtype)
        return found[self.last]

    @property
    def net(self) -> GlideNet:
        return self.module


FAMILY = Family(
    name="glide",
    summary=(
        "A language model of one layer that attends to the tokens of the text and, beside them, to "
        "what the target's last layer has cached of it. The smallest drafter that sees the target, "
        "and it needs no state of its own fed back, so that a rejected draft leaves nothing to "
        "repair. Meant for caterpillar trees: more candidates where it is unsure."
    ),
    paper="https://arxiv.org/abs/2402.02082",
    options=GlideOptions,
    build=Glide,
    trainable=True,
    policies=("cape", "chain", "dynamic-tree", "static-tree"),
    borrows_layers=True,
)
