"""A checkpoint of blocks, of any format and with any correction, as our drafter: Qwen3 layers over
injected features, under the published names. Embedding and LM head are the target's, whether the
folder repeats them or not; a mask that is no row of the target's embedding becomes a vector of the
drafter's own.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from specctl.drafters import families
from specctl.drafters.blocks.dflash import DFlashOptions, InjectedBlocks
from specctl.drafters.nets.blocks import LayerShape
from specctl.export.imports.heads import (
    ELSEWHERE,
    OTHER_TARGET,
    REPAIR,
    check_embedding,
    check_head,
    count_of,
    filled,
    refused,
    vocabulary,
)
from specctl.export.imports.layers import FULL, SLIDING, check_layers, check_positions
from specctl.export.layouts.block_names import own_tensors
from specctl.runtime.target.target import Target

CAUSAL_KEYS = ("causal", "is_causal", "causal_head")  # vLLM's and ModelOpt's, SGLang's, JetSpec's
EMBEDDING, HEAD, TABLES = "embed_tokens.weight", "lm_head.weight", ("d2t", "t2d")


@dataclass(frozen=True, slots=True)
class BlockReading:
    """What an engine makes of config.json: `taps` as hidden states, the token of the mask, how many
    tokens are drafted, the family and the options of its correction; `is_causal`: a slot sees only
    those before it; `window`: the rows that it sees, itself counted (None: all)."""

    config: Any
    taps: Sequence[object]
    mask_id: object
    num_drafted: int
    family: str
    own: Mapping[str, Any] = field(default_factory=dict)
    is_causal: bool = False
    window: int | None = None


def drafter_of(
    reading: BlockReading, tensors: Mapping[str, Tensor], target: Target
) -> InjectedBlocks:
    """The drafter, its weights as they are stored."""
    config, spec = reading.config, target.spec
    check_layers(config, target, kinds=(FULL, SLIDING))
    check_positions(config)
    rows = getattr(config, "draft_vocab_size", None) or spec.vocab_size
    vocab = vocabulary(tensors, rows, spec.vocab_size)
    beside = {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING, HEAD)}
    weights = own_tensors(beside, reading.family)
    check_head(tensors.get(HEAD), vocab, target)
    mask_id = _mask_id(reading, spec.vocab_size)
    own_mask_D = own_mask(tensors.get(EMBEDDING), mask_id, target)
    if own_mask_D is not None:
        weights["mask"] = own_mask_D
    mask = mask_id if own_mask_D is None else None
    options, family = options_of(reading, mask, target), families()[reading.family]

    def made() -> InjectedBlocks:
        return cast(InjectedBlocks, family.build(family.options(**options), spec, vocab))

    drafter = filled(made, weights)
    drafter.bind(target.borrowed())
    return drafter


def options_of(reading: BlockReading, mask_id: int | None, target: Target) -> dict[str, Any]:
    """The family's options."""
    return {
        "num_heads": reading.num_drafted,
        "layers": count_of(reading.config, "num_hidden_layers"),
        "taps": _taps(reading.taps, target.spec.num_layers),
        "mask_id": mask_id,
        "causal": reading.is_causal,
        "window": reading.window,
        **_shape(reading.config, target),
        **reading.own,
    }


def _shape(config: Any, target: Target) -> dict[str, Any]:
    """Sizes of the layers, where they are not the target's own."""
    sizes: dict[str, Any] = {
        "heads": count_of(config, "num_attention_heads"),
        "kv_heads": count_of(config, "num_key_value_heads"),
        "head_dim": count_of(config, "head_dim"),
        "intermediate": count_of(config, "intermediate_size"),
        "rope_theta": float(config.rope_parameters["rope_theta"]),
    }
    is_same = DFlashOptions(**sizes).shape(target.spec) == LayerShape.of(target.spec)
    return {} if is_same else sizes


def _mask_id(reading: BlockReading, size: int) -> int:
    found = reading.mask_id
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < size:
        raise refused(
            "config.json does not say which token's embedding stands for what is not known yet",
            f"mask_token_id: {found}",
            f"an id of the target, 0 to {size - 1:,}",
            "ask its author, and write it into dflash_config (z-lab's first checkpoints: the first "
            "id behind the tokenizer's own)",
            "config.json:mask_token_id",
        )
    return found


def own_mask(rows_VD: Tensor | None, mask_id: int, target: Target) -> Tensor | None:
    """[D]: the mask's row, where it alone differs from the target's embedding."""
    if rows_VD is None:
        check_embedding(None, target)
        return None
    borrowed = target.borrowed()
    theirs_VD = (borrowed.embedding_VD * borrowed.embed_scale).detach().cpu().to(rows_VD.dtype)
    if rows_VD.shape == theirs_VD.shape:
        differs_V = (rows_VD != theirs_VD).any(-1)
        if differs_V.any() and differs_V.nonzero()[:, 0].tolist() == [mask_id]:
            return rows_VD[mask_id].clone()
    check_embedding(rows_VD, target)
    return None


def _taps(taps: Sequence[object], num_layers: int) -> tuple[int, ...]:
    """Lowest first, as engines hand them out."""
    known = [tap for tap in taps if isinstance(tap, int) and not isinstance(tap, bool)]
    known = [tap for tap in known if 0 <= tap < num_layers]
    if not known or len(set(known)) != len(taps):
        raise refused(
            "a layer that the head reads is none of this target",
            f"hidden states {list(taps)} of {num_layers} layers",
            f"distinct ones from 0 to {num_layers - 1}",
            OTHER_TARGET + "; " + REPAIR,
            "config.json:target_layer_ids",
        )
    return tuple(sorted(known))


def is_causal(settings: Mapping[str, Any]) -> bool:
    """Whether a slot of the block sees only those before it; none of the keys means it does not."""
    said = {key: settings[key] for key in CAUSAL_KEYS if settings.get(key) is not None}
    if any(not isinstance(value, bool) for value in said.values()) or len({*said.values()}) > 1:
        what = "config.json does not say how slots of the block attend to each other"
        found = ", ".join(f"{key}: {value}" for key, value in said.items())
        raise refused(what, found, "the same, true or false, under each", REPAIR)
    return any(said.values())


def window_of(config: Any, settings: Mapping[str, Any]) -> int | None:
    """The window of all layers. Engines do not agree on how slots see each other through one where
    config.json does not say, so it must."""
    layers, where = getattr(config, "layer_types", None) or [FULL], "config.json:layer_types"
    window, forced = getattr(config, "sliding_window", None), settings.get("swa_window_size")
    if settings.get("use_swa") and (SLIDING not in layers or forced not in (None, window)):
        found = f"use_swa with layer_types: {layers}, {window} and swa_window_size: {forced} rows"
        what = "a window is forced upon all layers, and config.json says others of each layer"
        raise refused(what, found, "the same window in layer_types", REPAIR, where)
    if SLIDING not in layers:
        return None
    if set(layers) != {SLIDING} or not isinstance(window, int):
        found = f"layer_types: {layers}, sliding_window: {window}"
        what = "some layers of the head have a window and some have none, or it has no size"
        raise refused(what, found, "the same window in every layer, or none", ELSEWHERE, where)
    if all(settings.get(key) is None for key in CAUSAL_KEYS):
        what = "config.json does not say how slots of the block see each other through a window"
        found = f"layer_types: {layers} without is_causal"
        do = "write is_causal into config.json as it was trained (published DFlash2: false)"
        raise refused(what, found, "is_causal: true or false", do, where)
    return window


# Learned logits of heads, in the words of vLLM's blocks and of MiMo-V2's layers. MiMo-V2's DFlash
# and Nemotron-H's DSpark have them. The first scales its values, too, and has its mask in another
# file; the second has the other layout of slots: neither could be read for these logits alone.
SINK_LOGITS = (
    "attention_sink_bias",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
)
LOGITS_ARE = (
    "every attention head has a learned logit beside its scores (an attention sink as gpt-oss has "
    "them), which our blocks have not; their `sink` is the first tokens, which a window keeps"
)
VARIANTS: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "markov_head_type": (None, "vanilla"),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    **dict.fromkeys(SINK_LOGITS, (None, False)),
    "enable_confidence_head": (None, True),
    "use_confidence_head": (None, True),
    "confidence_head_with_markov": (None, True),
    "attention_value_scale": (None, 1.0),
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "use_gemma_norm": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
}


def refuse_variants(settings: Mapping[str, Any], **others: tuple[Any, ...]) -> None:
    """Switches of the published blocks, in SGLang or vLLM, that ours do not have; `others` are the
    values that a family has instead. (Those that come with tensors of their own would be refused
    for these.)"""
    for key, values in {**VARIANTS, **others}.items():
        found = settings.get(key)
        if not any(found is value or (found == value and value) for value in values):
            what = "the head has a part, or a way to attend, that our blocks have not"
            what = LOGITS_ARE if key in SINK_LOGITS else what
            shown = [str(value).lower() for value in values if value is not None] or ["none"]
            expected = f"{key}: {', '.join(shown)}"
            raise refused(what, f"{key}: {found}", expected, ELSEWHERE, f"config.json:{key}")
