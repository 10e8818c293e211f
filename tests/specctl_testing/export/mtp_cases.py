"""Tiny checkpoints that carry a module for multi-token prediction, and what such a module says by
plain torch, written from the papers: latent attention, rotary halves, gates, routed experts.
Letters: D hidden width, E head width, T tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specctl.models.hf.added_kinds import make_known
from specctl.models.hf.foreign_layer import ForeignLayer, as_published, one_layer, read_config
from specctl.models.weights.mtp_layout import EMBEDDING, KINDS, MIMO, MIMO_7B, MTP, layout_of
from specctl.runtime.target.target import Target
from specctl_testing.models import build_model

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
        "v_head_dim": 10},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {  # the attention of Qwen3-Next, an MLP instead of the experts
    "qwen3_5_text": {
        key: value for key, value in MODELS["qwen3_next"].items()
        if key == "layer_types" or key.startswith("linear_")},
    "mimo": {},  # MiMo-7B
}  # fmt: skip
SEVERAL: dict[str, dict[str, Any]] = {  # whose modules have windows and attention sinks
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "v_head_dim": 6},
}  # fmt: skip
Tensors = dict[str, Tensor]


def checkpoint(
    kind: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    modules: int = 1,
) -> tuple[Target, Tensors]:
    """A target in `folder` and the tensors of the modules that its checkpoint carries."""
    vocab = 48 if tokenizer is None else len(tokenizer)
    make_known(kind)
    model = build_model(
        kind, num_layers=2, vocab=vocab, dtype=dtype, **(MODELS | DENSE | SEVERAL)[kind]
    )
    if kind in MIMO_7B:
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)  # what a module must not see
    if kind not in MTP + MIMO:
        model.config.num_nextn_predict_layers = modules
    elif kind in MTP and modules > 1:
        model.config.mtp_num_hidden_layers = modules
    model.save_pretrained(folder)
    layout = layout_of(model.config, modules)
    assert layout is not None
    torch.manual_seed(3)
    layer = ForeignLayer(read_config(one_layer(model.config), KINDS))
    blocks = [
        {
            name: 0.2 * torch.randn(tensor.shape) + 1.0 * name.endswith("norm.weight")
            for name, tensor in layer.block.state_dict().items()
        }
        for _ in range(modules)
    ]
    width = model.config.hidden_size
    beside = {
        name: 0.2 * torch.randn(width, 2 * width)
        if name.endswith("fc.weight")
        else 1 + 0.2 * torch.randn(width)
        for name in layout.named
    }
    config = layer.block.self_attn.config
    tensors = layout.joined(beside, [as_published(config, block) for block in blocks])
    matrices = {True: model.get_input_embeddings(), False: model.get_output_embeddings()}
    for name, matrix in layout.copies.items():
        tensors[name] = matrices[matrix == EMBEDDING].weight.detach()
    tensors = {
        name: tensor.to(torch.float32 if "bias" in name else dtype).clone().contiguous()
        for name, tensor in tensors.items()
    }
    add_module(folder, tensors)
    return opened(folder, model, tokenizer), tensors


def opened(folder: Path, model: Any, tokenizer: Any = None) -> Target:
    return Target.from_model(model, tokenizer, name=str(folder), is_read_only=True)


def add_module(folder: Path, tensors: Tensors) -> None:
    """The checkpoint in two files, of which the second holds the module alone."""
    from safetensors.torch import load_file

    whole, second = folder / "model.safetensors", "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    first = folder / "model-00001-of-00002.safetensors"
    if whole.exists():
        whole.rename(first)
    save_file(tensors, folder / second, metadata={"format": "pt"})
    places = dict.fromkeys(load_file(first), first.name) | dict.fromkeys(tensors, second)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


# -- by plain torch -----------------------------------------------------------------------------


def logits(
    target: Target, tensors: Tensors, ids_T: Tensor, state_TD: Tensor, module: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and states [T, D] of that module behind tokens `ids_T`, beside the states
    before them."""
    config = target.lm.module.config
    layout, kind = layout_of(config, module + 1), config.model_type
    assert layout is not None
    before, own = layout.layers[module], f"beside.{module - 1}."
    is_own = own + "fc.weight" in layout.named
    t = {name.removeprefix(before): x.double() for name, x in tensors.items()}
    for our, theirs in layout.named.items():
        if our.startswith(own) == is_own:
            t[our.removeprefix(own)] = tensors[theirs].double()
    one = 1.0 if kind == "qwen3_next" else 0.0

    def norm(x: Tensor, name: str) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        return x * scale * (one + t[name])

    borrowed = target.borrowed()
    token_TD = borrowed.embedding_VD[ids_T].double()
    both = torch.cat([norm(token_TD, "enorm.weight"), norm(state_TD, "hnorm.weight")], -1)
    x = both @ t["fc.weight"].T
    attend = {"deepseek_v3": latent, "glm4_moe": halved, "qwen3_next": gated}[kind]
    x = x + attend(t, config, norm(x, "input_layernorm.weight"), norm)
    x = x + experts(t, config, norm(x, "post_attention_layernorm.weight"))
    out = norm(x, "norm.weight")
    return out @ borrowed.head_VD.double().T, out


def softmaxed(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[T, H * E] of [H, T, E], causal."""
    score = query @ key.transpose(1, 2) * scale
    T = score.shape[-1]
    score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return (score.softmax(-1) @ value).transpose(0, 1).flatten(1)


def turned(x: Tensor, theta: float, width: int, is_paired: bool = False) -> Tensor:
    """Rotate the first `width` numbers of [H, T, E]: halves, or neighbours in pairs."""
    T = x.shape[1]
    angle = torch.arange(T)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = angle.cos().double(), angle.sin().double()
    part, rest = x[..., :width], x[..., width:]
    if is_paired:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


def latent(t: Tensors, c: Any, x: Tensor, norm: Any) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""
    H, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    tiny = {n: t[f"self_attn.{n}.weight"] for n in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")}

    def small(value: Tensor, name: str) -> Tensor:
        return value * value.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * t[name]

    query = small(x @ tiny["q_a_proj"].T, "self_attn.q_a_layernorm.weight") @ tiny["q_b_proj"].T
    q_plain, q_turned = heads(query, H).split([nope, rope], -1)
    joint = x @ t["self_attn.kv_a_proj_with_mqa.weight"].T
    low, k_turned = joint.split([c.kv_lora_rank, rope], -1)
    kv = heads(small(low, "self_attn.kv_a_layernorm.weight") @ tiny["kv_b_proj"].T, H)
    k_plain, value = kv.split([nope, c.v_head_dim], -1)
    theta = c.rope_parameters["rope_theta"]
    q_turned = turned(q_turned, theta, rope, is_paired=True)
    k_turned = turned(k_turned[None], theta, rope, is_paired=True).expand(H, -1, -1)
    query, key = torch.cat([q_plain, q_turned], -1), torch.cat([k_plain, k_turned], -1)
    return softmaxed(query, key, value, (nope + rope) ** -0.5) @ tiny["o_proj"].T


def grouped(t: Tensors, c: Any, query: Tensor, x: Tensor, norm: Any) -> Tensor:
    """Grouped-query attention with norms on queries and keys, a part of each rotated."""
    J, E = c.num_key_value_heads, c.head_dim
    key, value = (
        heads(x @ t[f"self_attn.{n}.weight"].T + t.get(f"self_attn.{n}.bias", 0.0), J)
        for n in ("k_proj", "v_proj")
    )
    part = int(E * c.rope_parameters["partial_rotary_factor"])
    theta = c.rope_parameters["rope_theta"]
    query = turned(norm(query, "self_attn.q_norm.weight"), theta, part)
    key = turned(norm(key, "self_attn.k_norm.weight"), theta, part)
    copies = len(query) // J
    key, value = key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)
    return softmaxed(query, key, value, E**-0.5)


def halved(t: Tensors, c: Any, x: Tensor, norm: Any) -> Tensor:
    """GLM-4.5's."""
    query = x @ t["self_attn.q_proj.weight"].T + t["self_attn.q_proj.bias"]
    out = grouped(t, c, heads(query, c.num_attention_heads), x, norm)
    return out @ t["self_attn.o_proj.weight"].T


def gated(t: Tensors, c: Any, x: Tensor, norm: Any) -> Tensor:
    """Qwen3-Next's: each head's query projection holds a gate of its output as well."""
    both = heads(x @ t["self_attn.q_proj.weight"].T, c.num_attention_heads)
    query, gate = both.chunk(2, -1)
    out = grouped(t, c, query, x, norm) * gate.transpose(0, 1).flatten(1).sigmoid()
    return out @ t["self_attn.o_proj.weight"].T


def experts(t: Tensors, c: Any, x: Tensor) -> Tensor:
    """The chosen experts of each token, and the shared one."""

    def mlp(name: str) -> Tensor:
        gate, up, down = (t[f"mlp.{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    score = x @ t["mlp.gate.weight"].T
    bias = t.get("mlp.gate.e_score_correction_bias")
    if bias is None:  # Qwen3-Next
        prob, k = score.softmax(-1), c.num_experts_per_tok
        choice, factor, shared = prob, 1.0, mlp("shared_expert")
        shared = shared * (x @ t["mlp.shared_expert_gate.weight"].T).sigmoid()
    else:  # DeepSeek-V3: the best groups by their two best, then the best of these
        prob, k, factor = score.sigmoid(), c.num_experts_per_tok, c.routed_scaling_factor
        choice, shared = prob + bias, mlp("shared_experts")
        per = choice.unflatten(-1, (c.n_group, -1))
        best = per.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        kept = torch.zeros(len(x), c.n_group).scatter(1, best, 1.0).bool()
        choice = per.masked_fill(~kept[..., None], -math.inf).flatten(1)
    picked = choice.topk(k, -1).indices
    weight = torch.zeros_like(prob).scatter(1, picked, prob.gather(1, picked))
    weight = weight / weight.sum(-1, keepdim=True) * factor
    routed = sum(weight[:, i, None] * mlp(f"experts.{i}") for i in range(score.shape[1]))
    return routed + shared
