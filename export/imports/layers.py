"""What importers check of decoder layers: they are Llama's or Qwen3's as ours are, beside a target
of the same width, vocabulary and epsilon, with positions that ours can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.export.imports.heads import (
    ELSEWHERE,
    OTHER_TARGET,
    REPAIR,
    check_value,
    count_of,
    refused,
)
from specctl.runtime.target.target import Target

OFF = ("attention_bias", "mlp_bias", "norm_before_fc")
FULL, SLIDING = "full_attention", "sliding_attention"


def derived_config(body: Mapping[str, Any], kind: str) -> Any:
    """What transformers' `llama` or `qwen3` makes of config.json, by which engines read it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, Qwen3Config

    found = body.get("model_type")
    if found != kind or body.get("quantization_config"):
        shown = "quantization_config" if found == kind else f"model_type: {found}"
        raise refused(f"of such heads plain {kind} layers are imported", shown, kind, ELSEWHERE)
    made: Any = LlamaConfig if kind == "llama" else Qwen3Config
    try:
        return made(**{key: value for key, value in body.items() if key != "auto_map"})
    except StrictDataclassError as error:
        shown = str(error).replace("\n", " ")
        what = f"transformers cannot read config.json as a {kind}"
        raise refused(what, shown, "its keys and kinds", REPAIR) from error


def check_layers(
    config: Any, target: Target, num_layers: int | None = None, kinds: Sequence[str] = (FULL,)
) -> None:
    """What our layers compute, and the target's own sizes; `num_layers` of them (None: any), of
    these kinds."""
    spec = target.spec
    width = f"the head was made for another target than {target.name}"
    for key, expected in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        count_of(config, key)
        check_value(config, key, expected, width, OTHER_TARGET)
    taken = getattr(config, "target_hidden_size", None)
    if taken is not None and taken != spec.hidden_size:
        found = f"target_hidden_size: {taken}"
        raise refused(width, found, f"{spec.hidden_size}, or none", OTHER_TARGET)
    if num_layers is not None:
        what = "the head has not one layer" if num_layers == 1 else "the head has other layers"
        check_value(config, "num_hidden_layers", num_layers, what, ELSEWHERE)
    eps = "the norms of head and target have other epsilons"
    check_value(config, "rms_norm_eps", spec.norm_eps, eps, ELSEWHERE)
    act = getattr(config, "hidden_act", "silu")
    if act != "silu":
        raise refused("the head has another activation", f"hidden_act: {act}", "silu", ELSEWHERE)
    for key in OFF if SLIDING in kinds else (*OFF, "use_sliding_window"):
        if getattr(config, key, False):
            found = f"{key}: {getattr(config, key)}"
            raise refused("our layer has no such part", found, f"{key}: false", ELSEWHERE)
    scale = getattr(config, "logit_scale", None)
    if scale not in (None, 1):
        raise refused("the head scales its logits", f"logit_scale: {scale}", "1", ELSEWHERE)
    layers = getattr(config, "layer_types", None) or [FULL]
    if any(kind not in kinds for kind in layers):
        what = "the head looks through a window"
        raise refused(what, f"layer_types: {layers}", FULL, ELSEWHERE)


def check_positions(config: Any, shared: Sequence[Mapping[str, Any]] = ()) -> None:
    """Plain rotary positions of any base, or those `shared` with the target where these are Llama
    3's. (`type` is the old spelling of `rope_type`.)"""
    for rope in (config.rope_parameters, getattr(config, "rope_scaling", None) or {}):
        kind = rope.get("rope_type", rope.get("type", "default"))
        is_shared = kind == "llama3" and any(
            all(rope.get(key) == value for key, value in one.items()) for one in shared
        )
        is_part = rope.get("partial_rotary_factor", 1.0) != 1.0 or "rope_dim" in rope
        if (kind != "default" and not is_shared) or is_part:
            raise refused(
                "the head scales its positions in a way that ours are not",
                ", ".join(f"{key} {value}" for key, value in rope.items()),
                "rope_type default over the whole head"
                + (", or llama3 just as the target's" if shared else ""),
                ELSEWHERE,
                "config.json:rope_parameters",
            )
