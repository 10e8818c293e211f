"""LlamaModel: the parameters of a Llama-shaped model and the forms in which a forward reads them.

Parameter names are those of a transformers Llama folder, and the parameters may be shared with a
transformers model.
Letters: B rows, E head width, H query heads, T fed tokens, X any axes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from specctl.core.forward.row_additions import RowAdditions
from specctl.models.kernels import Weight, can_pack, pack
from specctl.models.native.packed import PackedWeights
from specctl.models.native.step import Bits, NativeStep, Stack, native_step, packed_step
from specctl.models.weights.int4 import in_int4
from specctl.models.weights.released import Released

PACK_SHARE = 0.25  # of the host's memory that copies of the weights may take


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes and switches of a Llama-shaped model. `window` is the sliding window of every layer,
    `out_size` the rows of a trimmed output head (None = the whole vocabulary)."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None
    out_size: int | None = None

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert self.out_size is None or not self.tied, "a trimmed head cannot be tied"


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.num_heads * shape.head_dim
        kv = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, inner, bias=shape.attention_bias)
        self.k_proj = nn.Linear(width, kv, bias=shape.attention_bias)
        self.v_proj = nn.Linear(width, kv, bias=shape.attention_bias)
        self.o_proj = nn.Linear(inner, width, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = _Norm(shape.head_dim), _Norm(shape.head_dim)


class _Mlp(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden_size)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden_size)
        self.mlp = _Mlp(shape)


class _Body(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.hidden_size)


@dataclass(slots=True)
class LayerWeights:
    """What the forward of one layer reads; each projection is one fused weight or its parts."""

    attention_norm: Tensor
    qkv: tuple[Weight, ...]
    qkv_bias: tuple[Tensor | None, ...]
    qk_norm_HE: Tensor | None
    output: Weight
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: tuple[Weight, ...]
    down: Weight
    added: LayerAdditions | None = None  # of one forward


@dataclass(frozen=True, slots=True)
class LayerAdditions:
    """What is added on some rows to what the projections of a layer put out."""

    additions: tuple[RowAdditions, ...]
    layer: int
    sizes: Mapping[str, tuple[int, int]]

    def onto(self, names: tuple[str, ...], x: Tensor, out: Tensor) -> Tensor:
        """`out` of these projections of x, with what is added."""
        sizes = [self.sizes[name][0] for name in names]
        for each in self.additions:
            out = each.onto(self.layer, names, sizes, x, out)
        return out


@dataclass(slots=True)
class Weights:
    layers: list[LayerWeights]
    head: Weight


@dataclass(slots=True)
class _Packs:
    """Fused weights for inference (on a CPU copies), valid while no parameter changes. One writer:
    the LeanLlama that holds it. A copied model starts without, but for matrices of which there is
    no other form: `packed`."""

    weights: Weights | None = None
    parameters: tuple[nn.Parameter, ...] = ()
    version: int = -1
    native: dict[Bits | None, NativeStep | None] = field(default_factory=dict)
    packed: PackedWeights | None = None

    def clear(self) -> None:
        self.weights, self.parameters, self.version = None, (), -1
        self.native = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packs:
        return _Packs(packed=self.packed)

    def __reduce__(self) -> tuple[type[_Packs], tuple[Any, ...]]:
        return _Packs, (None, (), -1, {}, self.packed)


@dataclass(slots=True)
class Rotary:
    """Tables of cos and signed sin, [positions, 2 E], always computed in float32 and only then
    rounded to the model's dtype (a bfloat16 frequency would let positions drift)."""

    inv_freq: Tensor
    scale: float = 1.0
    tables: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    outgrown: list[Tensor] = field(default_factory=list)  # CUDA graphs still read these

    def at(self, position_BT: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin at positions below `length`, each [B, T, 1, E]."""
        table = self.table(length, position_BT.device, dtype)
        cos, sin = F.embedding(position_BT, table)[:, :, None].chunk(2, dim=-1)
        return cos, sin

    def of(self, position_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same for a few tokens at any positions, without a table."""
        cos, sin = self._rows(position_BT.float()).to(dtype)[:, :, None].chunk(2, dim=-1)
        return cos, sin

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[at least `length`, 2 E]: cos and signed sin of every position."""
        found = self.tables.get((device, dtype))
        if found is None or found.shape[0] < length:
            if found is not None and device.type == "cuda":
                self.outgrown.append(found)
            rows = max(256, 1 << (length - 1).bit_length())
            found = self.tables[device, dtype] = self._table(rows, device).to(dtype)
        return found

    def _table(self, rows: int, device: torch.device) -> Tensor:
        return self._rows(torch.arange(rows, device=device, dtype=torch.float32))

    def _rows(self, at_X: Tensor) -> Tensor:
        """[X, 2 E] float32."""
        angle = at_X[..., None] * self.inv_freq.to(at_X.device)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        return torch.cat([cos, cos, -sin, sin], dim=-1)


def default_inv_freq(head_dim: int, theta: float) -> Tensor:
    """float32 [E/2]: theta ** (-2i / D)."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


class LlamaModel(nn.Module):
    """The parameters of a Llama-shaped model under their transformers names."""

    def __init__(
        self, shape: LlamaShape, inv_freq: Tensor | None = None, rope_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
        if not shape.tied:
            rows = shape.out_size or shape.vocab_size
            self.lm_head = nn.Linear(shape.hidden_size, rows, bias=False)
        with torch.device("cpu"):
            frequencies = default_inv_freq(shape.head_dim, shape.rope_theta)
        self.rotary = Rotary(frequencies if inv_freq is None else inv_freq, rope_scale)
        self.packs = _Packs()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights: every layer starts as the identity (o_proj and down_proj are zero)."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.normal_(std=0.02)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)

    @property
    def head_weight(self) -> Tensor:
        """The output head [out_size or V, D]; the embedding itself when tied."""
        return self.model.embed_tokens.weight if self.shape.tied else self.lm_head.weight

    def lent_head(self) -> Tensor | Callable[[], Tensor]:
        """The output head for a drafter; what is packed is widened for it."""
        weight, own = self.head_weight, self.packs.packed
        return weight.detach() if own is None or self.shape.tied else cache(own.head.widened)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LlamaModel:
        self.packs.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.packs.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def weights(self, is_fused: bool = True) -> Weights:
        """What a forward reads: the parameters themselves while they are being trained or the
        forward is compiled, fused copies otherwise (rebuilt whenever a parameter has changed; not
        `is_fused`: the parameters, through which gradients flow to what is fed)."""
        if torch.compiler.is_compiling() or not is_fused:
            return self._collect(is_fused=False)
        packs = self.packs
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            packs.clear()
            return self._collect(is_fused=False)
        version = sum(p._version for p in packs.parameters)
        if packs.weights is None or packs.version != version:
            # those made in inference mode do not count their changes
            packs.parameters = tuple(p for p in self.parameters() if not p.is_inference())
            packs.version = sum(p._version for p in packs.parameters)
            packs.weights = self._collect(is_fused=self._has_room())
        return packs.weights

    def widened_layer(self, index: int) -> LayerWeights:
        """What the attention of one layer reads of its input: the parameters, or what is packed in
        full. An error where they are kept in few bits alone (`Released`)."""
        layer, own = self.model.layers[index], self.packs.packed
        found = self._collect_layer(layer, lambda parts: parts, lambda weight: weight, False)
        if own is not None:
            names = ("query", "key", "value")
            found.qkv = tuple(own.layers[index][name].widened() for name in names)
        return found

    def in_int4(self, group: int) -> Weights:
        """What a forward reads with the layers' matrices in 4 bits. The LM head stays as it is."""

        def fuse(parts: tuple[Tensor, ...]) -> tuple[Weight, ...]:
            return (in_int4(torch.cat(parts), group),)

        def packed(weight: Tensor) -> Weight:
            return in_int4(weight, group)

        layers = [self._collect_layer(layer, fuse, packed, True) for layer in self.model.layers]
        return Weights(layers, self.head_weight)

    def token_bytes(self, bits: Bits | None, on_cpu: bool) -> int:
        """Of every matrix and norm, and of the embedding only where it is the LM head, too: of a
        token one row of it is read."""
        step = self.native(bits) if on_cpu else None
        if step is not None:
            return sum(tensor.nbytes for tensor in step.copies)
        embedding = self.model.embed_tokens.weight
        held = [w for w in self.parameters() if w is not embedding or w is self.head_weight]
        return sum(weight.nbytes for weight in held)

    def native(self, bits: Bits | None = None) -> NativeStep | None:
        """The compiled step over these weights, over copies of so many bits, or over those that are
        held packed; None where there is none for them."""
        found, packs = self.packs.native.get(bits), self.packs
        if bits not in packs.native or (found is not None and not found.is_current):
            stack, own = self.stack(), packs.packed
            if own is not None:
                found = packed_step(stack, own) if stack is not None and bits == "packed" else None
            else:
                found = None if stack is None else native_step(stack, bits)
            packs.native[bits] = found
        return found

    def keep_bits(self, bits: int) -> bool:
        """Keep the layers' matrices in `bits` alone: whoever asks for them as they were stored gets
        an error (`Released`). False, and nothing done, where the compiled step cannot be had."""
        stack = self.stack()
        found = None if stack is None else native_step(stack, bits, _release)
        self.packs.clear()
        self.packs.native |= {None: None, bits: found}
        return found is not None

    def keep_packed(self, weights: PackedWeights) -> bool:
        """Hold the matrices of the layers, and an LM head that is not the embedding, as a GGUF
        file packs them, and no other form of them. Theirs here are never looked at, so that they
        may be on the meta device. False, and nothing done, where there is no compiled step."""
        stack = self.stack()
        found = None if stack is None else packed_step(stack, weights)
        if found is None:
            return False
        for layer in self.model.layers:
            _release(layer)
        if not self.shape.tied:
            self.lm_head.weight = Released.of(self.lm_head.weight)
        self.packs.clear()
        self.packs.packed = weights
        return True

    @property
    def head(self) -> Weight:
        """The LM head as a forward reads it."""
        first = self.model.layers[0]
        is_released = isinstance(first.self_attn.q_proj.weight, Released)  # type: ignore[union-attr]
        return self.head_weight if is_released else self.weights().head

    def stack(self) -> Stack | None:
        """The layers as the compiled step reads them."""
        shape, body, rotary = self.shape, self.model, self.rotary
        outer = (body.embed_tokens.weight, body.norm.weight, self.head_weight)
        if not all(isinstance(weight, nn.Parameter) for weight in outer):
            return None  # computed as it is read
        return Stack(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.norm_eps,
            shape.qk_norm_eps or shape.norm_eps,
            list(body.layers),
            body.embed_tokens.weight,
            body.norm.weight,
            self.head_weight,
            lambda length: rotary.table(length, torch.device("cpu"), torch.float32),
            shape.window,
        )

    def _has_room(self) -> bool:
        weight = self.head_weight
        if weight.is_meta or isinstance(weight, FakeTensor):  # only its shape is needed
            return False
        if weight.device.type == "cuda":
            return True  # nothing is copied there
        size = sum(p.numel() * p.element_size() for p in self.parameters())
        return size <= PACK_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _collect(self, is_fused: bool) -> Weights:
        def packed(weight: Tensor) -> Weight:
            return pack(weight) if is_fused and can_pack(weight) else weight

        def fuse(parts: tuple[Tensor, ...]) -> tuple[Weight, ...]:
            return (packed(joined(parts)),) if is_fused else parts

        layers = [self._collect_layer(layer, fuse, packed, is_fused) for layer in self.model.layers]
        return Weights(layers, packed(self.head_weight))

    def _collect_layer(
        self,
        layer: Any,
        fuse: Callable[[tuple[Tensor, ...]], tuple[Weight, ...]],
        packed: Callable[[Tensor], Weight],
        is_fused: bool,
    ) -> LayerWeights:
        attention, mlp, shape = layer.self_attn, layer.mlp, self.shape
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases: tuple[Tensor | None, ...] = tuple(part.bias for part in parts)
        if is_fused and shape.attention_bias:
            biases = (torch.cat([part.bias for part in parts]),)
        qk_norm = None
        if shape.qk_norm:
            query = attention.q_norm.weight.expand(shape.num_heads, -1)
            key = attention.k_norm.weight.expand(shape.num_kv_heads, -1)
            qk_norm = torch.cat([query, key])
        return LayerWeights(
            attention_norm=layer.input_layernorm.weight,
            qkv=fuse(tuple(part.weight for part in parts)),
            qkv_bias=biases,
            qk_norm_HE=qk_norm,
            output=packed(attention.o_proj.weight),
            output_bias=attention.o_proj.bias,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=fuse((mlp.gate_proj.weight, mlp.up_proj.weight)),
            down=packed(mlp.down_proj.weight),
        )


def _release(layer: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    for part in (*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        part.weight = Released.of(part.weight)


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """One matrix of the rows of all: a copy on a CPU, where it is packed. A GPU's memory has no
    room for copies (9 GB of an 8B target): there the parts become its rows."""
    is_plain = all(type(part) is nn.Parameter and part.is_contiguous() for part in parts)
    is_plain = is_plain and len({part.dtype for part in parts}) == 1
    if parts[0].device.type != "cuda" or not is_plain:
        return torch.cat(parts)
    return in_one(parts)


def in_one(parts: tuple[Tensor, ...]) -> Tensor:
    """One matrix, of whose rows these parameters are views from now on. What changes them changes
    it."""
    first, width = parts[0], parts[0].shape[1]
    starts = accumulate((part.numel() * part.element_size() for part in parts), initial=0)
    lies_at = [first.data_ptr() + start for start in starts]
    if [part.data_ptr() for part in parts] == lies_at[:-1] and _same_storage(parts):
        return first.detach().as_strided((sum(map(len, parts)), width), (width, 1))
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, rows in zip(
            parts, torch.split(whole, [len(part) for part in parts]), strict=True
        ):
            part.data = rows
    return whole


def _same_storage(parts: tuple[Tensor, ...]) -> bool:
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1
