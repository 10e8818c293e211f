"""HfLM: any transformers causal LM with full or sliding attention behind `LanguageModel`.

transformers' module does the arithmetic. Ours are the cache (keys and values go to `SlotKV`), the
masks (4-D bool, passed through by transformers as they are) and the attention kernel, which folds a
group of query heads into the query axis instead of repeating keys and values.
Letters: B rows, D hidden width, E head width, H query heads, J key/value heads, L positions, T fed
tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from specctl.core import language_model
from specctl.core.errors import IncompatibleError
from specctl.core.forward.only_shapes import has_only_shapes
from specctl.core.forward.slot_state import StateShape
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks
from specctl.models.hf.as_published import is_head_changed, own_attention
from specctl.models.hf.few_rows import few_row_products
from specctl.models.hf.hf_parts import DecoderParts, check_parts, refused
from specctl.models.hf.hf_probe import ask_plainly, check_rounds, narrowed
from specctl.models.hf.hf_spec import (
    PLAIN_HEADS,
    field_of,
    head_scale,
    refuse_stateful,
    spec_of,
)
from specctl.models.hf.latent import heads_at_hand, install, running
from specctl.models.hf.spread import is_parallel, is_spread, layer_devices, whole_weight
from specctl.models.kernels import attend
from specctl.models.torch_threads import forward_threads, may_choose

ATTENTION = "specctl"
_QUERIES: ContextVar[dict[int, Tensor] | None] = ContextVar("_QUERIES", default=None)  # by layer
EXPANDS = "slower rounds, of the same answers: keys and values are expanded in the latent attention"


def attend_capped(
    query_BHTE: Tensor,
    key_BJLE: Tensor,
    value_BJLE: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """`attend` written out, for scores with a soft cap (Gemma 2) or attention sinks (gpt-oss)."""
    B, H, T, E = query_BHTE.shape
    heads = key_BJLE.shape[1]
    folded = query_BHTE.reshape(B, heads, -1, E)
    score = (folded @ key_BJLE.transpose(2, 3)).float() * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.view(B, H, T, -1).masked_fill(~mask, -torch.inf)
    if sink_H is not None:
        sink = sink_H.float().view(1, H, 1, 1).expand(B, H, T, 1)
        score = torch.cat([score, sink], dim=-1)
    prob = score.softmax(-1)[..., : key_BJLE.shape[2]].to(value_BJLE.dtype)
    out = prob.view(B, heads, -1, key_BJLE.shape[2]) @ value_BJLE
    return out.view(B, H, T, -1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The kernel transformers calls for the attention implementation named `ATTENTION`. Some of its
    releases give no mask where every token sees all before it."""
    assert dropout == 0.0 or not module.training, "attention dropout is not supported"
    if kwargs.get("position_bias") is not None:
        raise IncompatibleError(
            f"{type(module).__name__} adds a position bias to its attention scores",
            expected="rotary or learned positions",
            do="choose a target with rotary positions",
        )
    if attention_mask is None:
        T, S = query.shape[2], key.shape[2]
        attention_mask = query.new_ones(1, 1, T, S, dtype=torch.bool).tril(S - T)
    if attention_mask.shape[1] != 1:
        raise IncompatibleError(
            f"{type(module).__name__} masks each head by itself",
            expected="one mask for all heads",
            do="choose a target with plain attention, e.g. a Llama or Qwen3",
        )
    softcap, sink_H = kwargs.get("softcap"), kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = heads_at_hand(module)
    if heads is not None:
        query = heads.queries(query)
    if (shown := _QUERIES.get()) is not None and softcap is None and sink_H is None:
        layer: Any = module.layer_idx
        shown[layer] = query * (scale * query.shape[-1] ** 0.5)
    if softcap is None and sink_H is None:
        out = attend(query, key, value, attention_mask, scale)
    else:
        out = attend_capped(query, key, value, attention_mask, scale, softcap, sink_H)
    if heads is not None:
        out = heads.values(out)
    return out.transpose(1, 2).contiguous(), None


def _explicit_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' bool mask, written out even where sdpa could do without one."""
    mask: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _explicit_mask)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of `_SlotCache`."""

    def __init__(self, kv: SlotKV, layer: int, length: int, span: int) -> None:
        super().__init__()
        self.kv, self.layer, self.length, self.span = kv, layer, length, span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.kv.update(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.kv.max_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class _HeldLayer(SlotLayer):
    """One layer of `_HeldCache`."""

    def __init__(self, found: dict[int, tuple[Tensor, Tensor]], layer: int, length: int) -> None:
        CacheLayerMixin.__init__(self)
        self.found, self.layer, self.length, self.span = found, layer, 0, length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.found[self.layer] = (key_states, value_states)
        return key_states, value_states

    def get_max_length(self) -> int:
        return self.span

    get_max_cache_shape = get_max_length


class _HeldCache(Cache):  # type: ignore[misc]
    """What a forward would leave in an empty cache, by layer; lives for one forward."""

    def __init__(self, num_layers: int, num_fed: int) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        super().__init__(layers=[_HeldLayer(self.found, i, num_fed) for i in range(num_layers)])


class _SlotCache(Cache):  # type: ignore[misc]
    """transformers' cache interface over an aimed `SlotKV`; lives for one forward."""

    def __init__(self, kv: SlotKV, num_fed: int, span: int) -> None:
        super().__init__(
            layers=[SlotLayer(kv, i, span - num_fed, span) for i in range(kv.num_layers)]
        )


class HfLM(LanguageModel):
    """A transformers causal LM; also the oracle of the lean forward. `kv_layers`: what its cache
    keeps, where the module has been tried before."""

    module: Any
    may_hold_states: ClassVar[bool] = False
    states: tuple[StateShape, ...] = ()  # of each layer; empty where none holds any

    def __init__(
        self, model: Any, eos_ids: tuple[int, ...] = (), kv_layers: tuple[KVShape, ...] = ()
    ) -> None:
        if not kv_layers:
            refuse_stateful(type(model), model.config, may_hold=self.may_hold_states)
        if (kernel := own_attention(model)) is not None:
            raise IncompatibleError(
                f"{type(model).__name__} attends by an implementation of somebody's own",
                found=f"attention implementation {kernel!r}",
                expected="one of transformers: rounds need masks of trees, which ours obeys",
                do='model.set_attn_implementation("sdpa"), or put what it adds into a hook',
            )
        self.module = model
        self.spec = spec_of(model.config, eos_ids)
        there = getattr(model.base_model, "layers", None)
        if isinstance(there, nn.ModuleList) and len(there) < self.spec.num_layers:
            self.spec = replace(self.spec, num_layers=len(there))  # some were taken out by hand
        text = model.config.get_text_config()
        kinds = tuple(field_of(text, "layer_types") or ())
        window = field_of(text, "sliding_window")
        if window is not None and kinds and "sliding_attention" not in kinds:
            window = None
        if field_of(text, "use_sliding_window") is False:
            window = None
        if window is not None and window >= self.spec.max_positions:
            window = None
        self.windows = () if window is None else (int(window),)
        self._is_mixed = len(set(kinds)) > 1 and window is not None
        self._can_skip = "logits_to_keep" in signature(type(model).forward).parameters
        self._layers = kv_layers
        self._devices = layer_devices(model, self.spec.num_layers)
        self._decoder: DecoderParts | None = None
        self._lends = False
        self._shown: set[tuple[int, ...]] = set()  # layers whose `key_value` has been tried
        self._absorbs = False  # latents are read as they are: only where that has been tried
        if kv_layers or self.embedding.is_meta or has_only_shapes():
            self._implementation = _choose_attention(model)
        else:
            self._try(model)

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, D]."""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are the last state times the head, and nothing more: of what would run
        through our own forward, were it in one piece."""
        known = type(self.module).__name__ in PLAIN_HEADS and is_spread(self.module)
        return known and not is_head_changed(self.module)

    def _try(self, model: Any) -> None:
        """Learn the shapes of the cache, and refuse the module if rounds are not what it says."""
        given = self.windows
        plain = ask_plainly(model, given)
        self._implementation = _choose_attention(model)
        self._layers, self.states = plain.layers, plain.states
        first = plain.layers[0]
        is_alike = set(plain.layers) == {first} and first.key_width == first.value_width > 0
        if is_alike and not is_parallel(model):  # there a process keeps its own heads only
            self.spec = replace(self.spec, num_kv_heads=first.key_heads, head_dim=first.key_width)
        with narrowed(model, given) as windows:
            self.windows = windows
            self._absorbs = install(model) and self._implementation == ATTENTION
            try:
                check_rounds(self, plain)
            except IncompatibleError:
                if not self._absorbs:
                    raise
                self._absorbs = False
                check_rounds(self, plain)
                warn(f"{EXPANDS} of {type(model).__name__}", stacklevel=2)
        self.windows = given

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self._layers or super().kv_layers

    @property
    def kv_devices(self) -> tuple[torch.device, ...]:
        return self._devices

    def _mask(self, masks: Masks) -> Any:
        full = self._form(masks.full)
        if not self.windows:
            return full
        sliding = self._form(masks.windows[self.windows[0]])
        if self._is_mixed:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def _form(self, mask: Tensor) -> Tensor:
        if self._implementation != "eager":
            return mask
        low = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(~mask, low)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        if not may_choose(feed, kv):
            return self._run(feed, kv)
        with forward_threads(feed, self.spec.num_layers):
            return self._run(feed, kv)

    def _run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        model = self.module if feed.logits else self.module.base_model
        first = min(feed.only) if feed.only is not None and feed.logits and self._can_skip else 0
        some = {"logits_to_keep": feed.ids_BT.shape[1] - first} if first else {}
        given = None if feed.residual_BTD is None else {0: feed.residual_BTD}
        is_whole = feed.parts is None and given is None
        with (
            few_row_products(feed, kv),
            running(feed.ids_BT.shape[1]) if self._absorbs and kv is not None else nullcontext(),
            nullcontext() if is_whole else self._parts().only(feed.parts, given),
            self._parts().adding(feed.added) if feed.added else nullcontext(),
        ):
            out = model(
                input_ids=feed.ids_BT,
                use_cache=kv is not None,
                output_hidden_states=bool(feed.taps),
                **self._context(feed, kv),
                **some,
            )
        taps = self._taps(out, feed) if feed.taps else {}
        return LmOut(feed.asked(out.logits, first) if feed.logits else None, taps)

    def _context(self, feed: Feed, kv: SlotKV | None) -> dict[str, Any]:
        """What the module is to see beside the tokens: masks, positions and the cache."""
        num_fed, span = feed.ids_BT.shape[1], feed.masks.full.shape[-1]
        return {
            "attention_mask": self._mask(feed.masks),
            "position_ids": feed.position_BT,
            "past_key_values": None if kv is None else _SlotCache(kv, num_fed, span),
        }

    @property
    def least_saved(self) -> float:
        """What is left out of a layer costs little, not nothing, in either call."""
        return language_model.LEAST_SAVED * self.spec.num_layers / 2

    # -- borrowed layers ------------------------------------------------------------------------

    def _parts(self) -> DecoderParts:
        """The module's layers, looked for once."""
        if self._decoder is None:
            self._decoder = DecoderParts.of(self.module, self.spec.num_layers)
        return self._decoder

    def linear_at(self, layer: int, name: str) -> tuple[int, int] | None:
        """None also of a module that stands in several layers: what is added in one of them would
        be added in all."""
        parts = self._parts()
        part = parts.linear(layer, name)
        layers = range(self.spec.num_layers)
        if part is None or sum(parts.linear(i, name) is part for i in layers) > 1:
            return None
        return part.out_features, part.in_features

    def check_lending(self) -> None:
        if self._lends:
            return
        if is_spread(self.module):
            raise refused(self.module, "weights spread over devices, processes or files")
        if any(shape.size == 0 for shape in self.kv_layers):
            raise refused(self.module, "layers that read another layer's cache")

        def run(parts: SubLayers, state_1TD: Tensor) -> Tensor:
            ids_1T = torch.zeros(state_1TD.shape[:2], dtype=torch.long, device=state_1TD.device)
            masks = self.document_masks(ids_1T)
            position_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device)[None]
            last = self.spec.num_layers - 1
            feed = Feed(ids_1T, position_1T, masks, (last,), False, None, parts, state_1TD)
            return self.run(feed, None).taps[last]

        with torch.no_grad():
            check_parts(self.module, run, self.spec.hidden_size)
        self._lends = True

    @torch.no_grad()
    def check_showing(self, layers: Sequence[int]) -> None:
        """Tried on five tokens: layers that scale their residual, or add more than an attention
        and an MLP to it (Gemma 4), are not lent, and show what they cache all the same."""
        shapes = self.kv_layers  # too few of a model that is planned with, and never tried
        keeps_none = any(shapes[layer].size == 0 for layer in layers if layer < len(shapes))
        if self.states or is_spread(self.module) or keeps_none:
            self.check_lending()
        if tuple(layers) in self._shown:
            return
        ids_1T = torch.arange(5, device=self.device)[None] % self.spec.vocab_size
        position_1T, masks = (
            torch.arange(5, device=self.device)[None],
            self.document_masks(ids_1T * 0),
        )
        cached = self._cached(ids_1T, position_1T, masks)
        taps = self.dense(ids_1T, position_1T, masks, tuple(layers), logits=False).taps
        try:  # layers of another build are foreign code, as in check_parts
            shown = self.key_value({layer: taps[layer] for layer in layers}, position_1T)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise refused(self.module, f"{type(error).__name__}: {error}"[:200]) from error
        for layer in layers:
            for mine, theirs in zip(shown[layer], cached[layer], strict=True):
                if not torch.allclose(mine.float(), theirs.float(), rtol=1e-2, atol=1e-3):
                    raise refused(self.module, f"layer {layer} caches more than its input says")
        self._shown.add(tuple(layers))

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        B, T = position_BT.shape
        everything = torch.ones(B, 1, T, T, dtype=torch.bool, device=self.device)
        masks = Masks(everything, dict.fromkeys(self.windows, everything))
        with self._parts().only(SubLayers(tuple(state), ()), state):
            found = self._cached(torch.zeros_like(position_BT), position_BT, masks)
        return {layer: found[layer] for layer in state}

    def queries(self, state: Mapping[int, Tensor], position_BT: Tensor) -> dict[int, Tensor]:
        self.check_showing(tuple(state))
        shown = dict[int, Tensor]()
        held = _QUERIES.set(shown)
        try:
            self.key_value(state, position_BT)
        finally:
            _QUERIES.reset(held)
        widths = {layer: query.shape[-1] for layer, query in shown.items()}
        if any(widths.get(layer) != self.kv_layers[layer].key_width for layer in state):
            return super().queries(state, position_BT)  # another kernel, or keys are latents
        return {layer: shown[layer] for layer in state}

    def _cached(
        self, ids_BT: Tensor, position_BT: Tensor, masks: Masks
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """What a forward leaves in an empty cache, by layer."""
        cache = _HeldCache(self.spec.num_layers, ids_BT.shape[1])
        self.module.base_model(
            input_ids=ids_BT,
            attention_mask=self._mask(masks),
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
        )
        return cache.found

    def _taps(self, out: Any, feed: Feed) -> dict[int, Tensor]:
        states, want = out.hidden_states, (*feed.ids_BT.shape, self.spec.hidden_size)
        if states is None or len(states) != self.spec.num_layers + 1:
            found = f"{0 if states is None else len(states):,} hidden states"
            raise self._unreadable(found, f"{self.spec.num_layers + 1:,}")
        for tap in feed.taps:
            if states[tap].shape != want:
                found = f"hidden state {tap} of shape {list(states[tap].shape)}"
                raise self._unreadable(found, f"shape {list(want)}")
        return {tap: states[tap].to(feed.ids_BT.device) for tap in feed.taps}

    def _unreadable(self, found: str, expected: str) -> IncompatibleError:
        return IncompatibleError(
            f"no drafter can read the hidden states of {type(self.module).__name__}",
            found=found,
            expected=f"{expected}, one vector a token as wide as the model",
            do="choose a family that reads none, e.g. prompt-lookup or small-lm",
        )

    def borrowed(self) -> Borrowed:
        head: Any = self.module.get_output_embeddings()
        width = self.spec.hidden_size
        if head is None or not head.weight.shape[1] == self.embedding.shape[1] == width:
            raise self._unreadable(
                f"an embedding of width {self.embedding.shape[1]:,} and "
                + ("no head" if head is None else f"a head of width {head.weight.shape[1]:,}"),
                f"both {width:,} wide",
            )
        bias = getattr(head, "bias", None)
        scale, head_VD, embedding_VD = head_scale(self.module.config), head.weight, self.embedding
        if is_parallel(self.module):  # its own, since a drafter asks for rows of its own
            named = {id(p): name for name, p in self.module.named_parameters()}
            embedding_VD = whole_weight(self.module, named[id(embedding_VD)])
            head_VD = whole_weight(self.module, named[id(head_VD)])
        head_VD = head_VD.detach()
        return Borrowed(
            embedding_VD.detach(),
            head_VD if scale == 1.0 else head_VD * scale,
            self.spec.embed_scale,
            None if bias is None else bias.detach(),
            self,
        )


def _choose_attention(model: Any) -> str:
    """Our kernel where the architecture takes one, else sdpa, else eager; returns the choice."""
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(ATTENTION)
    elif getattr(model, "_supports_sdpa", False):
        model.set_attn_implementation("sdpa")
    else:
        model.set_attn_implementation("eager")
    return str(model.config._attn_implementation)
