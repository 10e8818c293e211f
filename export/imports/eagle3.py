"""An EAGLE-3 head of any format as our drafter: sizes, switches and taps of its configuration as
the engine derives it, tensors under the public names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.eagle3 import Eagle3, Eagle3Options
from specctl.export.imports.heads import (
    ELSEWHERE,
    OTHER_TARGET,
    REPAIR,
    check_embedding,
    check_names,
    check_value,
    count_of,
    dtype_of,
    refused,
    vocabulary,
)
from specctl.export.readers.layers import LLAMA3_FACTORS
from specctl.runtime.target.target import Target

TABLES, EMBEDDING = ("d2t", "t2d"), "embed_tokens.weight"
OFF = ("attention_bias", "mlp_bias", "norm_before_fc", "use_sliding_window")
LLAMA3 = ("rope_type", "original_max_position_embeddings", *LLAMA3_FACTORS)
FED_BACK = 3  # states of the drafter's own that the proof compares


def default_layers(num_layers: int) -> list[int]:
    """hidden_states that engines capture where config.json names none (EAGLE-3's own choice)."""
    return [2, num_layers // 2, num_layers - 3]


def drafter_of(
    config: Any, tensors: Mapping[str, Tensor], taps: Sequence[object], target: Target
) -> Eagle3:
    """The drafter, its weights as they are stored. `config` is what the engine makes of config.json
    (defaults included), `taps` the hidden states by our count."""
    _check(config, target)
    rows = getattr(config, "draft_vocab_size", None) or count_of(config, "vocab_size")
    vocab = vocabulary(tensors, rows, target.spec.vocab_size)
    check_embedding(tensors.get(EMBEDDING), target)
    weights = {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING)}
    options = _options(config, _taps(taps, target.spec.num_layers))
    with torch.device("meta"):  # shapes first, so that no size can ask for memory
        shell = Eagle3(options, target.spec, vocab)
    check_names(weights, shell.tensors())
    drafter = Eagle3(options, target.spec, vocab)
    drafter.to(torch.device("cpu"), dtype_of(weights))
    drafter.load_tensors(weights)
    drafter.bind(target.borrowed())
    drafter.module.eval()
    return drafter


def _check(config: Any, target: Target) -> None:
    """What our layer computes, and the target's own sizes."""
    spec = target.spec
    width = f"the head was made for another target than {target.name}"
    for key, expected in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        count_of(config, key)
        check_value(config, key, expected, width, OTHER_TARGET)
    taken = getattr(config, "target_hidden_size", None)
    if taken is not None and taken != spec.hidden_size:
        found = f"target_hidden_size: {taken}"
        raise refused(width, found, f"{spec.hidden_size}, or none", OTHER_TARGET)
    check_value(config, "num_hidden_layers", 1, "the head has not one layer", ELSEWHERE)
    eps = "the norms of head and target have other epsilons"
    check_value(config, "rms_norm_eps", spec.norm_eps, eps, ELSEWHERE)
    act = getattr(config, "hidden_act", "silu")
    if act != "silu":
        raise refused("the head has another activation", f"hidden_act: {act}", "silu", ELSEWHERE)
    for key in OFF:
        if getattr(config, key, False):
            found = f"{key}: {getattr(config, key)}"
            raise refused("our layer has no such part", found, f"{key}: false", ELSEWHERE)
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    if layers[0] != "full_attention":
        what = "the head looks through a window"
        raise refused(what, f"layer_types: {layers}", "full_attention", ELSEWHERE)
    _check_positions(config, spec.rope_scaling or {})


def _check_positions(config: Any, target: Mapping[str, Any]) -> None:
    """Plain rotary positions of any base, or the target's own where they are Llama 3's. (`type` is
    the old spelling of `rope_type`.)"""
    for rope in (config.rope_parameters, getattr(config, "rope_scaling", None) or {}):
        kind = rope.get("rope_type", rope.get("type", "default"))
        is_shared = kind == "llama3" and all(rope.get(key) == target.get(key) for key in LLAMA3)
        if (kind != "default" and not is_shared) or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise refused(
                "the head scales its positions in a way that ours are not",
                ", ".join(f"{key} {value}" for key, value in rope.items()),
                "rope_type default over the whole head, or llama3 just as the target's",
                ELSEWHERE,
                "config.json:rope_parameters",
            )


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
    )


def _taps(ids: Sequence[object], num_layers: int) -> tuple[int, ...]:
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
