"""A block behind injected features, as engines compute it: what vLLM and SGLang share once each has
read its config and found its tensors.
Letters: D hidden width, I input width, N nodes, S sequence (the context), T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.readers.layers import LayerSizes, attention, layer_shapes, onward, rms_norm
from specctl.export.readers.trial import Trial

Params = Mapping[str, Tensor]
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
SURE, SURE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def block_shapes(sizes: LayerSizes, num_layers: int, num_taps: int) -> dict[str, list[int]]:
    """Every parameter of a DFlash stack."""
    width = sizes.width
    shapes = {"fc.weight": [width, num_taps * width]}
    shapes |= {"hidden_norm.weight": [width], "norm.weight": [width]}
    for layer in range(num_layers):
        own = f"layers.{layer}"
        shapes |= layer_shapes(own, sizes, width, qk_norm=True)
        shapes[f"{own}.input_layernorm.weight"] = [width]
    return shapes


def spark_shapes(
    sizes: LayerSizes, rank: int, columns: int, rows: int, sure_of: int | None
) -> dict[str, list[int]]:
    """Those of DSpark's heads: W1 has `columns` rows, W2 `rows`; the confidence head reads the
    state and `sure_of` further numbers (None: there is none)."""
    shapes = {W1: [columns, rank], W2: [rows, rank]}
    if sure_of is not None:
        shapes |= {SURE: [1, sizes.width + sure_of], SURE_BIAS: [1]}
    return shapes


@torch.no_grad()
def through_block(
    params: Params, sizes: LayerSizes, taken_SI: Tensor, x_TD: Tensor, is_causal: Sequence[bool]
) -> Tensor:
    """[T, D]: the normed states of the block's rows; one `is_causal` per layer."""
    joined_SD = F.linear(taken_SI, params["fc.weight"])
    context_SD = rms_norm(joined_SD, params["hidden_norm.weight"], sizes.eps)
    for layer, causal in enumerate(is_causal):
        own = f"layers.{layer}"
        normed_TD = rms_norm(x_TD, params[f"{own}.input_layernorm.weight"], sizes.eps)
        attended = attention(params, f"{own}.self_attn", normed_TD, sizes, context_SD, causal)
        x_TD = onward(params, own, x_TD, attended, sizes.eps)
    return rms_norm(x_TD, params["norm.weight"], sizes.eps)


def before(params: Params, trial: Trial) -> Tensor:
    """[N + 1, r]: W1 of the token before each place."""
    return params[W1][torch.tensor([trial.ids[-1], *trial.drafted])]


def confidences(params: Params, trial: Trial, state_ND: Tensor) -> Tensor | None:
    """[N + 1]: how likely each place is to be accepted, if there is a head for it."""
    if SURE not in params:
        return None
    if params[SURE].shape[1] > state_ND.shape[1]:
        state_ND = torch.cat([state_ND, before(params, trial)], dim=-1)
    return F.linear(state_ND, params[SURE], params[SURE_BIAS])[:, 0].sigmoid()
