"""LanguageModel: one decoder-only LM behind one small interface, whatever its architecture.

Both the target and an independent small-LM drafter are a LanguageModel. Two implementations:
`fast_llama.FastLlama` (Llama-shaped architectures, our own forward, fast) and `hf_lm.HfLM` (any
transformers causal LM; the reference of the first).
Letters: B rows, D hidden width, E head width, H query heads, K draft vocabulary, L positions, M new
nodes, N nodes, S sequence, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.masks import chain_mask, document_mask, tree_mask
from specctl.core.forward.row_additions import RowAdditions
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree

WIDTH_STEP = 16
LEAST_SAVED = 2e7  # multiplications that take as long as a second call of the layers


@dataclass(frozen=True, slots=True)
class LmOut:
    """logits_BTV (None when not asked for) and taps: hidden_states index -> [B, T, D]."""

    logits_BTV: Tensor | None
    taps: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackedTaps(Mapping[int, Tensor]):
    """Taps that lie in one tensor, [taps, B, T, D] in the order of `keys_`: to hand them on costs
    nothing, each is cut out when it is asked for."""

    keys_: tuple[int, ...]
    value: Tensor

    def __getitem__(self, tap: int) -> Tensor:
        if tap not in self.keys_:
            raise KeyError(tap)
        return self.value[self.keys_.index(tap)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys_)

    def __len__(self) -> int:
        return len(self.keys_)


@dataclass(frozen=True, slots=True)
class Masks:
    """Attention masks of one forward, [B, 1, T, L] bool: full, and one per sliding window size."""

    full: Tensor
    windows: Mapping[int, Tensor] = field(default_factory=dict)

    def behind(self, num_fed: int) -> Masks:
        """Those of the fed tokens behind the first `num_fed`."""
        windows = {size: mask[:, :, num_fed:] for size, mask in self.windows.items()}
        return Masks(self.full[:, :, num_fed:], windows)


class RunMasks(Masks):
    """Those of a causal run of `num_fed` tokens behind the kept positions, made when they are read:
    the compiled step needs none."""

    kept_len_B: Tensor
    num_fed: int
    span: int
    sizes: tuple[int, ...]

    def __init__(self, kept_len_B: Tensor, num_fed: int, span: int, sizes: tuple[int, ...]) -> None:
        self.__dict__.update(kept_len_B=kept_len_B, num_fed=num_fed, span=span, sizes=sizes)

    @cached_property
    def full(self) -> Tensor:  # type: ignore[override]
        return chain_mask(self.kept_len_B, self.num_fed, self.span)

    @cached_property
    def windows(self) -> Mapping[int, Tensor]:  # type: ignore[override]
        run = self.kept_len_B, self.num_fed, self.span
        return {size: chain_mask(*run, size) for size in self.sizes}


@dataclass(frozen=True, slots=True)
class Feed:
    """What one forward reads and what it is asked for: taps, and logits at every fed token, at one
    fed index per row (`only`, then [B, 1, V]), or none.

    Extra rows: a `residual_BTD` with fewer rows than there are fed tokens stands at the last of
    them, in front of the first layer; the others are embedded as always. All layers run then.

    Borrowed layers: `parts` are the sub-layers that run (None: all; see `SubLayers`), and
    `residual_BTD` is what stands in front of the first of them instead of the embeddings of
    `ids_BT`, which then say no more than how many rows and tokens there are. A tap k is the
    residual in front of layer k, whatever ran before it.

    `added`: low-rank additions, each on some of the rows, by places that `linear_at` knows.

    `rope`: cos and signed sin of the fed tokens, [B, T, 1, E] each, in the place of what
    `position_BT` says: tokens of an image stand on several axes (models/axes.py). `deeper`: what is
    added to the residual behind layers 0, 1, ..., [B, T, D] each: further features of images."""

    ids_BT: Tensor
    position_BT: Tensor
    masks: Masks
    taps: tuple[int, ...] = ()
    logits: bool = True
    only: tuple[int, ...] | None = None
    parts: SubLayers | None = None
    residual_BTD: Tensor | None = None
    added: tuple[RowAdditions, ...] = ()
    rope: tuple[Tensor, Tensor] | None = None
    deeper: tuple[Tensor, ...] = ()

    def asked(self, rows_BTX: Tensor, first: int = 0) -> Tensor:
        """The rows whose logits are wanted; `rows_BTX` begins at fed index `first`."""
        if self.only is None:
            return rows_BTX
        at_B1 = torch.tensor(self.only, device=rows_BTX.device)[:, None] - first
        return rows_BTX[torch.arange(len(self.only), device=rows_BTX.device)[:, None], at_B1]


class Truncation(NamedTuple):
    """Which tokens of a distribution are kept: top-k (0: all), then top-p, then min-p."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ChainDraws(NamedTuple):
    """How the tokens of a sampled chain are drawn: by softmax(logits / temperature) of each row,
    cut where there are `truncations`, with noise from its seed, its round, the number of the token
    and the codes of so many choices (`RoundNoise.draft_draw_BM`); temperature 0: the best is
    taken."""

    temperatures: Sequence[float]
    truncations: Sequence[Truncation] | None
    seeds: Sequence[int]
    rounds: Sequence[int]
    codes: Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """What a chain is drafted behind: fed tokens, of row b a causal run whose token `at[b]` is the
    root. Each next token is that of the largest of the first `num_choices` logits, or with `draws`
    one that is drawn by them, of those `choice_ids` [K] (None: of choice k the id k). Tokens behind
    `last_position` stand there.

    `parts`: the sub-layers that read the root, and those that read each drafted token but the last,
    which is not read; empty: all. `residuals`: what leaves the last of them is kept."""

    ids_BT: Tensor
    position_BT: Tensor
    at: tuple[int, ...]
    num_choices: int
    choice_ids: Tensor | None
    last_position: int
    parts: tuple[SubLayers, ...] = ()
    residuals: bool = False
    draws: ChainDraws | None = None


@dataclass(frozen=True, slots=True)
class WholeChain:
    """Tokens [B, N] that were likeliest or drawn one behind another, and float32 logits: [B, N] of
    these tokens, or of all choices [B, N, K] where they were drawn from what these are to give.
    `residual_BND`: behind the last layer at the root and at the tokens that were read, if asked
    for. `distribution_BNK`: what they were drawn from, if the call has made that."""

    token_BN: Tensor
    logits: Tensor
    residual_BND: Tensor | None = None
    distribution_BNK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Frozen pieces of the target that a drafter may share; never saved with it. `lm` is the model
    itself, whose layers a drafter runs through `Feed.parts` against a cache of its own; None where
    a model does not lend them."""

    embedding_VD: Tensor
    head: Tensor | Callable[[], Tensor]  # or what makes it when a drafter wants it
    embed_scale: float = 1.0
    head_bias_V: Tensor | None = None
    lm: LanguageModel | None = None

    @property
    def head_VD(self) -> Tensor:
        return self.head if isinstance(self.head, Tensor) else self.head()

    def layers(self) -> LanguageModel:
        """The model whose layers may be run; an error where they may not."""
        if self.lm is None:
            raise IncompatibleError(
                "this target does not lend its layers",
                found="layers in another process, or behind a wrapper of their own",
                expected="a target loaded here as it was published",
                do="load the target here, or choose a drafter with weights of its own",
            )
        self.lm.check_lending()
        return self.lm

    def showing(self, layers: Sequence[int]) -> LanguageModel:
        """The model whose cache of these layers may be read; an error where it may not."""
        if self.lm is None:
            return self.layers()
        self.lm.check_showing(layers)
        return self.lm


class LanguageModel(ABC):
    """A decoder-only LM without per-request state; caches are handed in."""

    spec: ModelSpec
    module: nn.Module
    windows: tuple[int, ...] = ()  # sliding-window sizes for which `forward` needs a mask
    can_run: bool = True  # in rounds, with a cache; else whole documents are read, and no more

    @abstractmethod
    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        """One forward; what an implementation provides behind `forward` and `dense`."""

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        masks: Masks,
        kv: SlotKV,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> LmOut:
        """One forward of fed tokens against `kv`, which has been aimed with `kv.begin`."""
        return self.run(Feed(ids_BT, position_BT, masks, taps, logits), kv)

    def dense(
        self,
        ids_BS: Tensor,
        position_BS: Tensor,
        masks: Masks,
        taps: tuple[int, ...] = (),
        logits: bool = True,
        parts: SubLayers | None = None,
        residual_BSD: Tensor | None = None,
    ) -> LmOut:
        """One forward of whole sequences without a cache (training, capture, prefill oracle)."""
        feed = Feed(ids_BS, position_BS, masks, taps, logits, None, parts, residual_BSD)
        return self.run(feed, None)

    @torch.no_grad()
    def resume(self, feed: Feed, exits: ExitStates, kv: SlotKV) -> LmOut | None:
        """The forward of `feed` against the aimed `kv`, begun by drafting: the layers below
        `exits.layer` run at the tokens that drafting has not read, the others at all tokens. None
        where a whole forward is as fast, or is asked for taps below that layer."""
        layer, num_fed = exits.layer, feed.ids_BT.shape[1]
        num_read = min(exits.residual_BMD.shape[1], num_fed)
        if min(feed.taps, default=layer) < layer or feed.residual_BTD is not None:
            return None
        if self._saved(layer, len(feed.ids_BT) * num_read) < self.least_saved:
            return None
        residual_BTD = exits.residual_BMD[:, :num_read]
        if num_read < num_fed:
            ids_BT, position_BT = feed.ids_BT[:, num_read:], feed.position_BT[:, num_read:]
            masks, parts = feed.masks.behind(num_read), SubLayers.span(0, layer)
            rest = Feed(ids_BT, position_BT, masks, (layer,), False, parts=parts)
            found = self.run(rest, kv.behind(num_read)).taps[layer]
            residual_BTD = torch.cat([residual_BTD, found.to(residual_BTD.dtype)], dim=1)
        parts = SubLayers.span(layer, self.spec.num_layers)
        return self.run(replace(feed, parts=parts, residual_BTD=residual_BTD), kv)

    @property
    def least_saved(self) -> float:
        """Multiplications from which it pays to run the layers in two calls."""
        return LEAST_SAVED

    def _saved(self, layers: int, num_rows: int) -> float:
        """Multiplications that so many rows need not go through in so many layers. On other devices
        than CPUs few rows cost what one costs."""
        if self.device.type != "cpu":
            return 0.0
        spec = self.spec
        attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        weights = spec.hidden_size * (attention + 3 * spec.intermediate_size)
        return float(layers * num_rows * weights)

    def run_width(self, num_rows: int, width: int) -> int:
        """As how wide a run of so many tokens is fed best: kernels are made, and kept, for every
        shape that they meet, so that widths are multiples of 16."""
        return -(-width // WIDTH_STEP) * WIDTH_STEP

    def whole_chain(self, root: ChainRoot, length: int, kv: SlotKV) -> WholeChain | None:
        """`length` tokens behind the root in one call, against the aimed `kv`, which has room for
        all of them; None where that takes a forward each, or a draw cannot be told."""
        return None

    @abstractmethod
    def borrowed(self) -> Borrowed:
        """The embedding and LM head, detached views of the model's own storage."""

    def read_weights(self) -> object:
        """What a forward reads beside the parameters themselves, made of them: another object as
        soon as they have changed. A recording holds for one of them."""
        return None

    def for_drafting(self) -> LanguageModel:
        """The form in which it drafts: about the same logits, sooner."""
        return self

    def in_int4(self, group: int, plain_kv: bool = False) -> LanguageModel:
        """The same model with the matrices of its layers in 4 bits, in groups of so many inputs;
        with `plain_kv` it only reads caches that hold keys and values as they are."""
        raise IncompatibleError(
            f"{type(self.module).__name__} cannot be read in 4 bits",
            expected="a Llama, Mistral, Qwen2 or Qwen3 in one piece",
            do="--set drafter.options.weight_bits=16, which drafts with the weights as they are",
        )

    def check_unchanged(self) -> None:
        """Raise IncompatibleError where somebody has changed the module that this one reads, in a
        way that it would leave out."""
        return

    def check_lending(self) -> None:
        """Raise IncompatibleError where layers cannot be run apart from each other."""
        return

    def check_showing(self, layers: Sequence[int]) -> None:
        """Raise IncompatibleError where `key_value` of these layers is not what a forward caches.
        Layers may do so that cannot be run apart."""
        self.check_lending()

    def linear_at(self, layer: int, name: str) -> tuple[int, int] | None:
        """Outputs and inputs of that linear layer, where `Feed.added` may add to what it puts out;
        None where nothing may be added."""
        return None

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values [B, J, T, E] of each layer whose incoming residual [B, T, D] is given:
        what a forward with those residuals leaves in the cache. Gradients reach the residuals."""
        raise IncompatibleError(
            f"{type(self).__name__} does not lend its layers",
            expected="a target as it was published",
            do="choose a drafter with weights of its own",
        )

    def queries(self, state: Mapping[int, Tensor], position_BT: Tensor) -> dict[int, Tensor]:
        """Queries [B, H, T, E] of each layer whose incoming residual [B, T, D] is given, rotated as
        the keys of its cache are: what attends to them, after division by sqrt(E)."""
        raise IncompatibleError(
            f"what {type(self.module).__name__} attends to is not shown",
            expected="attention without a soft cap, sinks or latent keys",
            do="leave out --mix",
        )

    @torch.no_grad()
    def write_kv(self, state: Mapping[int, Tensor], position_BT: Tensor, kv: SlotKV) -> None:
        """Write `key_value` of the fed tokens into the aimed `kv`."""
        for layer, pair in self.key_value(state, position_BT).items():
            kv.update(layer, *pair)

    def read_kv(self, layer: int, kv: SlotKV) -> tuple[Tensor, Tensor]:
        """`key_value` of that layer at all positions that the aimed `kv` reads, out of it."""
        return kv.read(layer)

    def chain_masks(self, kept_len_B: Tensor, num_fed: int, span: int) -> Masks:
        """Masks of a causal run of `num_fed` tokens behind the kept positions."""
        return RunMasks(kept_len_B, num_fed, span, self.windows)

    def tree_masks(self, tree: DraftTree, kept_len_B: Tensor, span: int) -> Masks:
        """Masks of a round: root and nodes, each seeing the kept positions and its ancestors."""
        if tree.is_chain:
            return self.chain_masks(kept_len_B, tree.num_nodes + 1, span)
        ancestor_BTT = tree.ancestor_BTT()
        depth_BT = ancestor_BTT.sum(-1) - 1
        windows = {w: tree_mask(kept_len_B, ancestor_BTT, span, w, depth_BT) for w in self.windows}
        return Masks(tree_mask(kept_len_B, ancestor_BTT, span), windows)

    def document_masks(self, document_BS: Tensor) -> Masks:
        """Masks of packed whole sequences: causal inside each document."""
        windows = {w: document_mask(document_BS, w) for w in self.windows}
        return Masks(document_mask(document_BS), windows)

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        """What each layer of the cache keeps of a token."""
        heads, width = self.spec.num_kv_heads, self.spec.head_dim
        return (KVShape(heads, width, heads, width),) * self.spec.num_layers

    def kv_shape(self, layer: int) -> KVShape:
        """What `key_value` gives of a token for that layer."""
        return self.kv_layers[layer]

    @property
    def kv_bytes(self) -> int:
        """Memory of a token's keys and values."""
        return sum(shape.size for shape in self.kv_layers) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Memory of a slot beside its keys and values, whatever its length."""
        return 0

    @property
    def pending_bytes(self) -> int:
        """Memory that a fed token takes beside its keys and values, until its path is known."""
        return 0

    @property
    def token_bytes(self) -> int | None:
        """Bytes of weights that the pass for one token reads; None where that is not known."""
        return None

    @property
    def kv_devices(self) -> tuple[torch.device, ...]:
        """Where each layer's keys and values are made; empty: all on `device`."""
        return ()

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        return self.cache_of(num_slots, max_len, self.dtype)

    def cache_of(self, num_slots: int, max_len: int, dtype: torch.dtype) -> SlotKV:
        """An empty cache in that dtype."""
        layers, devices = self.kv_layers, self.kv_devices
        return SlotKV.of(layers, num_slots, max_len, dtype, self.device, devices)

    def borrowed_kv(self, attention: tuple[int, ...], num_slots: int, max_len: int) -> SlotKV:
        """A cache for a borrower: the model's own, empty but for those layers."""
        nothing = KVShape(0, 0, 0, 0)
        layers = [
            shape if layer in attention else nothing for layer, shape in enumerate(self.kv_layers)
        ]
        return SlotKV.of(layers, num_slots, max_len, self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype
