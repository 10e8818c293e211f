"""NativeStep: a stack of Llama layers as the compiled step reads it, and its call.

The weights are the parameters themselves; nothing is copied.
Letters: B rows, D hidden width, E head width, J key/value heads, L positions, Q picked rows, T fed
tokens, V target vocabulary, X any axes, Z slots.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut, Masks, RunMasks, StackedTaps
from specctl.models.native.bits import SIDE, packed
from specctl.models.native.library import (
    INT8_SWITCH,
    LayerAddresses,
    ModelAddresses,
    StepCall,
    library,
    no_int8,
)
from specctl.models.native.packed import PackedMatrix, PackedWeights
from specctl.models.native.threads import Kind, threads_of
from specctl.models.torch_threads import most_threads

MOST_ROWS = 512
BFLOAT16_ROWS, AMX_ROWS, NARROW = 96, 32, 512
FLOAT32_ROWS = {"AVX512": MOST_ROWS, "AVX2": 32}
Bits = int | Literal["packed"]  # of the matrices: 8, 4, or as a GGUF file packs them
KINDS: dict[Bits | None, str] = {None: "", 8: "_int8", 4: "_int4", "packed": "_packed"}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
Weights = tuple[Tensor | None, ...]
LEAST_INT8 = 500_000  # weights of a drafter, from which they are read in 8 bits
HEAD_BITS = 8  # of the LM head, at least (docs/benchmarks/compiled-step.md#weights-in-4-bits)
RESIDUAL = -1  # a tap of the compiled step alone: the residual behind the last layer, not normed


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers on top of each other, with what stands before and behind them.

    `layers` are modules with the parameter names of Llama; one without an input norm reads the
    residual as it is. `embedding_VD` is None where the residual is always given, `norm` where the
    head reads the last residual as it is. With `entry_norm` the projections of the first layer
    read cat(norm(embedding), norm(residual)) [2 D], and what they are added to is the residual, or
    with `is_residual_normed` the normed one (EAGLE-3). `rotary` gives float32 [at least L, 2 E]:
    cos and signed sin of L positions.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    qk_norm_eps: float
    layers: Sequence[Any]
    embedding_VD: Tensor | None
    norm: Tensor | None
    head: Tensor
    rotary: Callable[[int], Tensor]
    window: int | None = None
    entry_norm: Tensor | None = None
    is_residual_normed: bool = False

    def weights(self) -> list[Weights]:
        """What the step reads of each layer."""
        return [_weights(layer) for layer in self.layers]

    def beside(self) -> list[Tensor]:
        """What it reads beside the layers."""
        return [*self.beside_matrices(), self.head]

    def beside_matrices(self) -> list[Tensor]:
        """The same but for the LM head."""
        tensors = (self.embedding_VD, self.norm, self.entry_norm)
        return [tensor for tensor in tensors if tensor is not None]


def most_rows(dtype: torch.dtype, hidden_size: int) -> int:
    """Flat rows up to which the step is about as fast as PyTorch or faster
    (benchmarks/native_step.py): those of a long prompt as well, but in bfloat16 where PyTorch has
    instructions for it and is not busy with narrow layers, and in float32 without AVX512. Rounds of
    up to 32 rows are the step's in any case in bfloat16, where another order of sums often decides
    between two tokens: texts are then the same however they are drafted."""
    if dtype == torch.bfloat16:
        if torch.cpu._is_amx_tile_supported():
            return AMX_ROWS
        is_fast = torch.cpu._is_avx512_bf16_supported() and hidden_size > NARROW
        return BFLOAT16_ROWS if is_fast else MOST_ROWS
    return FLOAT32_ROWS.get(torch.backends.cpu.get_cpu_capability(), 4)


class NativeStep:
    """The compiled step over one stack's weights, as long as they lie where they lie. `bits`: its
    matrices are copies of 8 or 4 bits, made here, or `packed`; None: as they are stored. `release`
    is called with each layer whose matrices have been copied and are not looked at again."""

    def __init__(
        self,
        stack: Stack,
        functions: ctypes.CDLL,
        bits: Bits | None = None,
        release: Callable[[Any], None] | None = None,
        packed_weights: PackedWeights | None = None,
    ) -> None:
        weights, head = stack.weights(), stack.head
        is_read = release is None and packed_weights is None
        watched = weights if is_read else [_beside_matrices(layer) for layer in weights]
        beside = stack.beside() if packed_weights is None else stack.beside_matrices()
        self.stack, self.tensors = stack, [*beside, *_held(watched)]
        self.addresses = [*map(Tensor.data_ptr, self.tensors)]
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.dtype, self.bits = stack.head.dtype, bits
        kind = DTYPES[self.dtype] + KINDS[bits]
        self.functions = functions
        self.function = getattr(functions, f"step_{kind}")
        self.chain_function = getattr(functions, f"chain_{kind}")
        self.version = self._version()
        if packed_weights is not None:
            head = packed_weights.head.data
            weights = [*map(_with_packed, weights, packed_weights.layers)]
        elif isinstance(bits, int):
            head = packed(head, max(bits, HEAD_BITS))
            for at, layer in enumerate(stack.layers):
                weights[at] = _packed(weights[at], bits)
                if release is not None:
                    release(layer)
        self.copies = [head, *_held(weights)]
        num_layers = len(stack.layers)
        self.layers = (LayerAddresses * num_layers)(
            *(LayerAddresses(*map(address, layer)) for layer in weights)
        )
        self.model = ModelAddresses(
            D=stack.hidden_size,
            H=stack.num_heads,
            J=stack.num_kv_heads,
            E=stack.head_dim,
            I=stack.intermediate_size,
            V=stack.head.shape[0],
            num_layers=num_layers,
            num_embeddings=0 if stack.embedding_VD is None else stack.embedding_VD.shape[0],
            window=stack.window or 0,
            eps=stack.norm_eps,
            qk_eps=stack.qk_norm_eps,
            embedding=address(stack.embedding_VD),
            norm=address(stack.norm),
            head=address(head),
            layers=self.layers,
            entry_norm=address(stack.entry_norm),
            is_residual_normed=stack.is_residual_normed,
        )
        self.most_rows = most_rows(self.dtype, stack.hidden_size) if bits is None else sys.maxsize
        self.spaces: list[Tensor] = []  # free ones: each forward under way has its own
        self.fastest: dict[Kind, float] = {}
        widths = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
        is_even = not any(width % SIDE for width in widths)  # else sums follow their shares
        self.may_use_fewer = is_even and bool(functions.has_threads())

    @property
    def is_current(self) -> bool:
        """Whether the weights still lie where they lay, and copies of them are of these."""
        if self.addresses != [*map(Tensor.data_ptr, self.tensors)]:
            return False
        return self.bits is None or self.version == self._version()

    def _version(self) -> int:
        """Of what may change in place; tensors of inference mode do not count their changes."""
        return sum([tensor._version for tensor in self.counted])

    def run(self, feed: Feed, kv: SlotKV, at_Q: Tensor | None = None) -> LmOut:
        """The forward of `feed` against the aimed `kv`; at these rising flat fed indices alone:
        elsewhere logits and taps are zero, and nothing is written to `kv`."""
        B, T = feed.ids_BT.shape
        D, aim, parts = self.model.D, kv.aim, feed.parts
        num_rows = B * T if at_Q is None else len(at_Q)
        mask = self._mask(feed.masks, kv)
        threads = most_threads()
        needed = self.functions.space_needed(ctypes.byref(self.model), num_rows, aim.span, threads)
        space = self.space(needed)
        names = tuple(sorted(set(feed.taps)))  # RESIDUAL in front
        found = torch.empty(len(names), num_rows, D)
        places = range(found.data_ptr(), found.data_ptr() + found.nbytes, 4 * num_rows * D)
        is_last = names[:1] == (RESIDUAL,)
        taps = names[is_last:]
        logit_rows = _logit_rows(feed, T, None if at_Q is None else num_rows)
        logits = torch.empty(len(logit_rows), self.model.V)
        rotary = self.stack.rotary(aim.span)
        held = [  # alive until the step has run
            feed.ids_BT.contiguous(),
            feed.position_BT.contiguous(),
            aim.slot_B1.contiguous(),
            aim.start_B1.contiguous(),
            None if at_Q is None else at_Q.int(),
            None if feed.residual_BTD is None else feed.residual_BTD.float().contiguous(),
            None if mask is None else mask.expand(B, -1, -1, -1).contiguous(),
            rotary,
            *kv.addresses,
            None if parts is None else _chosen(parts.attention, self.model.num_layers),
            None if parts is None else _chosen(parts.mlp, self.model.num_layers),
            (ctypes.c_int32 * len(taps))(*taps),
            (ctypes.c_void_p * len(taps))(*places[is_last:]),
            (ctypes.c_int32 * len(logit_rows))(*logit_rows),
            logits,
            found if is_last else None,
            space,
        ]
        sizes = (B, T, kv.max_len, aim.span, len(taps), len(logit_rows), threads)
        tables = (kv.key_ZJLE[0].shape[0], rotary.shape[0], num_rows)
        call = StepCall(*sizes, *tables, *map(address, held))
        outside = self.call(self.function, call, (self.num_layers(parts),))
        self.spaces.append(space)
        if outside:
            raise IndexError(self.message(outside, feed.ids_BT, feed.position_BT, kv, rotary))
        if at_Q is not None:
            found, logits = _spread(found, at_Q, B * T), _spread(logits, at_Q, B * T)
        taps_XBTD = found.to(self.dtype).view(len(names), B, T, D)
        states = StackedTaps(names, taps_XBTD) if names else {}
        if not logit_rows:
            return LmOut(None, states)
        return LmOut(logits.to(self.dtype).view(B, -1, self.model.V), states)

    def num_layers(self, parts: SubLayers | None) -> int:
        return self.model.num_layers if parts is None else len(parts.attention)

    def call(self, function: Any, call: StepCall, work: tuple[int, ...], *more: Any) -> int:
        """Calls it, on as many of `call.threads` as are fastest now; `work`: what else makes it
        dearer than other calls of so many rows. Zero, or what the function says is wrong."""
        most = call.threads
        if not self.may_use_fewer:
            return int(function(ctypes.byref(self.model), ctypes.byref(call), *more))
        threads, began = threads_of(most), time.perf_counter()
        call.threads = threads.begin(began)
        failed = int(function(ctypes.byref(self.model), ctypes.byref(call), *more))
        ended, call.threads = time.perf_counter(), most
        if not failed:
            rows = call.num_true or call.B * call.T
            kind = (most, rows, call.num_logit_rows, call.span.bit_length(), *work)
            threads.end(kind, ended - began, ended, self.fastest)
        return failed

    def _mask(self, masks: Masks, kv: SlotKV) -> Tensor | None:
        """None for a run of tokens behind those that `kv` keeps, which the step sees by itself."""
        start_B1 = kv.aim.start_B1
        if isinstance(masks, RunMasks) and masks.kept_len_B.data_ptr() == start_B1.data_ptr():
            return None
        window = self.stack.window
        return masks.full if window is None else masks.windows[window]

    def message(
        self, outside: int, ids: Tensor, position: Tensor, kv: SlotKV, rotary: Tensor
    ) -> str:
        name, found, rows = (
            ("token id", ids, self.model.num_embeddings),
            ("position", position, rotary.shape[0]),
            ("slot", kv.aim.slot_B1, kv.key_ZJLE[0].shape[0]),
        )[outside - 1]
        low, high = int(found.min()), int(found.max())
        return f"{name}s from {low} to {high} were fed; this model has 0 to {rows - 1}"

    def space(self, needed: int) -> Tensor:
        """Working memory that no other thread uses."""
        try:
            found = self.spaces.pop()
        except IndexError:
            found = torch.empty(0)
        return found if found.numel() >= needed else torch.empty(needed)


def native_step(
    stack: Stack, bits: Bits | None = None, release: Callable[[Any], None] | None = None
) -> NativeStep | None:
    """The compiled step of a stack, its matrices in so many bits; None where it cannot be had, and
    where a weight is computed whenever it is read (a parametrization: low-rank additions that are
    being trained)."""
    held, head = _held(stack.weights()), stack.head
    if head.device.type != "cpu" or head.dtype not in DTYPES or isinstance(head, FakeTensor):
        return None
    if any(each.dtype != head.dtype or not each.is_contiguous() for each in stack.beside() + held):
        return None
    if not all(isinstance(weight, nn.Parameter) for weight in held):
        return None
    del held  # while layers are released
    functions = library().functions
    return None if functions is None else NativeStep(stack, functions, bits, release)


def packed_step(stack: Stack, weights: PackedWeights) -> NativeStep | None:
    """The compiled step of a stack in float32 whose matrices are `weights`; those of the stack say
    no more than their shapes. None where there is none on this machine."""
    read = [_beside_matrices(layer) for layer in stack.weights()]
    read_alone = [*stack.beside_matrices(), *_held(read)]
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in read_alone)
    functions = library().functions
    if functions is None:
        return None
    return NativeStep(stack, functions, "packed", packed_weights=weights)


def _weights(layer: Any) -> Weights:
    """A layer's weights, in the order of `LayerAddresses`."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)

    def weight(owner: Any) -> Tensor | None:
        return getattr(owner, "weight", None)

    return (
        weight(getattr(layer, "hidden_norm", layer.input_layernorm)),
        *(weight(projection) for projection in projections),
        *(projection.bias for projection in projections),
        weight(getattr(attention, "q_norm", None)),
        weight(getattr(attention, "k_norm", None)),
        weight(attention.o_proj),
        attention.o_proj.bias,
        weight(layer.post_attention_layernorm),
        weight(mlp.gate_proj),
        weight(mlp.up_proj),
        weight(mlp.down_proj),
    )


def drafts_in_int8(stack: Stack) -> bool:
    """Whether a drafter's matrices are read in 8 bits: they are faster so on this processor, and
    large enough for it to matter. SPECCTL_INT8=0: never."""
    if os.environ.get(INT8_SWITCH, "1") == "0" or no_int8() is not None:
        return False
    held = [*_held(stack.weights()), stack.head]
    return sum(weight.numel() for weight in held) >= LEAST_INT8


def _packed(layer: Weights, bits: int) -> Weights:
    return tuple(
        packed(weight, bits) if name in MATRICES and weight is not None else weight
        for name, weight in zip(LayerAddresses.NAMES, layer, strict=True)
    )


def _with_packed(layer: Weights, matrices: Mapping[str, PackedMatrix]) -> Weights:
    for name, weight in zip(LayerAddresses.NAMES, layer, strict=True):
        if name not in MATRICES or weight is None:
            continue
        shape = matrices[name].rows, matrices[name].columns
        assert tuple(weight.shape) == shape, (name, weight.shape, shape)
    return tuple(
        matrices[name].data if name in matrices else weight
        for name, weight in zip(LayerAddresses.NAMES, layer, strict=True)
    )


def _beside_matrices(layer: Weights) -> Weights:
    names = LayerAddresses.NAMES
    return tuple(
        None if name in MATRICES else weight for name, weight in zip(names, layer, strict=True)
    )


def _held(weights: Sequence[Weights]) -> list[Tensor]:
    return [weight for layer in weights for weight in layer if weight is not None]


def _logit_rows(feed: Feed, T: int, num_true: int | None) -> list[int]:
    """Flat rows whose logits are wanted: of padded rounds all `num_true` rows that are computed."""
    if not feed.logits:
        return []
    if num_true is not None:
        return list(range(num_true))
    if feed.only is None:
        return list(range(feed.ids_BT.numel()))
    return [row * T + at for row, at in enumerate(feed.only)]


def _spread(rows_QX: Tensor, at_Q: Tensor, num_rows: int) -> Tensor:
    """The rows (of the axis before the last) where they were fed, zeros between them."""
    out = rows_QX.new_zeros(*rows_QX.shape[:-2], num_rows, rows_QX.shape[-1])
    return out.index_copy_(-2, at_Q, rows_QX)


def _chosen(layers: Sequence[int], num_layers: int) -> Any:
    return (ctypes.c_uint8 * num_layers)(*(layer in layers for layer in range(num_layers)))


def address(held: Tensor | ctypes.Array[Any] | None) -> int | None:
    if held is None:
        return None
    return held.data_ptr() if isinstance(held, Tensor) else ctypes.addressof(held)
