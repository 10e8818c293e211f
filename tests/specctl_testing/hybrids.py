"""Random tiny models with recurrent layers: every kind of state that is kept here."""

from __future__ import annotations

from typing import Any

from specctl_testing.models import build_model

VOCABULARY = 200
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "shared_intermediate_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "mamba_expand": 2,
}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
BLOCKS = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR | LATENT | EXPERTS,
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8},
    "granitemoehybrid": MAMBA2 | EXPERTS | {"layer_types": LINEAR["layer_types"]},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": LATENT | EXPERTS | {
        "layer_types": LINEAR["layer_types"], "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS,
    "lfm3": CONV,
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8, "state_size": 8},
    "nemotron_h": EXPERTS | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 2,
        "chunk_size": 8},
    "olmo_hybrid": LINEAR | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": LINEAR | EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS,
    "zamba": BLOCKS | {"mamba_d_state": 8, "n_mamba_heads": 2},
    "zamba2": BLOCKS | {
        "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 8},
}  # fmt: skip
FEW = ("lfm2", "qwen3_next", "falcon_h1", "kimi_linear", "jamba")  # one of each kind of state


def tiny_hybrid(kind: str, seed: int = 0) -> Any:
    """A random model of four layers, width 64."""
    return build_model(kind, hidden=64, vocab=VOCABULARY, seed=seed, **HYBRIDS[kind])
