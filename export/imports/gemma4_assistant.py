"""Gemma-4 assistants (`model_type: gemma4_assistant`), read as transformers 5 computes them.

Nothing is taken for granted: every key that says what the layers are must be there. Each of its
layers reads the last layer of its kind, sliding or full, that keeps keys and values in the target.
Letters: D hidden width, N nodes, O output width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.features.shared_kv import GROUPS, ORDER, SharedKv, SharedKvOptions
from specctl.drafters.nets.routed import PREFIX
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import (
    ELSEWHERE,
    OTHER_TARGET,
    REPAIR,
    check_names,
    check_value,
    count_of,
    dtype_of,
    refused,
)
from specctl.export.imports.published import Published
from specctl.export.readers.gemma4_assistant import ENGINE, KINDS, AssistantReader, GivenKv
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin
from specctl.runtime.target.target import Target

KIND, TEXT = "gemma4_assistant", "gemma4_text"
SLIDING, FULL = KINDS
LENGTH = 4
ROUTER = f"{PREFIX}weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
# What our layers do not have, or engines compute in two ways.
FIXED = {
    "model_type": TEXT,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": None,
}


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("model_type") == KIND


def read(published: Published, target: Target) -> Imported:
    config, text = published.config, published.config.get("text_config")
    if not isinstance(text, Mapping) or config.get("quantization_config"):
        found = "quantised weights" if config.get("quantization_config") else "no text_config"
        raise refused("config.json does not say what the layers are", found, TEXT, ELSEWHERE)
    options = _options(config, text, target)
    tensors = {name.removeprefix("model."): x for name, x in published.tensors.items()}
    drafter = _filled(options, _ours(tensors, options.head_groups), target)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, LENGTH - 1)
        given = GivenKv(target.lm, sorted({*drafter.reads}), len(trial.ids) - 1)
        by_kind = dict(zip(text["layer_types"], drafter.reads, strict=True))
        shown = {kind: given.pairs[layer] for kind, layer in by_kind.items()}
        state_D = trial.states[target.spec.num_layers][-1]
        theirs_NV = AssistantReader(config, tensors, source).drafted_logits(trial, state_D, shown)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter, given), trial))

    return Imported(drafter, ENGINE, prove, LENGTH)


# -- config.json ------------------------------------------------------------------------------


def _options(config: Mapping[str, Any], text: Mapping[str, Any], target: Target) -> SharedKvOptions:
    spec, outer, inner = target.spec, SimpleNamespace(**config), SimpleNamespace(**text)
    for key, value in FIXED.items():
        if key not in text:
            raise _missing(f"text_config.{key}")
        check_value(inner, key, value, "our layers compute something else", ELSEWHERE)
    why = f"the assistant was made for another target than {target.name}"
    check_value(outer, "backbone_hidden_size", spec.hidden_size, why, OTHER_TARGET)
    check_value(inner, "vocab_size", spec.vocab_size, why, OTHER_TARGET)
    eps = "the norms of assistant and target have other epsilons"
    check_value(inner, "rms_norm_eps", spec.norm_eps, eps, ELSEWHERE)
    check_value(outer, "tie_word_embeddings", True, "the LM head is not the embedding", ELSEWHERE)
    kinds = _kinds(inner, count_of(inner, "num_hidden_layers"))
    head_dims = tuple(_head_dim(text, at, kind) for at, kind in enumerate(kinds))
    ropes = [_rope(text, kind, width) for kind, width in zip(kinds, head_dims, strict=True)]
    window = count_of(inner, "sliding_window") if SLIDING in kinds else 0
    last = last_layers(target)
    groups, top = _clusters(outer, spec.vocab_size)
    return SharedKvOptions(
        layers=len(kinds),
        width=count_of(inner, "hidden_size"),
        heads=count_of(inner, "num_attention_heads"),
        intermediate=count_of(inner, "intermediate_size"),
        reads=tuple(last[kind] for kind in kinds),
        head_dims=head_dims,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        rope_thetas=tuple(theta for theta, _ in ropes),
        rotated=tuple(rotated for _, rotated in ropes),
        head_groups=groups,
        head_top=top,
    )


def _missing(key: str) -> Exception:
    what = "config.json does not say all that the layers are"
    return refused(what, f"no {key}", f"the key {key}", REPAIR, f"config.json:{key}")


def _kinds(inner: Any, count: int) -> tuple[str, ...]:
    kinds = getattr(inner, "layer_types", None)
    if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {*KINDS}:
        expected = f"{count} of {' and '.join(KINDS)}"
        what = "config.json does not say the kind of each layer"
        raise refused(what, f"layer_types: {kinds}", expected, REPAIR, "config.json:layer_types")
    if kinds[-1] != FULL:
        what = "transformers makes the last layer of an assistant a full one"
        raise refused(what, f"layer_types: {kinds}", f"{FULL} at last", REPAIR, "config.json")
    both = getattr(inner, "use_bidirectional_attention", None)
    if both == "all":
        what = "transformers reads a window in both directions as another one"
        raise refused(what, f"use_bidirectional_attention: {both}", "null or vision", ELSEWHERE)
    return tuple(kinds)


def _head_dim(text: Mapping[str, Any], at: int, kind: str) -> int:
    """Of that layer: its own entry, or that of all full layers; a full layer's is never that of the
    others, unless it is said."""
    by_layer = text.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        own = by_layer.get(str(at))
        if isinstance(own, Mapping) and "head_dim" in own:
            return count_of(SimpleNamespace(**own), "head_dim")
    elif kind == FULL:
        return count_of(SimpleNamespace(**text), "global_head_dim")
    return count_of(SimpleNamespace(**text), "head_dim")


def _rope(text: Mapping[str, Any], kind: str, head_dim: int) -> tuple[float, int]:
    """Base of the positions, and how many pairs of a head turn (0: all)."""
    ropes = text.get("rope_parameters")
    rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
    if not isinstance(rope, Mapping) or not {"rope_type", "rope_theta"} <= rope.keys():
        raise _missing(f"text_config.rope_parameters.{kind}")
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    theta, part = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    is_plain = rope["rope_type"] == "default" and part == 1.0
    if not (is_plain or rope["rope_type"] == "proportional") or not rope.keys() <= known:
        shown = ", ".join(f"{key} {value}" for key, value in rope.items())
        what = "the assistant's positions are not ours"
        raise refused(what, shown, "rope_type default or proportional", ELSEWHERE)
    if is_plain:
        return float(theta), 0
    turned = int(part * head_dim // 2)
    if not 0 < turned <= head_dim // 2:
        what = "the share of a head that turns is none"
        raise refused(what, f"partial_rotary_factor: {part}", "above 0, at most 1", REPAIR)
    return float(theta), turned


def _clusters(outer: Any, vocab_size: int) -> tuple[int | None, int]:
    """How many clusters of tokens there are (None: no such thing), and how many are read."""
    is_ordered = getattr(outer, "use_ordered_embeddings", None)
    if not isinstance(is_ordered, bool):
        raise _missing("use_ordered_embeddings")
    if not is_ordered:
        return None, SharedKvOptions().head_top
    groups, top = count_of(outer, "num_centroids"), count_of(outer, "centroid_intermediate_top_k")
    if vocab_size % groups or top >= groups:
        expected = f"fewer than all of so many that {vocab_size:,} ids are in clusters of one size"
        found = f"num_centroids: {groups}, centroid_intermediate_top_k: {top}"
        raise refused("the clusters do not divide the vocabulary", found, expected, REPAIR)
    return groups, top


def last_layers(target: Target) -> dict[str, int]:
    """The last layer of each kind that keeps keys and values: what assistants are shown."""
    if target.spec.model_type != TEXT:
        what = "an assistant reads the cache of a Gemma 4"
        raise refused(what, f"model_type {target.spec.model_type}", TEXT, OTHER_TARGET)
    module: Any = target.lm.module
    kinds = module.config.get_text_config().layer_types
    kept = enumerate(zip(kinds, target.lm.kv_layers, strict=True))
    last = {kind: layer for layer, (kind, shape) in kept if shape.size}
    if {*last} < {*KINDS}:
        what = "the target has no layers of one kind"
        raise refused(what, ", ".join(last), " and ".join(KINDS), OTHER_TARGET)
    return last


# -- tensors ------------------------------------------------------------------------------------


def _ours(tensors: Mapping[str, Tensor], groups: int | None) -> dict[str, Tensor]:
    """The tensors by our names; the LM head is the embedding, which nothing else reads."""
    found = dict(tensors)
    if "embed_tokens.weight" not in found:
        raise refused("a tensor is missing", "no model.embed_tokens.weight", "the rows", REPAIR)
    rows_VO = found.pop("embed_tokens.weight")
    if not torch.equal(found.setdefault("lm_head.weight", rows_VO), rows_VO):
        what = "config.json ties the LM head to the embedding, and they differ"
        raise refused(what, "an lm_head.weight of its own", "equal rows, or none", REPAIR)
    if groups is None:
        return found
    for name in (CENTROIDS, ORDERING):
        if name not in found:
            raise refused("a tensor is missing", f"no {name}", "that of the clusters", REPAIR)
    ordering_V = found.pop(ORDERING)
    size = len(rows_VO)
    if ordering_V.dtype != torch.long or not torch.equal(
        ordering_V.sort().values, torch.arange(size)
    ):
        what, shown = "the clusters do not hold every token once", ordering_V.flatten()[:4].tolist()
        raise refused(what, f"{ORDERING} begins {shown}", f"the ids 0 to {size - 1}", REPAIR)
    cluster_V = torch.empty_like(ordering_V)
    cluster_V[ordering_V] = torch.arange(size) // (size // groups)
    found |= {ROUTER: found.pop(CENTROIDS), GROUPS: cluster_V, ORDER: ordering_V}
    return found


def _filled(options: SharedKvOptions, weights: Mapping[str, Tensor], target: Target) -> SharedKv:
    """The drafter with these weights as they are stored: exactly its own."""
    with torch.device("meta"):  # shapes first, so that no size can take memory
        shell = SharedKv(options, target.spec)
    check_names(weights, shell.tensors())
    drafter = SharedKv(options, target.spec)
    numbers = {name: x for name, x in weights.items() if x.is_floating_point()}
    drafter.to(torch.device("cpu"), dtype_of(numbers))
    drafter.load_tensors(weights)
    drafter.module.eval()
    return drafter


IMPORTER = Importer("gemma4-assistant", "model_type gemma4_assistant, Gemma 4's", knows, read)
