"""FastLlama: our own forward for Llama-shaped models (Llama, Mistral, Qwen2, Qwen3).

The same arithmetic as transformers' modules with a third of their operations: query, key and value
are one product, gate and up another, rotary tables are made once in float32, keys and values are
never repeated.
Letters: B rows, D hidden width, E head width, H query heads, J key/value heads, L positions, M new
nodes, O output width, Q picked rows, T fed tokens, V target vocabulary, X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.row_additions import linear_sizes
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import (
    Borrowed,
    ChainRoot,
    Feed,
    LanguageModel,
    LmOut,
    Masks,
    WholeChain,
)
from specctl.core.spec import ModelSpec
from specctl.models.compiled import PATIENCE, CompiledLM
from specctl.models.hf.as_published import GivenModel, change_of, is_about
from specctl.models.hf.hf_spec import spec_of
from specctl.models.hf.spread import is_spread
from specctl.models.hf.without_fills import without_fills
from specctl.models.kernels import (
    MaskPiece,
    Weight,
    additive_mask,
    attend,
    linear,
    mask_of_forward,
    rms_norm,
    small_kernels,
)
from specctl.models.llama.llama import LayerAdditions, LayerWeights, LlamaModel, LlamaShape, Weights
from specctl.models.native.bits import GROUP
from specctl.models.native.chain import NextToken, whole_chain
from specctl.models.native.library import no_int8
from specctl.models.native.step import MOST_ROWS, Bits, NativeStep, drafts_in_int8
from specctl.models.torch_threads import forward_threads, may_choose

__all__ = ["FastLlama", "LlamaModel", "LlamaShape", "fast_llama_from_hf"]


def _project(x: Tensor, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]) -> Tensor:
    if len(weights) == 1:
        return linear(x, weights[0], biases[0])
    parts = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(parts, dim=-1)


def _with_added(layer: LayerWeights, names: tuple[str, ...], x: Tensor, out: Tensor) -> Tensor:
    return out if layer.added is None else layer.added.onto(names, x, out)


class FastLlama(LanguageModel):
    """`LlamaModel` behind the LanguageModel interface. `bits`: the compiled step reads its
    matrices in 8 or 4 bits, or packed. `int4`: PyTorch reads these in 4 bits."""

    bits: Bits | None = None
    steps: bool = True  # in the compiled step, where there is one
    int4: Weights | None = None
    recorded: CompiledLM | None = None  # itself, drafting on a GPU
    module: LlamaModel
    given: GivenModel | None = None
    config: Any = None  # of transformers, and how it generates, where the weights came from there
    generation_config: Any = None

    def __init__(self, module: LlamaModel, spec: ModelSpec) -> None:
        self.module, self.spec = module, spec
        window = module.shape.window
        self.windows = () if window is None else (window,)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which record for themselves."""
        return {**self.__dict__, "recorded": None, "given": None}

    def check_unchanged(self) -> None:
        change = None if self.given is None else self.given.change()
        if change is not None:
            raise IncompatibleError(
                "the model was changed after it was loaded as a target",
                found=change,
                expected="the module as it was given to load_target",
                do="call specctl.load_target(model) again: transformers' forward then runs it",
            )

    @property
    def device(self) -> torch.device:
        return self.module.model.norm.weight.device

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        feed = self._filled(feed)
        may_step = self.bits is not None if kv is None else kv.is_as_read
        is_plain = feed.rope is None and not feed.deeper and not feed.added
        step = self._native(feed.ids_BT) if may_step and is_plain else None
        if step is None and may_choose(feed, kv):
            with forward_threads(feed, self.spec.num_layers):
                return self._eager(feed, kv)
        if step is None:
            return self._eager(feed, kv)
        return step.run(feed, self._whole(feed.ids_BT) if kv is None else kv)

    def _filled(self, feed: Feed) -> Feed:
        """The feed with a residual at every fed token, where it brings one at the last alone."""
        given_BMD = feed.residual_BTD
        num_fed = feed.ids_BT.shape[1]
        if given_BMD is None or given_BMD.shape[1] == num_fed:
            return feed
        weight_VD = self.module.model.embed_tokens.weight
        text_BTD = F.embedding(feed.ids_BT[:, : num_fed - given_BMD.shape[1]], weight_VD)
        return replace(feed, residual_BTD=torch.cat([text_BTD, given_BMD.to(text_BTD)], dim=1))

    def _whole(self, ids_BT: Tensor) -> SlotKV:
        """A cache for whole sequences, aimed at them."""
        B, T = ids_BT.shape
        kv, slots = self.new_kv(B, T), torch.arange(B)
        kv.begin(tuple(range(B)), slots, torch.zeros_like(slots), T, T, 0)
        return kv

    @torch.no_grad()
    def resume(self, feed: Feed, exits: ExitStates, kv: SlotKV) -> LmOut | None:
        """The compiled step does not round its residuals to bfloat16, as taps are."""
        if self.dtype != torch.float32 and self.module.native(self.bits) is not None:
            return None
        return super().resume(feed, exits, kv)

    def is_native(self, ids_BT: Tensor) -> bool:
        """Whether the compiled step reads so many tokens."""
        return self._native(ids_BT) is not None

    def run_width(self, num_rows: int, width: int) -> int:
        ids_BT = torch.empty(num_rows, width, dtype=torch.long, device=self.device)
        return width if self.is_native(ids_BT) else super().run_width(num_rows, width)

    def whole_chain(self, root: ChainRoot, length: int, kv: SlotKV) -> WholeChain | None:
        rows = self.module.head_weight.shape[0]
        step = self._native(root.ids_BT) if kv.is_as_read else None
        if step is None or root.num_choices > rows:
            return None
        return whole_chain(step, root, length, kv)

    def next_token(self, slots: tuple[int, ...], kv: SlotKV) -> NextToken | None:
        """What reads one token a row behind another in these slots of `kv`; None where that takes
        an ordinary forward each."""
        step = self._native(kv.aim.slot_B1) if kv.is_as_read else None
        return None if step is None else NextToken(step, slots, kv)

    def run_at(self, feed: Feed, kv: SlotKV, at_Q: Tensor) -> LmOut:
        """The forward at those rising flat fed indices alone [Q]; elsewhere logits and taps are
        zero, and keys and values are whatever no true token may see. In PyTorch every row is as
        wide as before in attention."""
        step = self._native(at_Q) if kv.is_as_read else None
        if step is not None:
            return step.run(self._filled(feed), kv, at_Q)
        module, shape = self.module, self.module.shape
        B, T = feed.ids_BT.shape
        weights = self._weights()
        mask = feed.masks.full if shape.window is None else feed.masks.windows[shape.window]
        x = F.embedding(feed.ids_BT.flatten()[at_Q], module.model.embed_tokens.weight)[None]
        scores = additive_mask(mask, shape.num_heads // shape.num_kv_heads, x.dtype)
        rope = module.rotary.at(feed.position_BT.flatten()[at_Q][None], mask.shape[-1], x.dtype)

        def spread(value_QX: Tensor) -> Tensor:
            out = value_QX.new_zeros(B * T, *value_QX.shape[1:])
            return out.index_copy_(0, at_Q, value_QX).view(B, T, *value_QX.shape[1:])

        found: dict[int, Tensor] = {}
        for index, layer in enumerate(weights.layers):
            if index in feed.taps:
                found[index] = spread(x[0])
            both = self._query_key_value(x, layer, rope)
            query, key, value = (spread(one[0].transpose(0, 1)).transpose(1, 2) for one in both)
            out_BHTE = attend(query, *kv.update(index, key, value), scores)
            out_QX = out_BHTE.transpose(1, 2).reshape(B * T, -1)[at_Q]
            x = self._mlp(self._joined(x, out_QX[None], layer, index), layer)
        x = rms_norm(x, module.model.norm.weight, shape.norm_eps)
        if shape.num_layers in feed.taps:
            found[shape.num_layers] = spread(x[0])
        return LmOut(spread(linear(x[0], weights.head)), found)

    @property
    def token_bytes(self) -> int | None:
        on_cpu = self.device.type == "cpu"
        return None if self.int4 is not None else self.module.token_bytes(self.bits, on_cpu)

    def _native(self, ids_BT: Tensor) -> NativeStep | None:
        """The compiled step, where it may read these tokens: on a CPU, no gradient, and of stored
        weights few of them."""
        if ids_BT.device.type != "cpu" or type(ids_BT) is not Tensor or self.int4 is not None:
            return None
        if ids_BT.numel() > MOST_ROWS and self.bits is None:
            return None
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        step = self.module.native(self.bits) if self.steps else None
        return step if step is not None and ids_BT.numel() <= step.most_rows else None

    def _eager(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        module, shape, taps, parts = self.module, self.module.shape, feed.taps, feed.parts
        added = feed.added
        learns = feed.residual_BTD is not None and feed.residual_BTD.requires_grad
        weights = self._weights(not (learns or any(each.learns for each in added)))
        if feed.residual_BTD is None:
            x = F.embedding(feed.ids_BT, module.model.embed_tokens.weight)
        else:
            x = feed.residual_BTD
        mask = feed.masks.full if shape.window is None else feed.masks.windows[shape.window]
        scores, rope = self._scores_and_rope(mask, feed.position_BT, x.dtype)
        rope = rope if feed.rope is None else feed.rope
        found: dict[int, Tensor] = {}
        for index, layer in enumerate(weights.layers):
            if index in taps:
                found[index] = x
            if added:
                layer = replace(layer, added=LayerAdditions(added, index, linear_sizes(shape)))
            if parts is None or index in parts.attention:
                x = self._attention(x, layer, index, rope, scores, kv)
            if parts is None or index in parts.mlp:
                x = self._mlp(x, layer)
            if index < len(feed.deeper):
                x = x + feed.deeper[index]
        if feed.logits or shape.num_layers in taps:
            x = rms_norm(x, module.model.norm.weight, shape.norm_eps)
            if shape.num_layers in taps:
                found[shape.num_layers] = x
        return LmOut(linear(feed.asked(x), weights.head) if feed.logits else None, found)

    def through(
        self, x: Tensor, position_BT: Tensor, mask: Tensor, kv: SlotKV | None, layers: range
    ) -> Tensor:
        """The residual [B, T, D] after those layers, which touch only their own part of `kv`."""
        weights = self._weights().layers
        scores, rope = self._scores_and_rope(mask, position_BT, x.dtype)
        for index in layers:
            x = self._attention(x, weights[index], index, rope, scores, kv)
            x = self._mlp(x, weights[index])
        return x

    def _scores_and_rope(
        self, mask: Tensor, position_BT: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | list[MaskPiece], tuple[Tensor, Tensor]]:
        shape = self.module.shape
        scores = mask_of_forward(mask, shape.num_heads // shape.num_kv_heads, dtype)
        return scores, self.module.rotary.at(position_BT, mask.shape[-1], dtype)

    def lm_head(self, x: Tensor) -> Tensor:
        """Logits of a residual: final norm and LM head."""
        module, shape = self.module, self.module.shape
        x = rms_norm(x, module.model.norm.weight, shape.norm_eps)
        return linear(x, self._weights().head)

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        index: int,
        rope: tuple[Tensor, Tensor],
        scores: Tensor | list[MaskPiece],
        kv: SlotKV | None,
    ) -> Tensor:
        if kv is not None and (own := self._stores(x, layer, kv)) is not None:
            heads = self._heads(x, layer)
            store = kv.key_ZJLE[index], kv.value_ZJLE[index]
            query = own.rotate_and_store(heads, rope, store, *kv.places(x.shape[1]))
            key, value = kv.read(index)
        else:
            query, key, value = self._query_key_value(x, layer, rope)
            if kv is not None:
                key, value = kv.update(index, key, value)
        out = attend(query, key, value, scores)
        return self._joined(x, out.transpose(1, 2).flatten(2), layer, index)

    def _joined(self, x: Tensor, out: Tensor, layer: LayerWeights, index: int) -> Tensor:
        """The residual, and what that layer's heads put out [B, T, H * head width]."""
        put_out = linear(out, layer.output, layer.output_bias)
        return x + _with_added(layer, ("o_proj",), out, put_out)

    def _stores(self, x: Tensor, layer: LayerWeights, kv: SlotKV) -> Any:
        """The kernels of CUDA that rotate and write at once; None where each is done by itself."""
        own = small_kernels(x)
        if own is None or layer.qk_norm_HE is not None:
            return None
        width = self.module.shape.head_dim
        is_plain = type(kv).update is SlotKV.update and kv.key_ZJLE[0].dtype == x.dtype
        return own if width & (width - 1) == 0 and is_plain else None

    def _heads(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """[B, T, X, E]: queries, keys and values, not rotated."""
        shape = self.module.shape
        flat = rms_norm(x, layer.attention_norm, shape.norm_eps)
        both = _project(flat, layer.qkv, layer.qkv_bias)
        both = _with_added(layer, ("q_proj", "k_proj", "v_proj"), flat, both)
        return both.view(*x.shape[:2], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)

    def _query_key_value(
        self, x: Tensor, layer: LayerWeights, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, T, E] each (keys and values of fewer heads), rotated."""
        shape = self.module.shape
        H, K = shape.num_heads, shape.num_kv_heads
        heads = self._heads(x, layer)
        both, value = heads[:, :, : H + K], heads[:, :, H + K :].transpose(1, 2)
        if layer.qk_norm_HE is not None:
            eps = shape.qk_norm_eps or shape.norm_eps
            both = rms_norm(both, None, eps) * layer.qk_norm_HE
        cos, sin = rope
        both = torch.addcmul(both * cos, both.roll(shape.head_dim // 2, -1), sin).transpose(1, 2)
        return both[:, :H], both[:, H:], value

    def key_value(
        self, state: Mapping[int, Tensor], position_BT: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        is_fused = not any(x.requires_grad for x in state.values())
        if self.bits is not None and is_fused:
            kv = self._whole(position_BT)
            self.write_kv(state, position_BT, kv)
            return {index: kv.read(index) for index in state}
        layers, found = self._weights(is_fused).layers, {}
        for index, x in state.items():
            rope = self.module.rotary.of(position_BT, x.dtype)
            _, key, value = self._query_key_value(x, layers[index], rope)
            found[index] = (key, value)
        return found

    def queries(self, state: Mapping[int, Tensor], position_BT: Tensor) -> dict[int, Tensor]:
        found = {}
        for index, x in state.items():
            rope = self.module.rotary.of(position_BT, x.dtype)
            found[index] = self._query_key_value(x, self.module.widened_layer(index), rope)[0]
        return found

    @torch.no_grad()
    def write_kv(self, state: Mapping[int, Tensor], position_BT: Tensor, kv: SlotKV) -> None:
        """As every forward; in few bits by the compiled step, which attends for nothing."""
        if self.bits is None:
            super().write_kv(state, position_BT, kv)
            return
        T, ids_BT = position_BT.shape[1], torch.zeros_like(position_BT)
        sees = torch.ones(1, 1, T, kv.aim.span, dtype=torch.bool)
        masks = Masks(sees, dict.fromkeys(self.windows, sees))
        for layer, x in state.items():
            parts = SubLayers((layer,), ())
            feed = Feed(ids_BT, position_BT, masks, logits=False, parts=parts, residual_BTD=x)
            self.run(feed, kv)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        neurons = self._neurons(x, layer)
        return x + _with_added(layer, ("down_proj",), neurons, linear(neurons, layer.down))

    def _neurons(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """[B, T, O]: what the neurons of the MLP put out."""
        shape = self.module.shape
        flat = rms_norm(x, layer.mlp_norm, shape.norm_eps)
        both = _project(flat, layer.gate_up, (None,) * len(layer.gate_up))
        both = _with_added(layer, ("gate_proj", "up_proj"), flat, both)
        if (own := small_kernels(both)) is not None:
            found: Tensor = own.silu_mul(both)
            return found
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def read_weights(self) -> object:
        return self._weights()

    def for_drafting(self) -> LanguageModel:
        if self.device.type == "cuda":
            if self.recorded is None:
                self.recorded = CompiledLM(self, patience=PATIENCE)
            return self.recorded
        stack = self.module.stack() if self.bits is None else None
        return self if stack is None or not drafts_in_int8(stack) else self.in_bits(8)

    def in_int4(self, group: int, plain_kv: bool = False) -> Self:
        """By the compiled step where it may read all of it, its LM head in 8 bits then."""
        if plain_kv and group == GROUP and no_int8() is None and self.module.native(4) is not None:
            return self.in_bits(4)
        lm = copy(self)
        lm.int4 = self.module.in_int4(group)
        return lm

    def _weights(self, is_fused: bool = True) -> Weights:
        return self.module.weights(is_fused) if self.int4 is None else self.int4

    def in_bits(self, bits: Bits) -> Self:
        """The same model, its matrices read in 8 or 4 bits, or "packed" (`keep_packed`)."""
        lm = copy(self)
        lm.bits = bits
        return lm

    def linear_at(self, layer: int, name: str) -> tuple[int, int] | None:
        """None in few bits, which the compiled step alone reads."""
        own: Any = self.module.model.layers[layer]
        part = getattr(own.self_attn, name, None) or getattr(own.mlp, name, None)
        if not isinstance(part, nn.Linear) or self.bits is not None:
            return None
        return part.out_features, part.in_features

    def borrowed(self) -> Borrowed:
        embedding_VD = self.module.model.embed_tokens.weight.detach()
        return Borrowed(embedding_VD, self.module.lent_head(), lm=self)


STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_CLASSES: Mapping[str, bool] = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
}


def fast_llama_from_hf(model: Any, eos_ids: tuple[int, ...] = ()) -> FastLlama | None:
    """A LeanLM over the very parameters of a transformers model; None if it has anything that the
    lean forward does not do (other architecture, mixed layers, quantised or spread weights, hooks
    or whatever else was changed by hand)."""
    if type(model).__name__ not in _CLASSES or not _is_plain(model):
        return None
    spec = spec_of(model.config, eos_ids)
    theirs = model.model.rotary_emb
    rotary = type(theirs)(config=model.config)  # afresh: casts may have rounded it
    inv_freq = rotary.inv_freq.detach().float()
    if 2 * inv_freq.numel() != spec.head_dim or not is_about(theirs.inv_freq, inv_freq):
        return None
    if theirs.attention_scaling != rotary.attention_scaling:
        return None
    with without_fills():
        module = LlamaModel(_shape_of(model, spec), inv_freq, float(rotary.attention_scaling))
    weights = dict(model.named_parameters())
    for name, _ in list(module.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        setattr(module.get_submodule(owner), leaf, weights[name])
    lm = FastLlama(module.eval(), spec)
    lm.config, lm.generation_config = model.config, getattr(model, "generation_config", None)
    lm.given = GivenModel(model)
    return lm


def _shape_of(model: Any, spec: ModelSpec) -> LlamaShape:
    attention = model.model.layers[0].self_attn
    return LlamaShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        tied=model.lm_head.weight is model.model.embed_tokens.weight,
        qk_norm=_CLASSES[type(model).__name__],
        attention_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        window=_window(model.config),
    )


def _window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    if "full_attention" in (getattr(config, "layer_types", None) or ()):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _is_plain(model: Any) -> bool:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    linears = [m for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))]
    return (
        getattr(config, "hidden_act", "") == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") in STATIC_ROPE
        and len(kinds) <= 1
        and getattr(config, "quantization_config", None) is None
        and all(type(m) is nn.Linear for m in linears)
        and model.model.layers[0].mlp.gate_proj.bias is None
        and len({p.device for p in model.parameters()}) == 1
        and not is_spread(model)
        and change_of(model) is None
    )
