"""What corrects a block, as engines compute it over named tensors in float64: DSpark's heads,
DFlash2's selector, XPress' refiner.
Letters: D hidden width, K draft vocabulary, N nodes, O output width (the rank), T fed tokens, V
target vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.export.layouts.engines import gate
from specctl.export.readers.block_layers import Params
from specctl.export.readers.layers import LayerSizes
from specctl.export.readers.trial import Trial

# -- DSpark ------------------------------------------------------------------------------------

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
SURE, SURE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
VANILLA, GATED, RNN = "vanilla", "gated", "rnn"


def spark_shapes(
    sizes: LayerSizes,
    rank: int,
    columns: int,
    rows: int,
    sure_of: int | None,
    kind: str = VANILLA,
) -> dict[str, list[int]]:
    """Parameters of DSpark's heads: W1 has `columns` rows, W2 `rows`; the confidence head reads the
    state and `sure_of` further numbers (None: there is none)."""
    shapes = {W1: [columns, rank], W2: [rows, rank]}
    if kind == GATED:
        shapes |= {f"{GATE}.weight": [rank, sizes.width + rank], f"{GATE}.bias": [rank]}
    elif kind == RNN:
        width = 2 * rank + sizes.width
        shapes |= {f"{JOINT}.weight": [3 * rank, width], f"{JOINT}.bias": [3 * rank]}
    elif kind != VANILLA:
        raise gate(f"markov_head_type {kind}", f"{VANILLA}, {GATED} or {RNN}")
    if sure_of is not None:
        shapes |= {SURE: [1, sizes.width + sure_of], SURE_BIAS: [1]}
    return shapes


def before(params: Params, trial: Trial) -> Tensor:
    """[N + 1, O]: W1 of the token before each place."""
    return params[W1][torch.tensor([trial.ids[-1], *trial.drafted])]


def spark_bias(params: Params, trial: Trial, state_ND: Tensor) -> Tensor:
    """[N + 1, K]: what is added to the logits of each place."""
    token_NO = before(params, trial)
    if f"{GATE}.weight" in params:
        read = torch.cat([state_ND, token_NO], dim=-1)
        share_NO = F.linear(read, params[f"{GATE}.weight"], params[f"{GATE}.bias"]).sigmoid()
        return F.linear(share_NO * token_NO, params[W2])
    if f"{JOINT}.weight" not in params:
        return F.linear(token_NO, params[W2])
    memory_O, said = torch.zeros_like(token_NO[0]), []
    for token_O, state_D in zip(token_NO, state_ND, strict=True):
        read = torch.cat([memory_O, token_O, state_D])
        made = F.linear(read, params[f"{JOINT}.weight"], params[f"{JOINT}.bias"])
        kept_O, new_O, out_O = made.chunk(3)
        memory_O = kept_O.sigmoid() * memory_O + (1 - kept_O.sigmoid()) * new_O.tanh()
        said.append(F.linear(out_O.tanh(), params[W2]))
    return torch.stack(said)


def confidences(params: Params, trial: Trial, state_ND: Tensor) -> Tensor | None:
    """[N + 1]: how likely each place is to be accepted, if there is a head for it."""
    if SURE not in params:
        return None
    if params[SURE].shape[1] > state_ND.shape[1]:
        state_ND = torch.cat([state_ND, before(params, trial)], dim=-1)
    return F.linear(state_ND, params[SURE], params[SURE_BIAS])[:, 0].sigmoid()


# -- DFlash2 -----------------------------------------------------------------------------------

BEHIND = "candidate_selector.predecessor_codebook"
NEXT = "candidate_selector.successor_codebook"
HIDDEN = "candidate_selector.hidden_projection.weight"


def selector_shapes(sizes: LayerSizes, rank: int, size: int) -> dict[str, list[int]]:
    """Those of the selector over a vocabulary of that size."""
    return {BEHIND: [size, rank], NEXT: [size, rank], HIDDEN: [rank, sizes.width]}


def selected(params: Params, trial: Trial, state_ND: Tensor, said_NV: Tensor, count: int) -> Tensor:
    """[N + 1, V]: scores of each place's `count` likeliest tokens, -inf elsewhere."""
    tokens = [trial.ids[-1], *trial.drafted]
    out_NV = torch.full_like(said_NV, -torch.inf)
    for place, (token, state_D) in enumerate(zip(tokens, state_ND, strict=True)):
        best = said_NV[place].topk(min(count, said_NV.shape[1])).indices
        factor_O = params[BEHIND][token] * (params[HIDDEN] @ state_D)
        out_NV[place, best] = said_NV[place, best] + params[NEXT][best] @ factor_O
    return out_NV


# -- XPress ------------------------------------------------------------------------------------

VLLM = {  # parts of the refiner -> vLLM's names
    "token": "xpress_head.w1.weight",
    "slot": "xpress_head.down_h.weight",
    "block": "xpress_head.down_g.weight",
    "joint": "xpress_head.in_proj.weight",
    "mix": "xpress_head.mix.L",
    "gate": "xpress_head.mlp.gate_proj.weight",
    "up": "xpress_head.mlp.up_proj.weight",
    "down": "xpress_head.mlp.down_proj.weight",
    "bias": "xpress_head.w2.weight",
}
SPECULATORS = {
    "token": "refiner_head.token_embed.weight",
    "slot": "refiner_head.down_h.weight",
    "block": "refiner_head.down_g.weight",
    "joint": "refiner_head.in_proj.weight",
    "mix": "refiner_head.mix_l",
    "gate": "refiner_head.mlp_gate.weight",
    "up": "refiner_head.mlp_up.weight",
    "down": "refiner_head.mlp_down.weight",
    "bias": "refiner_head.readout.weight",
}


def refiner_shapes(
    names: dict[str, str], width: int, rank: int, inner: int, slots: int, columns: int, rows: int
) -> dict[str, list[int]]:
    """Those of a refiner of so many slots, that of the root counted."""
    shapes = {
        "token": [columns, rank],
        "slot": [rank, width],
        "block": [rank, width],
        "joint": [rank, 3 * rank],
        "mix": [rank, slots, slots],
        "gate": [inner, rank],
        "up": [inner, rank],
        "down": [rank, inner],
        "bias": [rows, rank],
    }
    return {names[part]: shape for part, shape in shapes.items()}


def refined(params: Params, names: dict[str, str], state_TD: Tensor, read_T: list[int]) -> Tensor:
    """[T, K]: what is added to the logits of every slot, that of the root first; `read_T` is the
    token before each."""
    part = {key: params[name] for key, name in names.items()}
    pooled_O = part["block"] @ state_TD.mean(0)
    own = []
    for token, state_D in zip(read_T, state_TD, strict=True):
        read = torch.cat([part["slot"] @ state_D, pooled_O, part["token"][token]])
        own.append(part["joint"] @ read)
    said = []
    for slot, own_O in enumerate(own):
        mixed_O = own_O + sum(part["mix"][:, slot, j] * own[j] for j in range(slot + 1))
        inner = F.silu(part["gate"] @ mixed_O) * (part["up"] @ mixed_O)
        said.append(part["bias"] @ (mixed_O + part["down"] @ inner))
    return torch.stack(said)
