"""HfLM: any transformers causal LM with full or sliding attention behind `LanguageModel`.

transformers' module does the arithmetic. Ours are the cache (keys and values go to `SlotKV`), the
masks (4-D bool, passed through by transformers as they are) and the attention kernel, which folds a
group of query heads into the query axis instead of repeating keys and values.
Letters: B rows, D hidden width, E head width, H query heads, J key/value heads, L positions, T fed
tokens, V target vocabulary, Z slots.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks
from specctl.models.hf_spec import head_scale, refuse_stateful, spec_of
from specctl.models.kernels import attend

ATTENTION = "specctl"
TESTED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "phi")


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
        want = (self.kv.key_ZJLE[self.layer].shape[1], self.kv.key_ZJLE[self.layer].shape[3])
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
        self._can_skip = "logits_to_keep" in signature(type(model).forward).parameters
        if self.spec.model_type not in TESTED and not self.embedding.is_meta:
            self._probe()

    @property
    def embedding(self) -> Tensor:
        """The embedding table [V, D]."""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    @torch.no_grad()
    def _probe(self) -> None:
        """Try four tokens of a tree against their paths on an architecture without a test of its
        own, and learn its key/value shape; refuse it if positions or masks are not obeyed."""
        name, problem = type(self.module).__name__, ""
        ids_BT = torch.tensor([[0, 1, 2, 3]], device=self.embedding.device)
        try:
            plain = self.module(input_ids=ids_BT[:, [0, 1, 3]], use_cache=True)
            heads, width = (plain.past_key_values.layers[0].keys.shape[i] for i in (1, 3))
            self.spec = replace(self.spec, num_kv_heads=heads, head_dim=width)
            mask = torch.ones(4, 4, dtype=torch.bool, device=ids_BT.device).tril()
            mask[3, 2] = False  # token 3 is a sibling of token 2
            masks = Masks(mask[None, None], dict.fromkeys(self.windows, mask[None, None]))
            position_BT = torch.tensor([[0, 1, 2, 2]], device=ids_BT.device)
            found = self.dense(ids_BT, position_BT, masks).logits_BTV
            assert found is not None
            oracle = plain.logits[:, -1]
            error = (found[:, -1] - oracle).abs().max() / oracle.abs().max().clamp(min=1e-6)
            if not float(error) < 0.05:
                problem = f"a tree differs from its paths by {float(error):.0%} of a logit"
        except IncompatibleError:
            raise
        except Exception as error:  # whatever a foreign forward raises means the same
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        if problem:
            raise IncompatibleError(
                f"{name} cannot be a target",
                found=problem,
                expected="a decoder that obeys 4-D masks and given positions",
                do="choose a target with rotary or learned positions, e.g. a Llama or Qwen3",
            )

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
        model = self.module if feed.logits else self.module.base_model
        num_fed, span = feed.ids_BT.shape[1], feed.masks.full.shape[-1]
        first = min(feed.only) if feed.only is not None and feed.logits and self._can_skip else 0
        some = {"logits_to_keep": num_fed - first} if first else {}
        out = model(
            input_ids=feed.ids_BT,
            attention_mask=self._mask(feed.masks),
            position_ids=feed.position_BT,
            past_key_values=None if kv is None else _SlotCache(kv, num_fed, span),
            use_cache=kv is not None,
            output_hidden_states=bool(feed.taps),
            **some,
        )
        taps = {tap: out.hidden_states[tap] for tap in feed.taps}
        return LmOut(feed.asked(out.logits, first) if feed.logits else None, taps)

    def borrowed(self) -> Borrowed:
        head: Any = self.module.get_output_embeddings()
        bias = getattr(head, "bias", None)
        scale, head_VD = head_scale(self.module.config), head.weight.detach()
        return Borrowed(
            self.embedding.detach(),
            head_VD if scale == 1.0 else head_VD * scale,
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
