"""A block behind injected features, as engines compute it: what vLLM, SGLang and llama.cpp share
once each has read its config and found its tensors.
Letters: D hidden width, I input width, S sequence (the context), T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.layers import LayerSizes, attention, layer_shapes, mlp, rms_norm

Params = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class RowMask:
    """What rows of a layer see: of their block only those before them, or all; of everything the
    newest `window` rows, themselves counted (None: all)."""

    is_causal: bool
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """Of the convolutions around the sublayers: slots that are mixed, channels of one weight."""

    taps: int
    group: int


def block_shapes(
    sizes: LayerSizes, num_layers: int, num_taps: int, conv: ConvSizes | None = None
) -> dict[str, list[int]]:
    """Every parameter of a DFlash stack."""
    width = sizes.width
    shapes = {"fc.weight": [width, num_taps * width]}
    shapes |= {"hidden_norm.weight": [width], "norm.weight": [width]}
    for layer in range(num_layers):
        own = f"layers.{layer}"
        shapes |= layer_shapes(own, sizes, width, qk_norm=True)
        shapes[f"{own}.input_layernorm.weight"] = [width]
        for part in ("attention_conv", "mlp_conv") if conv is not None else ():
            assert conv is not None
            if width % conv.group:
                raise gate(f"conv_group_size {conv.group}", f"a divisor of {width}")
            rows = 2 * conv.taps * (width // conv.group)
            shapes[f"{own}.{part}.base_kernel"] = [2, conv.taps, width]
            shapes[f"{own}.{part}.kernel_projection.weight"] = [rows, width]
    return shapes


def context_rows(params: Params, sizes: LayerSizes, taken_SI: Tensor) -> Tensor:
    """[S, D]: what every layer makes keys and values of."""
    joined_SD = F.linear(taken_SI, params["fc.weight"])
    return rms_norm(joined_SD, params["hidden_norm.weight"], sizes.eps)


def through_block(
    params: Params, sizes: LayerSizes, taken_SI: Tensor, x_TD: Tensor, masks: Sequence[RowMask]
) -> Tensor:
    """[T, D]: the normed states of the block's rows; one mask per layer."""
    context_SD = context_rows(params, sizes, taken_SI)
    return through_layers(params, sizes, [context_SD] * len(masks), x_TD, masks)


@torch.no_grad()
def through_layers(
    params: Params,
    sizes: LayerSizes,
    contexts: Sequence[Tensor],
    x_TD: Tensor,
    masks: Sequence[RowMask],
) -> Tensor:
    """The same behind the rows [S, D] of each layer's own."""
    for layer, (context_SD, mask) in enumerate(zip(contexts, masks, strict=True)):
        own = f"layers.{layer}"
        attended = partial(
            attention,
            params,
            f"{own}.self_attn",
            sizes=sizes,
            context_SI=context_SD,
            is_causal=mask.is_causal,
            window=mask.window,
        )
        normed_TD = rms_norm(x_TD, params[f"{own}.input_layernorm.weight"], sizes.eps)
        x_TD = x_TD + _around(params, f"{own}.attention_conv", normed_TD, attended)
        normed_TD = rms_norm(x_TD, params[f"{own}.post_attention_layernorm.weight"], sizes.eps)
        inner = partial(mlp, params, f"{own}.mlp")
        x_TD = x_TD + _around(params, f"{own}.mlp_conv", normed_TD, inner)
    return rms_norm(x_TD, params["norm.weight"], sizes.eps)


def _around(
    params: Params, name: str, normed_TD: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """[T, D]: a sublayer between its two convolutions, or alone where it has none. Both sets of
    weights are made of the sublayer's input."""
    base = params.get(f"{name}.base_kernel")
    if base is None:
        return sublayer(normed_TD)
    made = F.linear(normed_TD, params[f"{name}.kernel_projection.weight"])
    made = made.view(len(normed_TD), *base.shape[:2], -1)
    kernel = base + made.repeat_interleave(base.shape[2] // made.shape[3], dim=-1)
    return _mixed(sublayer(_mixed(normed_TD, kernel[:, 0])), kernel[:, 1])


def _mixed(x_TD: Tensor, kernel: Tensor) -> Tensor:
    """[T, D]: each row with those just before it, by its own weights [T, taps, D]."""
    out_TD = torch.zeros_like(x_TD)
    for row in range(len(x_TD)):
        for tap in range(min(kernel.shape[1], row + 1)):
            out_TD[row] += kernel[row, tap] * x_TD[row - tap]
    return out_TD
