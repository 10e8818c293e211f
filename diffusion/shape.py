"""The two layouts of published masked diffusion models, as their config.json and tensors name them.

LLaDA (https://arxiv.org/abs/2502.09992): OLMo's names (`d_model`, `model.transformer.blocks.0.*`),
the token of a position is predicted there. Dream (https://arxiv.org/abs/2508.15487): Qwen2's names,
biases on q, k and v, and, as it was made of an autoregressive model, the token of a position is
predicted at the position before it (`shifted`). Both are Llama-shaped without a causal mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.storage.diffusion_kinds import DREAM, KINDS, LLADA, diffusion_kind
from specctl.models.llama.llama import LlamaShape

# Field: its key in the config of each layout.
_KEYS = {
    "num_layers": ("n_layers", "num_hidden_layers"),
    "hidden_size": ("d_model", "hidden_size"),
    "num_heads": ("n_heads", "num_attention_heads"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "intermediate_size": ("mlp_hidden_size", "intermediate_size"),
    "norm_eps": ("rms_norm_eps", "rms_norm_eps"),
    "rope_theta": ("rope_theta", "rope_theta"),
    "max_positions": ("max_sequence_length", "max_position_embeddings"),
    "vocab_size": ("embedding_size", "vocab_size"),
    "mask_id": ("mask_token_id", "mask_token_id"),
    "tied": ("weight_tying", "tie_word_embeddings"),
}
# What must hold for the model to be computed as here; a key that is left out holds.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    LLADA: {
        "block_type": ("llama",),
        "activation_type": ("silu",),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "alibi": (False,),
        "include_bias": (False,),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "scale_logits": (False,),
    },
    DREAM: {
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "rope_parameters": (None,),  # transformers 5 moves theta there
        "use_mrope": (False,),
        "use_sliding_window": (False,),
    },
}
# What a field may be, where it is no count.
_EXPECTED = {
    "norm_eps": "a number above 0",
    "rope_theta": "a number above 0",
    "tied": "true or false",
    "mask_id": "a token id",
}
# LLaDA's names of the parts of a block, by Llama's.
_LLADA_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA_OUTER = {
    "model.embed_tokens.weight": "model.transformer.wte.weight",
    "model.norm.weight": "model.transformer.ln_f.weight",
    "lm_head.weight": "model.transformer.ff_out.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class DiffusionShape:
    """Sizes and switches of a masked diffusion model; `mask_id` is the token of a masked position,
    `vocab_size` the rows of the embedding."""

    layout: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    mask_id: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tied: bool = False
    attention_bias: bool = False

    @property
    def shifted(self) -> bool:
        """Whether the token of a position is predicted at the position before it."""
        return self.layout == DREAM

    @property
    def llama(self) -> LlamaShape:
        """The same sizes for the parameters."""
        return LlamaShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            intermediate_size=self.intermediate_size,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            tied=self.tied,
            attention_bias=self.attention_bias,
        )

    @property
    def config(self) -> dict[str, Any]:
        """config.json of its layout."""
        column = KINDS.index(self.layout)
        body = {keys[column]: getattr(self, name) for name, keys in _KEYS.items()}
        if self.layout == DREAM:
            return {"model_type": "Dream", "architectures": ["DreamModel"], **body}
        fixed = {key: allowed[0] for key, allowed in _FIXED[LLADA].items()}
        return {
            "model_type": "llada",
            "architectures": ["LLaDAModelLM"],
            **body,
            **fixed,
            "vocab_size": self.vocab_size,
            "include_qkv_bias": self.attention_bias,
        }

    def stored_name(self, name: str) -> str:
        """The name in a checkpoint of its layout for a parameter's name of Llama."""
        if self.layout == DREAM:
            return name
        found = _LAYER.fullmatch(name)
        if found is None:
            return _LLADA_OUTER[name]
        return f"model.transformer.blocks.{found[1]}.{_LLADA_PARTS[found[2]]}.{found[3]}"


def shape_from(config: Mapping[str, Any], where: str) -> DiffusionShape:
    """The shape that a config.json describes; IncompatibleError names the first key that says
    something else than what is computed here."""
    layout = diffusion_kind(config)
    if layout is None:
        raise _refused("model_type", config.get("model_type"), "llada or Dream", where)
    column, given = KINDS.index(layout), dict(config)
    for key, allowed in _FIXED[layout].items():
        if key in given and given[key] not in allowed:
            raise _refused(key, given[key], allowed[0], where)
    if layout == LLADA:
        given.setdefault("embedding_size", None)
        given["embedding_size"] = given["embedding_size"] or given.get("vocab_size")
    if given.get(_KEYS["num_kv_heads"][column]) is None:
        given[_KEYS["num_kv_heads"][column]] = given.get(_KEYS["num_heads"][column])
    values: dict[str, Any] = {}
    for name, keys in _KEYS.items():
        value = given.get(keys[column])
        if value is None and name == "tied":
            continue  # the tensors say it: a head of its own is stored or missing
        if not _is_of(name, value):
            found = "nothing" if value is None else repr(value)
            raise _refused(keys[column], found, _EXPECTED.get(name, "a count"), where)
        values[name] = value
    has_bias = layout == DREAM or bool(given.get("include_qkv_bias"))
    shape = DiffusionShape(layout, attention_bias=has_bias, **values)
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        heads = f"{shape.num_heads} and {shape.num_kv_heads}"
        raise _refused("heads", heads, f"counts that divide {shape.hidden_size}", where)
    if not 0 <= shape.mask_id < shape.vocab_size:
        raise _refused("mask_token_id", shape.mask_id, f"below {shape.vocab_size:,}", where)
    return shape


def _is_of(name: str, value: Any) -> bool:
    """Whether a config's value may be that field's."""
    if name == "tied" or isinstance(value, bool):
        return name == "tied" and isinstance(value, bool)
    if name in ("norm_eps", "rope_theta"):
        return isinstance(value, int | float) and 0 < value < math.inf
    return isinstance(value, int) and value >= (0 if name == "mask_id" else 1)


def _refused(key: str, found: Any, expected: Any, where: str) -> IncompatibleError:
    return IncompatibleError(
        f"the configuration of this diffusion model is not computed here: {key}",
        where=where,
        found=str(found)[:80],
        expected=str(expected),
        do="take a checkpoint in the layout of LLaDA-8B or Dream-7B",
    )
