"""NativeStep: a model's weights as the compiled step reads them, and its call.

The weights are the parameters themselves; nothing is copied. `module` is a `LlamaModel`.
Letters: B rows, D hidden width, E head width, J key/value heads, L positions, T fed tokens, Z
slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut
from specctl.models.native.library import LayerAddresses, ModelAddresses, StepCall, library

MOST_ROWS = 64
DTYPES = {torch.float32: "step_float32", torch.bfloat16: "step_bfloat16"}


def most_rows(dtype: torch.dtype) -> int:
    """Flat rows up to which the step is faster than PyTorch: 16 in float32 (16 rows of a layer of
    1024 x 2816 take as long), and in bfloat16 far more than a round has, but where the processor
    multiplies bfloat16 itself."""
    if dtype == torch.bfloat16:
        return 4 if torch.cpu._is_avx512_bf16_supported() else MOST_ROWS
    return 16


class NativeStep:
    """The compiled step over one model's weights, as long as they lie where they lie."""

    def __init__(self, module: Any, functions: ctypes.CDLL) -> None:
        shape, body, parameters = module.shape, module.model, list(module.parameters())
        self.parameters = parameters
        self.addresses = [parameter.data_ptr() for parameter in parameters]
        self.dtype = parameters[0].dtype
        self.functions, self.function = functions, getattr(functions, DTYPES[self.dtype])
        self.layers = (LayerAddresses * shape.num_layers)(*(_layer(layer) for layer in body.layers))
        self.model = ModelAddresses(
            D=shape.hidden_size,
            H=shape.num_heads,
            J=shape.num_kv_heads,
            E=shape.head_dim,
            I=shape.intermediate_size,
            V=module.head_weight.shape[0],
            num_layers=shape.num_layers,
            num_embeddings=body.embed_tokens.weight.shape[0],
            eps=shape.norm_eps,
            qk_eps=shape.qk_norm_eps or shape.norm_eps,
            embedding=body.embed_tokens.weight.data_ptr(),
            norm=body.norm.weight.data_ptr(),
            head=module.head_weight.data_ptr(),
            layers=self.layers,
        )
        self.window, self.rotary = shape.window, module.rotary
        self.most_rows = most_rows(self.dtype)
        self.spaces: list[Tensor] = []  # free ones: each forward under way has its own

    @property
    def is_current(self) -> bool:
        """Whether the weights still lie where they lay."""
        return self.addresses == [parameter.data_ptr() for parameter in self.parameters]

    def run(self, feed: Feed, kv: SlotKV) -> LmOut:
        """The forward of `feed` against the aimed `kv`."""
        B, T = feed.ids_BT.shape
        D, aim, parts = self.model.D, kv.aim, feed.parts
        mask = feed.masks.full if self.window is None else feed.masks.windows[self.window]
        threads = torch.get_num_threads()
        needed = self.functions.space_needed(ctypes.byref(self.model), B * T, aim.span, threads)
        space = self._space(needed)
        taps = sorted(feed.taps)
        tapped = [torch.empty(B, T, D) for _ in taps]
        asked = _asked(feed, T)
        logits = torch.empty(len(asked), self.model.V)
        rotary = self.rotary.table(aim.span, mask.device, torch.float32)
        held = [  # alive until the step has run
            feed.ids_BT.contiguous(),
            feed.position_BT.contiguous(),
            aim.slot_B1.contiguous(),
            aim.start_B1.contiguous(),
            None if feed.residual_BTD is None else feed.residual_BTD.float().contiguous(),
            mask.expand(B, -1, -1, -1).contiguous(),
            rotary,
            _addresses(kv.key_ZJLE),
            _addresses(kv.value_ZJLE),
            None if parts is None else _chosen(parts.attention, self.model.num_layers),
            None if parts is None else _chosen(parts.mlp, self.model.num_layers),
            (ctypes.c_int32 * len(taps))(*taps),
            _addresses(tapped),
            (ctypes.c_int32 * len(asked))(*asked),
            logits,
            space,
        ]
        sizes = (B, T, kv.max_len, aim.span, len(taps), len(asked), threads)
        tables = (kv.key_ZJLE[0].shape[0], rotary.shape[0])
        call = StepCall(*sizes, *tables, *map(_address, held))
        outside = self.function(ctypes.byref(self.model), ctypes.byref(call))
        self.spaces.append(space)
        if outside:
            raise IndexError(self._message(outside, feed, kv, rotary))
        found = {tap: value.to(self.dtype) for tap, value in zip(taps, tapped, strict=True)}
        if not asked:
            return LmOut(None, found)
        return LmOut(logits.to(self.dtype).view(B, -1, self.model.V), found)

    def _message(self, outside: int, feed: Feed, kv: SlotKV, rotary: Tensor) -> str:
        name, found, rows = (
            ("token id", feed.ids_BT, self.model.num_embeddings),
            ("position", feed.position_BT, rotary.shape[0]),
            ("slot", kv.aim.slot_B1, kv.key_ZJLE[0].shape[0]),
        )[outside - 1]
        low, high = int(found.min()), int(found.max())
        return f"{name}s from {low} to {high} were fed; this model has 0 to {rows - 1}"

    def _space(self, needed: int) -> Tensor:
        """Working memory that no other thread uses."""
        try:
            found = self.spaces.pop()
        except IndexError:
            found = torch.empty(0)
        return found if found.numel() >= needed else torch.empty(needed)


def native_step(module: Any) -> NativeStep | None:
    """The compiled step of a model; None where it cannot be had."""
    parameters = list(module.parameters())
    first = parameters[0]
    if first.device.type != "cpu" or first.dtype not in DTYPES or isinstance(first, FakeTensor):
        return None
    if any(p.dtype != first.dtype or not p.is_contiguous() for p in parameters):
        return None
    functions = library().functions
    return None if functions is None else NativeStep(module, functions)


def _layer(layer: Any) -> LayerAddresses:
    attention, mlp = layer.self_attn, layer.mlp

    def address(owner: Any, name: str = "weight") -> int | None:
        found = None if owner is None else getattr(owner, name)
        return None if found is None else int(found.data_ptr())

    return LayerAddresses(
        attention_norm=address(layer.input_layernorm),
        query=address(attention.q_proj),
        key=address(attention.k_proj),
        value=address(attention.v_proj),
        query_bias=address(attention.q_proj, "bias"),
        key_bias=address(attention.k_proj, "bias"),
        value_bias=address(attention.v_proj, "bias"),
        query_norm=address(getattr(attention, "q_norm", None)),
        key_norm=address(getattr(attention, "k_norm", None)),
        output=address(attention.o_proj),
        output_bias=address(attention.o_proj, "bias"),
        mlp_norm=address(layer.post_attention_layernorm),
        gate=address(mlp.gate_proj),
        up=address(mlp.up_proj),
        down=address(mlp.down_proj),
    )


def _asked(feed: Feed, T: int) -> list[int]:
    """Flat rows whose logits are wanted."""
    if not feed.logits:
        return []
    if feed.only is None:
        return list(range(feed.ids_BT.numel()))
    return [row * T + at for row, at in enumerate(feed.only)]


def _chosen(layers: Sequence[int], num_layers: int) -> Any:
    return (ctypes.c_uint8 * num_layers)(*(layer in layers for layer in range(num_layers)))


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _address(held: Tensor | ctypes.Array[Any] | None) -> int | None:
    if held is None:
        return None
    return held.data_ptr() if isinstance(held, Tensor) else ctypes.addressof(held)
