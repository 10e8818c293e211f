"""An EAGLE-3 head of any format as our drafter: sizes, switches and taps of its configuration as
the engine derives it, tensors under the public names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specctl.drafters.features.eagle3 import Eagle3, Eagle3Options
from specctl.export.imports.heads import (
    OTHER_TARGET,
    REPAIR,
    check_embedding,
    count_of,
    filled,
    refused,
    vocabulary,
)
from specctl.export.imports.layers import FULL, SLIDING, check_layers, check_positions
from specctl.export.readers.layers import LLAMA3_FACTORS
from specctl.models.axes import axes_of_section
from specctl.runtime.target.target import Target

TABLES, EMBEDDING = ("d2t", "t2d"), "embed_tokens.weight"
LLAMA3 = ("rope_type", "original_max_position_embeddings", *LLAMA3_FACTORS)
FED_BACK = 3  # states of the drafter's own that the proof compares


def default_layers(num_layers: int) -> list[int]:
    """hidden_states that engines capture where config.json names none (EAGLE-3's own choice)."""
    return [2, num_layers // 2, num_layers - 3]


def drafter_of(
    config: Any,
    tensors: Mapping[str, Tensor],
    taps: Sequence[object],
    target: Target,
    kinds: Sequence[str] = (FULL,),
) -> Eagle3:
    """The drafter, its weights as they are stored. `config` is what the engine makes of config.json
    (defaults included), `taps` the hidden states by our count, `kinds` the attention that it has
    layers for."""
    check_layers(config, target, 1, kinds)
    scaling = target.spec.rope_scaling or {}
    check_positions(config, [{key: scaling.get(key) for key in LLAMA3}])
    rows = getattr(config, "draft_vocab_size", None) or count_of(config, "vocab_size")
    vocab = vocabulary(tensors, rows, target.spec.vocab_size)
    check_embedding(tensors.get(EMBEDDING), target)
    weights = {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING)}
    options = _options(config, read_taps(taps, target.spec.num_layers))
    drafter = filled(lambda: Eagle3(options, target.spec, vocab), weights)
    drafter.bind(target.borrowed())
    return drafter


def _options(config: Any, taps: tuple[int, ...]) -> Eagle3Options:
    heads = count_of(config, "num_attention_heads")
    whole = getattr(config, "head_dim", None) is None
    return Eagle3Options(
        taps=taps,
        fc_norm=bool(config.fc_norm),
        norm_output=bool(config.norm_output),
        qk_norm=config.model_type == "qwen3",
        heads=heads,
        kv_heads=count_of(config, "num_key_value_heads"),
        head_dim=config.hidden_size // heads if whole else count_of(config, "head_dim"),
        intermediate=count_of(config, "intermediate_size"),
        norm_before_residual=bool(config.norm_before_residual),
        rope_theta=float(config.rope_parameters["rope_theta"]),
        scaled_rope=config.rope_parameters.get("rope_type") == "llama3",
        mrope=_axes(config, config.hidden_size // heads if whole else config.head_dim),
        **_window(config),
    )


def _axes(config: Any, head_dim: int) -> tuple[int, ...] | None:
    """The axes of M-RoPE, for heads of that width, which engines rotate by if they are named."""
    rope = config.rope_parameters
    section = rope.get("mrope_section")
    if section is None:
        return None
    is_list = isinstance(section, list) and [type(count) for count in section] == [int] * 3
    if not is_list or min(section) < 0 or sum(section) != head_dim // 2:
        raise refused(
            "config.json gives M-RoPE other frequencies than the head has",
            f"mrope_section: {section}",
            f"three numbers whose sum is {head_dim // 2}",
            REPAIR,
            "config.json:rope_scaling",
        )
    return axes_of_section(section, bool(rope.get("mrope_interleaved", False)))


def _window(config: Any) -> dict[str, Any]:
    """Steps of training say nothing of a checkpoint; a window must hold those that are unrolled."""
    if SLIDING not in (getattr(config, "layer_types", None) or ()):
        return {}
    size = count_of(config, "sliding_window")
    return {"window": size, "ttt_steps": min(size, Eagle3Options().ttt_steps)}


def read_taps(ids: Sequence[object], num_layers: int) -> tuple[int, ...]:
    """Lowest first, as engines hand them out whatever the order of the list."""
    taps = [tap for tap in ids if isinstance(tap, int) and 0 <= tap < num_layers]
    if len(set(taps)) != len(ids):
        raise refused(
            "a layer that the head reads is none of this target",
            f"hidden states {list(ids)} of {num_layers} layers",
            f"distinct ones from 0 to {num_layers - 1}",
            OTHER_TARGET + "; " + REPAIR,
            "config.json:eagle_aux_hidden_state_layer_ids",
        )
    return tuple(sorted(taps))
