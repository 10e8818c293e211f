"""Random tiny models of any architecture."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LOGIT_STD = (
    2.5  # of the random distributions: peaked (top token about a third) but far from one-hot
)

EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "qwen2": {"use_sliding_window": False},
    "phi": {"partial_rotary_factor": 0.5},
}


def build_model(
    model_type: str = "llama",
    num_layers: int = 4,
    hidden: int = 32,
    vocab: int = 96,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Any:
    """A random transformers model whose logits have standard deviation `LOGIT_STD`."""
    base: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model_type in ("gpt_neox", "phi", "gpt2", "opt", "falcon"):
        del base["head_dim"], base["num_key_value_heads"]
    config = AutoConfig.for_model(model_type, **{**base, **EXTRA.get(model_type, {}), **fields})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        std = model(torch.randint(0, vocab, (1, 32))).logits.std()
        model.get_output_embeddings().weight.mul_(LOGIT_STD / std)
    return model.to(dtype)


@torch.no_grad()
def with_weak_layers(model: Any, first: int = 2) -> Any:
    """The Llama-shaped model, whose layers from that one on add little: those before say much of
    what it says, so that their drafts are accepted now and then."""
    for layer in model.model.layers[first:]:
        layer.self_attn.o_proj.weight.mul_(0.25)
        layer.mlp.down_proj.weight.mul_(0.25)
    return model
