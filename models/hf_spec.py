"""What a transformers configuration tells about a model: its shape, its fitness as a target."""

from __future__ import annotations

from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec

SCALED_ROPE = ("linear", "llama3", "yarn")
KINDS = ("full_attention", "sliding_attention")


def spec_of(config: Any, eos_ids: tuple[int, ...] = ()) -> ModelSpec:
    """The shape of a transformers configuration (of its text part, if it has several)."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return ModelSpec(
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=intermediate if isinstance(intermediate, int) else max(intermediate),
        norm_eps=float(
            _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5)
        ),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        max_positions=_positions(text, rope),
        bos_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
        eos_ids=eos_ids,
        pad_id=text.pad_token_id if isinstance(text.pad_token_id, int) else None,
        embed_scale=_embed_scale(text),
        rope_scaling=_rope_scaling(rope),
    )


def _positions(text: Any, rope: dict[str, Any]) -> int:
    """The context. With longrope (Phi-3) it ends where short factors do: one token further every
    position is turned by other angles, those in the cache and of other rows of a batch as well."""
    context = int(_first(text, ("max_position_embeddings",), 1 << 20))
    short = rope.get("original_max_position_embeddings")
    return min(context, int(short)) if rope.get("rope_type") == "longrope" and short else context


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type") not in SCALED_ROPE:
        return None
    return {name: value for name, value in rope.items() if value is not None}


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def _embed_scale(text: Any) -> float:
    """Factor between the embedding table and hidden_states[0]."""
    if text.model_type.startswith(("gemma", "t5gemma")):
        return float(text.hidden_size**0.5)
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def head_scale(config: Any) -> float:
    """Factor between the product with the LM head and the logits: Granite divides by its scaling,
    Cohere and HyperCLOVA X multiply."""
    text = config.get_text_config()
    scaling = getattr(text, "logits_scaling", None)
    if scaling:
        return float(scaling if text.model_type == "hyperclovax" else 1.0 / scaling)
    return float(getattr(text, "logit_scale", None) or 1.0)


def refuse_stateful(model_class: type, config: Any) -> None:
    """Raise for architectures whose state cannot be rolled back to an accepted path."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - set(KINDS)
    found = ""
    if getattr(model_class, "_is_stateful", False):
        found = f"{model_class.__name__} keeps a recurrent state"
    elif kinds:
        found = f"{model_class.__name__} has layers of kind " + ", ".join(sorted(kinds))
    elif getattr(config, "is_encoder_decoder", False):
        found = f"{model_class.__name__} is an encoder-decoder"
    elif getattr(text, "use_bidirectional_attention", None):
        found = f"{model_class.__name__} attends in both directions"
    if found:
        raise IncompatibleError(
            f"{model_class.__name__} cannot be a target",
            found=found,
            expected="a decoder of full or sliding attention, whose cache can be rolled back",
            do="choose a pure attention target, e.g. a Llama, Qwen3, Mistral, Gemma or GPT-NeoX",
        )
