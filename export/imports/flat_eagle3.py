"""Flat EAGLE-3 folders of SafeAILab, SpecForge, ModelOpt and SGLang: one layer, named `midlayer` or
`layers.0`, without a prefix.

Two engines read them and differ. A list of layers inside `eagle_config` counts layers (SGLang), one
at the top counts hidden states (vLLM); without any both take the same three. A missing
`norm_before_residual` is false, and SGLang knows none. The folder is proved by the rules of SGLang,
unless only vLLM would understand it.

ModelOpt's exporter writes YaRN positions (factor 32) into heads trained with plain ones, for texts
beyond the trained length: such a head is read with the positions of its training, and what it would
reach with the others is measured beside it.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from specctl.drafters.features.eagle3 import Eagle3
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.eagle3 import FED_BACK, default_layers, drafter_of
from specctl.export.imports.heads import ELSEWHERE, JUMP, REPAIR, refused, with_head
from specctl.export.imports.published import Published
from specctl.export.layouts.engines import LENGTH, taps_of_layer_ids
from specctl.export.readers import sglang_eagle, vllm_eagle3
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, twin
from specctl.runtime.target.target import Target

TIED = "tie_word_embeddings"
NAME = "LlamaForCausalLMEagle3"  # what both engines call the model, whatever its trainer wrote
LAYERS = "eagle_aux_hidden_state_layer_ids"
ADDED_YARN = {"rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"}
ROWS, OWN_NORM = "draft_vocab_size", "hidden_norm.weight"  # what no layer of a Llama has
NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    named = config.get("architectures")
    if {"speculators_config", "speculators_model_type", JUMP} & config.keys():
        return False
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        return False
    is_head = ROWS in config or any(name.endswith(OWN_NORM) for name in names)
    return "Eagle3" in named[0] or (named[0] == "LlamaForCausalLM" and is_head)


def read(published: Published, target: Target) -> Imported:
    published, yarn = _as_trained(published, target)
    tensors = {_public(name): tensor for name, tensor in published.tensors.items()}
    if len(tensors) != len(published.tensors):
        raise refused("two tensors have one meaning", "midlayer and layers.0", "one", REPAIR)
    body, is_tied = _own_head(published.config, tensors), bool(published.config.get(TIED))
    _check(body)
    head = with_head(tensors, body[ROWS], target, is_tied)
    tensors, config = dict(head.tensors), _derived(body)
    drafter = drafter_of(config, tensors, _taps(body, target.spec.num_layers), target)
    only_vllm = drafter.options.norm_before_residual or (LAYERS in body and not _nested(body))
    engine = vllm_eagle3.ENGINE if only_vllm else sglang_eagle.ENGINE

    def prove(source: ExportSource) -> None:
        trial, embedding_VD = Trial.of(source, FED_BACK), embedding_of(source)
        own = {"architectures": [NAME], "model_type": "llama", ROWS: body[ROWS], TIED: False}
        as_read = tensors if tensors.keys() != published.tensors.keys() else None
        with published.staged(as_read, **own) as folder:
            theirs = (
                vllm_eagle3.VllmEagle3(folder, embedding_VD, vllm_eagle3.flat_config)
                if only_vllm
                else sglang_eagle.SglangEagle3(folder, embedding_VD)
            ).drafted_logits(trial)
        compare(engine, theirs, drafted_logits(twin(source, drafter), trial))

    if yarn is None:
        return Imported(drafter, engine, prove, LENGTH, head.notes)
    readings = {"with the positions of config.json (YaRN)": _scaled(drafter, config, yarn)}
    return Imported(drafter, engine, prove, LENGTH, (_yarn_note(yarn), *head.notes), readings)


def _as_trained(published: Published, target: Target) -> tuple[Published, Mapping[str, Any] | None]:
    """Without the YaRN that ModelOpt's exporter adds, and what was left out; the axes of M-RoPE as
    SGLang reads them, whatever type is named; any other scaling stays, to be checked."""
    body = dict(published.config)
    scaling = body.get("rope_scaling") or body.get("rope_parameters") or {}
    if isinstance(scaling, Mapping) and "mrope_section" in scaling:  # of no type of its own
        plain = {key: value for key, value in scaling.items() if key != "type"}
        body["rope_scaling"], body["rope_parameters"] = None, {**plain, "rope_type": "default"}
        if "rope_theta" in body:
            body["rope_parameters"].setdefault("rope_theta", body["rope_theta"])
        return replace(published, config=body), None
    is_added = (
        isinstance(scaling, Mapping)
        and scaling.get("rope_type", scaling.get("type")) == "yarn"
        and set(scaling) <= ADDED_YARN
        and (target.spec.rope_scaling or {}).get("rope_type") != "yarn"
    )
    if not is_added:
        return published, None
    for key in ("factor", "original_max_position_embeddings"):
        if type(scaling.get(key, 1)) not in (int, float) or not 1 <= scaling.get(key, 1) < 1 << 31:
            what, found = "config.json scales positions by no number", f"{key}: {scaling[key]}"
            raise refused(what, found, "1 or more", REPAIR, "config.json:rope_scaling")
    theta = scaling.get("rope_theta", body.get("rope_theta"))
    body["rope_scaling"], body["rope_parameters"] = None, {"rope_type": "default"}
    if theta is not None:
        body["rope_theta"] = body["rope_parameters"]["rope_theta"] = theta
    return replace(published, config=body), scaling


def _yarn_note(scaling: Mapping[str, Any]) -> str:
    factor, length = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    return (
        f"config.json scales positions by YaRN, factor {factor}. ModelOpt's exporter adds that to "
        f"heads trained with plain positions, for texts beyond the {length} tokens of training: "
        "the head is read with plain positions. Engines that serve the original folder scale from "
        "the first token on; export the package for them, and compare by `specctl bench`."
    )


def _scaled(drafter: Eagle3, config: Any, scaling: Mapping[str, Any]) -> Eagle3:
    """The drafter with positions scaled by YaRN, to be measured: cos and sin are multiplied there,
    which queries and keys that are larger by that factor say as well."""
    from specctl.models.rope import rope_of

    theta = float(config.rope_parameters["rope_theta"])
    kind: dict[str, Any] = {
        "factor": 1.0,
        "original_max_position_embeddings": 2048,
        **scaling,
        "rope_type": "yarn",
    }
    length = int(kind["factor"] * kind["original_max_position_embeddings"])
    spec = replace(drafter.spec, rope_scaling=kind, max_positions=length)
    made = copy.copy(drafter)
    made.module = copy.deepcopy(drafter.module)
    rope = rope_of(spec, drafter.module.shape.head_dim, theta)
    made.module.shape = replace(made.module.shape, inv_freq=tuple(rope.inv_freq.tolist()))
    attention = made.module.layer.self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.mul_(rope.scale)
    return made


def _own_head(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """config.json as of a head with its own LM head: how many rows where it does not say so (those
    that are stored, else an id for each of `d2t`, else all), and not tied."""
    said = body.get(ROWS)
    if said is None:
        counted = tensors.get("lm_head.weight", tensors.get("d2t"))
        said = body.get("vocab_size") if counted is None else len(counted)
    return {**body, ROWS: said, TIED: False}


def _check(body: Mapping[str, Any]) -> None:
    """What must be written: an engine's defaults for these fit no head but by chance."""
    for key in NEEDED:
        if body.get(key) is None:
            what = "config.json does not say a size of the head"
            raise refused(what, f"no {key}", key, REPAIR, f"config.json:{key}")
    kind = body.get("model_type")
    if kind != "llama":
        what = "of flat EAGLE-3 folders those of Llama layers are imported"
        raise refused(what, f"model_type: {kind}", "llama", ELSEWHERE, "config.json:model_type")
    if body.get("quantization_config"):
        what = "the head is quantised"
        raise refused(what, "quantization_config", "plain weights", ELSEWHERE)
    if not isinstance(body[ROWS], int) or isinstance(body[ROWS], bool):
        what = "config.json does not say a size of the head"
        raise refused(
            what, f"{ROWS}: {body[ROWS]}", "a whole number", REPAIR, f"config.json:{ROWS}"
        )
    inner = body.get("eagle_config") or {}
    at_once = inner.get("parallel_draft_step", 1)
    if at_once != 1 or inner.get("use_aux_hidden_state", True) is not True:
        found = f"parallel_draft_step {at_once}, use_aux_hidden_state "
        found += str(inner.get("use_aux_hidden_state", True))
        what = "the head drafts in another way than EAGLE-3"
        raise refused(what, found, "1 and true", ELSEWHERE, "config.json:eagle_config")


def _derived(body: Mapping[str, Any]) -> Any:
    """What the engines make of config.json: missing keys are those of transformers' Llama."""
    staged = {**body, "architectures": [NAME]}
    staged.pop("auto_map", None)
    try:
        config = vllm_eagle3.flat_config(staged)
    except (TypeError, ValueError, StrictDataclassError) as error:
        found = str(error).replace("\n", " ")
        what = "transformers cannot read config.json as a Llama"
        raise refused(what, found, "its keys and kinds", REPAIR) from error
    config.fc_norm = bool(config.fc_norm or getattr(config, "use_aux_norm", False))
    return config


def _nested(body: Mapping[str, Any]) -> list[int]:
    return list((body.get("eagle_config") or {}).get(LAYERS) or [])


def _taps(body: Mapping[str, Any], num_layers: int) -> list[int]:
    """Hidden states, by whichever list there is; two that contradict each other are refused."""
    top, nested = body.get(LAYERS), taps_of_layer_ids(_nested(body))
    if top and nested and sorted(top) != sorted(nested):
        raise refused(
            "the two lists of layers say different layers",
            f"hidden states {top} at the top, {nested} by eagle_config (which counts layers)",
            "the same ones",
            "ask its author which; write both, or the right one alone",
            f"config.json:{LAYERS}",
        )
    return list(top or nested or default_layers(num_layers))


def _public(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in sglang_eagle.RENAMED.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


IMPORTER = Importer("flat-eagle3", "architectures LlamaForCausalLMEagle3 and alike", knows, read)
