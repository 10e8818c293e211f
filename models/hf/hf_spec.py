"""What a transformers configuration tells about a model: its shape, its fitness as a target."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.forward.attention_only import AttentionOnly
from specctl.core.spec import ModelSpec

SCALED_ROPE = ("linear", "llama3", "yarn")
CONTEXTS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
KINDS = ("full_attention", "sliding_attention")


OTHER_KINDS = {
    "linear_attention": "a recurrent state (linear attention or a state space)",
    "mamba": "a recurrent state (linear attention or a state space)",  # its name in 5.10
    "conv": "a convolution's state",
    "chunked_attention": "attention in chunks",
    "indexed_attention": "attention to keys that an indexer picks",
    "heavily_compressed_attention": "compressed keys",
    "compressed_sparse_attention": "compressed keys",
    "hybrid": "a recurrent state beside attention",
    "hybrid_sliding": "a recurrent state beside attention",
}
STATE_KINDS = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
CONVOLUTION = "causal_conv1d_fn"  # in every file of transformers whose states are kept here
DELTA, KIMI = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
MAMBA2, MAMBA1 = "mamba2_chunk_scan", "mamba_selective_scan"
SCANS = (DELTA, KIMI, MAMBA2, MAMBA1)  # of the states that are kept here, by transformers' names
PLAIN_HEADS = (  # whose logits are the normed last state times the head, and nothing more
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
LOGIT_DIVISOR = "logits_mup_width_multiplier"
HEAD_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
USUAL_HEAD = 64  # width of a head, for drafters of a model that has no heads itself
ALIBI = ("bloom", "mpt")  # no switch says so in their configurations
KERNELS = logging.getLogger("transformers.integrations.hub_kernels")


def _is_no_hint(record: logging.LogRecord) -> bool:
    """Whether it is no advice to install a fused scan: rounds do not call these, and training is
    said to gain from them in docs/targets.md."""
    return "falling back to its reference" not in record.getMessage()


KERNELS.addFilter(_is_no_hint)  # a filter that is there already is not added again


def field_of(config: Any, name: str, default: Any = None) -> Any:
    """A field of a foreign configuration; the default where it is absent, or differs by layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers' word for a field that layers do not share
        return default


def spec_of(config: Any, eos_ids: tuple[int, ...] = ()) -> ModelSpec:
    """The shape of a transformers configuration (of its text part, if it has several)."""
    text = config.get_text_config()
    rope = field_of(text, "rope_parameters") or {}
    kinds = [rope[kind] for kind in KINDS if rope.get(kind)]  # full layers may go without
    rope = kinds[0] if kinds else rope
    heads = _first(text, ("decoder_attention_heads", "num_attention_heads"), None)
    heads = heads or max(1, text.hidden_size // USUAL_HEAD)  # a state space has none
    head_dim = field_of(text, "head_dim") or text.hidden_size // heads
    intermediate = field_of(text, "intermediate_size") or 4 * text.hidden_size
    return ModelSpec(
        model_type=text.model_type,
        num_layers=_first(text, ("decoder_layers", "num_hidden_layers"), None),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_heads=heads,
        num_kv_heads=field_of(text, "num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=intermediate if isinstance(intermediate, int) else max(intermediate),
        norm_eps=float(
            _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5)
        ),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        max_positions=_positions(text, rope),
        bos_id=_token_id(text, "bos_token_id"),
        eos_ids=eos_ids,
        pad_id=_token_id(text, "pad_token_id"),
        embed_scale=_embed_scale(text),
        rope_scaling=_rope_scaling(rope),
    )


def _token_id(config: Any, name: str) -> int | None:
    found = field_of(config, name)
    return found if isinstance(found, int) else None


def _positions(text: Any, rope: dict[str, Any]) -> int:
    """The context. With longrope (Phi-3) it ends where short factors do: one token further every
    position is turned by other angles, those in the cache and of other rows of a batch as well."""
    context = int(_first(text, CONTEXTS, 1 << 20))
    short = rope.get("original_max_position_embeddings")
    return min(context, int(short)) if rope.get("rope_type") == "longrope" and short else context


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type") not in SCALED_ROPE:
        return None
    return {name: value for name, value in rope.items() if value is not None}


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    found = (field_of(config, name) for name in names)
    return next((value for value in found if value is not None), default)


def _embed_scale(text: Any) -> float:
    """Factor between the embedding table and hidden_states[0]."""
    if text.model_type.startswith(("gemma", "t5gemma")):
        return float(text.hidden_size**0.5)
    if hasattr(text, LOGIT_DIVISOR):  # where `embedding_multiplier` is another name of it
        return 1.0
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def head_scale(config: Any) -> float:
    """Factor between the product with the LM head and the logits: Granite and MiniCPM divide by
    their scaling, Inkling by its width's, Cohere, HyperCLOVA X, Falcon-H1 and Muse multiply."""
    text = config.get_text_config()
    scaling = getattr(text, "logits_scaling", None)
    if scaling:
        return float(scaling if text.model_type == "hyperclovax" else 1.0 / scaling)
    divisor = getattr(text, LOGIT_DIVISOR, None)
    if divisor:
        return float(1.0 / divisor)
    found = (getattr(text, name, None) for name in HEAD_FACTORS)
    return float(next((factor for factor in found if factor), 1.0))


def holds_states(model_class: type, config: Any) -> bool:
    """Whether layers keep a recurrent state or a convolution's, in a way that `state_mixers` knows:
    whether it is right is tried on loading."""
    return has_state_layers(config) and hasattr(
        sys.modules.get(model_class.__module__), CONVOLUTION
    )


def scans_of(model: Any) -> tuple[str, ...]:
    """The functions that move the states of a model, by transformers' names."""
    files = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    return tuple(name for name in SCANS if any(hasattr(sys.modules[f], name) for f in files))


def numbers_added(scans: tuple[str, ...], recurrent: tuple[int, ...]) -> int:
    """How many numbers say what a token adds to a state of that shape (`state_forms`): a key, a
    value and decays of every head; of Mamba 1 a step and an input of every channel and a key."""
    if not recurrent:
        return 0
    *heads, rows, columns = recurrent
    each = [2 * rows + columns if name in (KIMI, MAMBA1) else rows + columns + 1 for name in scans]
    return prod(heads) * max(each, default=0)


def has_state_layers(config: Any) -> bool:
    """Whether layers keep a recurrent state or a convolution's, of whatever kind."""
    return bool(set(field_of(config.get_text_config(), "layer_types") or ()) & {*STATE_KINDS})


def refuse_with_states(config: Any, wanted: Sequence[AttentionOnly], where: str = "") -> None:
    """Raise where something is wanted that needs a target of attention alone."""
    if wanted and has_state_layers(config):
        raise wanted[0].error(config.get_text_config().model_type, where)


def refuse_stateful(
    model_class: type, config: Any, is_read_only: bool = False, may_hold: bool = False
) -> None:
    """Raise for architectures whose state cannot be kept to an accepted path. One that is only read
    (`is_read_only`) need not be, but it must be a causal decoder. `may_hold`: states of a known
    kind are no reason."""
    text = config.get_text_config()
    kinds = set(field_of(text, "layer_types") or KINDS) - {*KINDS, "mlp", "moe"}
    is_known = may_hold and holds_states(model_class, config)
    kinds -= {*STATE_KINDS} if is_known else set()
    found = ""
    if kinds and not is_read_only:
        found = "layers with " + ", ".join(sorted({OTHER_KINDS.get(kind, kind) for kind in kinds}))
    elif getattr(model_class, "_is_stateful", False) and not (is_read_only or is_known):
        found = "a state beside its keys and values"
    elif field_of(config, "is_encoder_decoder"):
        found = "an encoder-decoder"
    elif field_of(text, "use_bidirectional_attention") not in (None, False, "vision"):
        found = "attention in both directions"
    if found:
        raise IncompatibleError(
            f"{model_class.__name__} cannot be a target",
            found=found,
            expected="a decoder of full or sliding attention"
            + (", or with recurrent layers of a kind that is kept here" if may_hold else ""),
            do="choose another, e.g. a Llama, Qwen3, Mistral or Gemma"
            + (", Qwen3.5 or LFM2 (docs/targets.md)" if may_hold else ""),
        )
