"""Tiny random checkpoints as large ones are stored: several safetensors files and an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specctl.recipes.targets import resolve
from specctl_testing.models import build_model

VOCAB = 6144  # of the embedded target, whose tokenizer they have
LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_chunk_size": 8, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("dense", {}),
    "qwen3_moe": ("MoE", EXPERTS),
    "gpt_oss": ("MoE, sinks, windows", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("MLA, MoE", LATENT | ROUTED),
    "qwen3_next": ("hybrid, MoE", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "falcon_h1": ("hybrid, scaled embedding and head", MAMBA),
}


def write_sharded(kind: str, folder: Path) -> Any:
    """A random target of that architecture, with the embedded one's tokenizer; transformers'
    model."""
    model = build_model(kind, vocab=VOCAB, **KINDS[kind][1])
    model.save_pretrained(folder, max_shard_size="300KB")
    AutoTokenizer.from_pretrained(resolve("tiny").path).save_pretrained(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2, "several files"
    return model
