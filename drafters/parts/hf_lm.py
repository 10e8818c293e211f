"""HfLM: any transformers causal LM with full or sliding attention behind `LanguageModel`.

transformers' module does the arithmetic. Ours are the cache (keys and values go to `SlotKV`), the
masks (4-D bool, passed through by transformers as they are) and the attention kernel, which folds a
group of query heads into the query axis instead of repeating keys and values.
Letters: B rows, T fed tokens, L key positions, H heads, G query heads per key/value head, D width,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from specctl.drafters.parts.base import Borrowed
from specctl.drafters.parts.kernels import attend
from specctl.drafters.parts.lm import LanguageModel, LmOut, Masks
from specctl.drafters.parts.slots import SlotKV
from specctl.drafters.parts.spec import ModelSpec
from specctl.recipes.errors import IncompatibleError

ATTENTION = "specctl"
KINDS = ("full_attention", "sliding_attention")


def attend_capped(
    query_BHTD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """`attend` written out, for scores with a soft cap (Gemma 2) or attention sinks (gpt-oss)."""
    B, H, T, D = query_BHTD.shape
    heads = key_BHLD.shape[1]
    folded = query_BHTD.reshape(B, heads, -1, D)
    score = (folded @ key_BHLD.transpose(2, 3)).float() * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.view(B, H, T, -1).masked_fill(~mask, -torch.inf)
    if sink_H is not None:
        sink = sink_H.float().view(1, H, 1, 1).expand(B, H, T, 1)
        score = torch.cat([score, sink], dim=-1)
    prob = score.softmax(-1)[..., : key_BHLD.shape[2]].to(value_BHLD.dtype)
    out = prob.view(B, heads, -1, key_BHLD.shape[2]) @ value_BHLD
    return out.view(B, H, T, -1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The kernel transformers calls for the attention implementation named `ATTENTION`."""
    assert dropout == 0.0 or not module.training, "attention dropout is not supported"
    if kwargs.get("position_bias") is not None:
        raise IncompatibleError(
            f"{type(module).__name__} adds a position bias to its attention scores",
            expected="rotary or learned positions",
            do="choose a target with rotary positions",
        )
    softcap, sink_H = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sink_H is None:
        group = query.shape[1] // key.shape[1]
        mask = attention_mask if query.shape[2] == 1 else attention_mask.repeat(1, 1, group, 1)
        out = attend(query, key, value, mask, scaling)
    else:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend_capped(query, key, value, attention_mask, scale, softcap, sink_H)
    return out.transpose(1, 2), None


def _explicit_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' bool mask, written out even where sdpa could do without one."""
    mask: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _explicit_mask)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of `_SlotCache`."""

    def __init__(self, kv: SlotKV, layer: int, length: int, span: int) -> None:
        super().__init__()
        self.kv, self.layer, self.length, self.span = kv, layer, length, span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        want = (self.kv.key_SHLD[self.layer].shape[1], self.kv.key_SHLD[self.layer].shape[3])
        for states in (key_states, value_states):
            if (states.shape[1], states.shape[3]) != want:
                raise IncompatibleError(
                    "this target's layers do not share one key/value shape",
                    found=f"{states.shape[1]} heads of width {states.shape[3]} in {self.layer}",
                    expected=f"{want[0]} heads of width {want[1]} in every layer",
                    do="choose a target whose attention layers are alike",
                )
        return self.kv.update(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.kv.max_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class _SlotCache(Cache):  # type: ignore[misc]
    """transformers' cache interface over an aimed `SlotKV`; lives for one forward."""

    def __init__(self, kv: SlotKV, num_fed: int, span: int) -> None:
        super().__init__(
            layers=[_SlotLayer(kv, i, span - num_fed, span) for i in range(kv.num_layers)]
        )


def spec_of(config: Any, eos_ids: tuple[int, ...] = ()) -> ModelSpec:
    """The shape of a transformers configuration (of its text part, if it has several)."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return ModelSpec(
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=intermediate if isinstance(intermediate, int) else max(intermediate),
        norm_eps=float(
            _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5)
        ),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        max_positions=int(_first(text, ("max_position_embeddings",), 1 << 20)),
        bos_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
        eos_ids=eos_ids,
        pad_id=text.pad_token_id if isinstance(text.pad_token_id, int) else None,
        embed_scale=_embed_scale(text),
    )


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def _embed_scale(text: Any) -> float:
    """Factor between the embedding table and hidden_states[0]."""
    if text.model_type.startswith(("gemma", "t5gemma")):
        return float(text.hidden_size**0.5)
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def refuse_stateful(model_class: type, config: Any) -> None:
    """Raise for architectures whose state cannot be rolled back to an accepted path."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - set(KINDS)
    found = ""
    if getattr(model_class, "_is_stateful", False):
        found = f"{model_class.__name__} keeps a recurrent state"
    elif kinds:
        found = f"{model_class.__name__} has layers of kind " + ", ".join(sorted(kinds))
    elif getattr(config, "is_encoder_decoder", False):
        found = f"{model_class.__name__} is an encoder-decoder"
    elif getattr(text, "use_bidirectional_attention", None):
        found = f"{model_class.__name__} attends in both directions"
    if found:
        raise IncompatibleError(
            f"{model_class.__name__} cannot be a target",
            found=found,
            expected="a decoder of full or sliding attention, whose cache can be rolled back",
            do="choose a pure attention target, e.g. a Llama, Qwen3, Mistral, Gemma or GPT-NeoX",
        )


class HfLM(LanguageModel):
    """A transformers causal LM; also the oracle of the lean forward."""

    module: Any

    def __init__(self, model: Any, eos_ids: tuple[int, ...] = ()) -> None:
        refuse_stateful(type(model), model.config)
        self.module = model
        self.spec = spec_of(model.config, eos_ids)
        text = model.config.get_text_config()
        kinds = tuple(getattr(text, "layer_types", None) or ())
        window = getattr(text, "sliding_window", None)
        if window is not None and kinds and "sliding_attention" not in kinds:
            window = None
        if getattr(text, "use_sliding_window", True) is False:
            window = None
        self.windows = () if window is None else (int(window),)
        self._is_mixed = len(set(kinds)) > 1 and window is not None
        self._implementation = _choose_attention(model)

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
        cache = _SlotCache(kv, ids_BT.shape[1], masks.full.shape[-1])
        return self._run(ids_BT, position_BT, masks, cache, taps, logits)

    def dense(
        self,
        ids_BS: Tensor,
        position_BS: Tensor,
        masks: Masks,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> LmOut:
        return self._run(ids_BS, position_BS, masks, None, taps, logits)

    def _run(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        masks: Masks,
        cache: Cache | None,
        taps: tuple[int, ...],
        logits: bool,
    ) -> LmOut:
        model = self.module if logits else self.module.base_model
        out = model(
            input_ids=ids_BT,
            attention_mask=self._mask(masks),
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=bool(taps),
        )
        tap = {k: out.hidden_states[k] for k in taps}
        return LmOut(out.logits if logits else None, tap)

    def borrowed(self) -> Borrowed:
        head: Any = self.module.get_output_embeddings()
        embedding: Any = self.module.get_input_embeddings()
        bias = getattr(head, "bias", None)
        return Borrowed(
            embedding.weight.detach(),
            head.weight.detach(),
            self.spec.embed_scale,
            None if bias is None else bias.detach(),
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
