"""Drafters that share the target's keys and values: layers with queries only, which read what some
of the target's layers have cached. Gemma 4's assistants are of this kind (transformers
`gemma4_assistant`, vLLM `gemma4_mtp`; no paper tells of their training, which is ours).

At the root the drafter reads cat(embedding of the newest token, the target's last state in front of
it); each next token is read beside the state that the drafter fed back for its parent. The known
text, seen from the position of the newest token, is all that attention looks at: positions and keys
stay as they are for the whole draft, so drafted tokens reach later ones through the state alone.
There is no prefill and no cache of the drafter's own.

Training unrolls `ttt_steps` steps of that at every position: the query of each step stands behind
the position and sees what the target cached up to it.

`head_groups` are what Gemma calls ordered embeddings: `head_top` clusters of tokens are scored, all
others are -inf. (transformers gives those a finite score below the smallest; as a distribution to
verify against, that would name tokens that were never drawn from.) The order in which a checkpoint
lists the tokens of its clusters is kept for the way back (`router.order_K`); nothing else reads it.
Letters: B rows, D hidden width, K draft vocabulary, O output width, S sequence, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, Needs, Space
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.language_model import Borrowed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.seen import Seen
from specctl.drafters.frames.feature_drafter import FeatureDrafter, FeatureOptions, Unrolled
from specctl.drafters.losses.align import shifted
from specctl.drafters.nets.blocks import LayerShape, rotary
from specctl.drafters.nets.heads import cut_rows, draft_size, head_rows
from specctl.drafters.nets.query_layers import Look, QueryNet, QuerySizes
from specctl.drafters.nets.routed import PREFIX, add_router, check_routing, cut_router
from specctl.drafters.nets.target_cache import TargetCache
from specctl.drafters.option_checks import Count
from specctl.drafters.states.shared_kv_state import SharedKvState

ROUND = 32  # widths of an MLP come in multiples of this
MOST_WIDTH = 1 << 16  # of a head
GROUPS, ORDER = f"{PREFIX}group_K", f"{PREFIX}order_K"
PER_LAYER = ("reads", "head_dims", "windows", "rope_thetas", "rotated")
OTHERWISE = "set drafter.options.reads and head_dims to layers of the target and their head widths"
UNLIKE = (
    "set drafter.options.reads to layers that are rotated so, or rope_thetas and rotated to what "
    "turns theirs, or choose a family that reads states, such as eagle3"
)


@dataclass(frozen=True, slots=True)
class SharedKvOptions(FeatureOptions):
    """`layers` of the drafter, `width` wide, with so many query `heads` (None: as the target). Of
    each layer, in order: which of the target's layers it `reads` (None: the last), the
    width of the heads there (`head_dims`, None: the target's), the newest known tokens that it sees
    beside the newest of all (`windows`, 0: all; None: all), and the rotation of the target's keys
    there: `rope_thetas` and how many pairs of numbers are `rotated`, 0: all (None: the target's
    own). `head_groups` splits the LM head's rows, of which the `head_top` best groups are read."""

    ttt_steps: Count = 3
    decay: float = 0.6
    feature_weight: float = 0.0
    layers: Count = 2
    width: Count | None = None
    heads: Count | None = None
    reads: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    windows: tuple[int, ...] | None = None
    rope_thetas: tuple[float, ...] | None = None
    rotated: tuple[int, ...] | None = None
    head_groups: int | None = None
    head_top: int = 4

    def __post_init__(self) -> None:
        FeatureOptions.__post_init__(self)
        check_routing(self.head_groups, self.head_top)
        for name in PER_LAYER:
            values = getattr(self, name)
            if values is None:
                continue
            least, most = (1, MOST_WIDTH) if name == "head_dims" else (0, 1 << 30)
            if len(values) != self.layers or not all(least <= one <= most for one in values):
                raise RecipeError(
                    f"{name} does not say one number of each layer of the drafter",
                    where=f"drafter.options.{name}",
                    found=str(list(values))[:80],
                    expected=f"{self.layers} numbers, {least:,} to {most:,}",
                    do=f"write as many as drafter.options.layers says, or leave {name} out",
                )
        if (self.rope_thetas is None) != (self.rotated is None) or 0.0 in (self.rope_thetas or ()):
            raise RecipeError(
                "the rotation of keys is half said",
                where="drafter.options.rope_thetas",
                found=f"rope_thetas: {self.rope_thetas}, rotated: {self.rotated}",
                expected="both, the first above 0, or neither",
                do="write both for every layer, or leave both out",
            )

    def sizes(self, spec: ModelSpec) -> QuerySizes:
        """Of the drafter's layers."""
        width = self.width or spec.hidden_size
        wanted = spec.intermediate_size * width // spec.hidden_size
        return QuerySizes(
            width,
            self.heads or spec.num_heads,
            self.head_dims or (spec.head_dim,) * self.layers,
            self.intermediate or max(ROUND, wanted // ROUND * ROUND),
            spec.norm_eps,
        )


class SharedKv(FeatureDrafter):
    """Reads the target's cache and has none of its own."""

    family = "shared-kv"
    module: QueryNet
    options: SharedKvOptions
    _cache: TargetCache | None = None

    def __init__(
        self, options: SharedKvOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        self._num_rows = draft_size(vocab, spec.vocab_size)
        super().__init__(options, spec, vocab)
        self.reads = options.reads or (spec.num_layers - 1,) * options.layers
        if max(self.reads) >= spec.num_layers:
            raise RecipeError(
                "the drafter reads a layer that the target does not have",
                where="drafter.options.reads",
                found=str(max(self.reads)),
                expected=f"0 to {spec.num_layers - 1}, the target having {spec.num_layers} layers",
                do="leave reads out to read the last layer",
            )
        read = {*zip(self.reads, options.sizes(spec).head_dims, strict=True)}
        if len(read) > len({*self.reads}):
            raise RecipeError(
                "one layer of the target is read with heads of two widths",
                where="drafter.options.head_dims",
                found=", ".join(f"layer {layer}: {width}" for layer, width in sorted(read)),
                expected="one width of each layer that is read",
                do="write the width of that layer's heads wherever it is read",
            )
        # The newest known token is at distance 0, so one more than the window (as transformers).
        self.reach = tuple(window + 1 if window else None for window in self._windows())
        width = self.module.norm.weight.shape[0]
        groups, top = options.head_groups, options.head_top
        self.router = add_router(self.module, width, self._num_rows, groups, top)
        if self.router is not None:
            self.router.register_buffer("order_K", torch.arange(self._num_rows))

    def _windows(self) -> tuple[int, ...]:
        return self.options.windows or (0,) * self.options.layers

    def make_net(self, shape: LayerShape) -> QueryNet:
        return QueryNet(shape, self.options.sizes(self.spec), self._num_rows)

    def needs(self) -> Needs:
        layers = tuple(sorted({*self.reads}))
        teacher = self.options.loss != "ce"
        return Needs((*layers, self.tap), teacher=teacher, borrow=True, copied=layers)

    @property
    def net(self) -> QueryNet:
        return self.module

    @property
    def head_width(self) -> int | None:
        return int(self.module.norm.weight.shape[0])

    @property
    def cache(self) -> TargetCache:
        """What the target has cached."""
        assert self._cache is not None, "bind() the target's cache first"
        return self._cache

    @property
    def lm(self) -> LanguageModel:
        """The target, whose cache is read."""
        return self.cache.lm

    def bind(self, borrowed: Borrowed) -> None:
        sizes = self.options.sizes(self.spec)
        widths = dict(sorted(zip(self.reads, sizes.head_dims, strict=True)))
        self._cache = TargetCache(borrowed, self.spec, tuple(widths), OTHERWISE, widths)
        if self.options.rope_thetas is None:
            self._cache.check_rope(UNLIKE)
        for layer in widths:
            keys = self.lm.kv_shape(layer).key_heads
            if sizes.num_heads % keys:
                raise IncompatibleError(
                    "the drafter's query heads cannot share the target's heads of keys",
                    found=f"{sizes.num_heads} query heads, {keys} of keys in layer {layer}",
                    expected="a multiple of the latter",
                    do=f"write heads: {keys}",
                    where="drafter.options.heads",
                )
        self.borrowed = borrowed
        if self._is_fresh:
            rows_KD = head_rows(borrowed, self.vocab).detach()
            net = self.module
            with torch.no_grad():  # what is read of a state is worth what it was worth
                rows_KO = rows_KD.to(net.post_projection.weight) @ net.post_projection.weight
                net.lm_head.weight.copy_(rows_KO)
            if self.router is not None:
                self.router.arrange(net.lm_head.weight)
                self.router.order_K = listed(self.router.group_K)
        self._is_fresh = False

    def completed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Older packages have no order."""
        if GROUPS not in tensors or ORDER in tensors:
            return tensors
        return {**tensors, ORDER: listed(tensors[GROUPS])}

    def trimmed(self, vocab: VocabMap) -> Self:
        weights, options = cut_router(self.module, self.options, self.vocab, vocab)
        weights["lm_head.weight"] = cut_rows(weights["lm_head.weight"], self.vocab, vocab)
        if weights.pop(ORDER, None) is not None and GROUPS in weights:
            weights[ORDER] = listed(weights[GROUPS])
        small = type(self)(options, self.spec, vocab)
        small.module.to(weights["lm_head.weight"])
        small.module.load_state_dict(weights)
        small.borrowed, small._is_fresh = self.borrowed, self._is_fresh
        small._cache = self._cache
        return small

    def head_weight(self) -> Tensor:
        return self.module.lm_head.weight

    def open(self, space: Space) -> SharedKvState:  # type: ignore[override]
        return SharedKvState(self, space)

    def ropes(self, position_BT: Tensor) -> list[Tensor]:
        """[B, T, 2, E] a layer: the rotations of queries that stand there."""
        thetas, rotated = self.options.rope_thetas, self.options.rotated
        if thetas is None or rotated is None:
            return [self.cache.rope(position_BT)] * self.options.layers
        head_dims = self.options.sizes(self.spec).head_dims
        each = zip(head_dims, thetas, rotated, strict=True)
        return [rotary(position_BT, E, theta, frequencies(E, theta, n)) for E, theta, n in each]

    def unroll(self, batch: TrainBatch) -> list[Unrolled]:
        net, state_BSD = self.module, self.noisy(batch)
        with torch.no_grad():
            taps = {layer: batch.taps[layer] for layer in self.cache.layers}
            pairs = self.cache.read(taps, batch.position_BS, self.dtype)
        looks = _looks([pairs[layer] for layer in self.reads], self.reach, batch)
        ropes, steps = self.ropes(batch.position_BS + 1), list[Unrolled]()
        for ahead in range(self.options.ttt_steps):
            token_BSD = self.embed(shifted(batch.ids_BS, 1 + ahead))
            ready_BSO = net.looked(net.mix(token_BSD, state_BSD), ropes, looks)
            steps.append(Unrolled(ready_BSO, net.fed_back(ready_BSO)))
            state_BSD = steps[-1].state_BSD
        return steps


def listed(group_K: Tensor) -> Tensor:
    """[K]: rows of the LM head by cluster, those of one as they stand."""
    return group_K.argsort(stable=True)


def frequencies(head_dim: int, theta: float, rotated: int) -> tuple[float, ...]:
    """Of the pairs of a head, of which those behind the first `rotated` (0: none) stand still."""
    num = head_dim // 2
    at = torch.arange(num, dtype=torch.float32)
    found = theta ** (-2 * at / head_dim)
    return tuple(torch.where(at < (rotated or num), found, 0.0).tolist())


def _looks(
    pairs: Sequence[tuple[Tensor, Tensor]], reach: Sequence[int | None], batch: TrainBatch
) -> list[Look]:
    """What the queries behind every position look at, by layer."""
    text = Seen.text(batch.document_BS)

    def looking(pair: tuple[Tensor, Tensor], seen: Seen) -> Look:
        return lambda query: attend_seen(query, seen.sets(*pair))

    found = list[Look]()
    for pair, most in zip(pairs, reach, strict=True):
        seen = text
        if most is not None:
            first_BS = torch.maximum(text.first_BT, text.last_BT + 1 - most)
            seen = replace(text, first_BT=first_BS, spans=None, ends=None)
        found.append(looking(pair, seen))
    return found


FAMILY = Family(
    name="shared-kv",
    summary=(
        "Layers with queries only, which read the keys and values that the target has cached: no "
        "prefill, no cache of the drafter's own, and the work of a drafted token does not grow "
        "with those before it. Gemma 4's assistants are imported as this family, with their "
        "clusters of tokens; for another target it is trained."
    ),
    paper="https://huggingface.co/docs/transformers/model_doc/gemma4_assistant",
    options=SharedKvOptions,
    build=SharedKv,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
    borrows_layers=True,
)
