"""A shared-kv drafter as a Gemma-4 assistant (transformers' `gemma4_assistant`): config.json and
weights in the layout that `specctl import` reads, beside a Gemma-4 target only.

Engines show an assistant's layers the last layer of the target of their kind, sliding or full, so a
drafter that reads other layers has no place here. The LM head is the assistant's embedding; the
router's rows are its centroids.
Letters: V target vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.core.errors import GateError, IncompatibleError
from specctl.drafters.features.shared_kv import GROUPS, ORDER, SharedKv, listed
from specctl.export.formats import ExportSource, Format
from specctl.export.imports.gemma4_assistant import (
    CENTROIDS,
    FIXED,
    FULL,
    KIND,
    ORDERING,
    ROUTER,
    SLIDING,
    last_layers,
    read,
)
from specctl.export.imports.published import Published
from specctl.export.layouts.engines import dtype_fields, dump_json, special_ids, vllm_command
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors

OUTER = ("pre_projection.", "post_projection.")  # names without `model.` in front
UNREAD = {"rope_type": "default", "rope_theta": 10_000.0}  # of a kind that no layer is of
OTHER = "draft with it in specctl, or train it with drafter.options that an assistant can have"


@dataclass(frozen=True, slots=True)
class AssistantFolder:
    """config.json and the tensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def drafter_of(source: ExportSource) -> SharedKv:
    drafter = source.drafter
    assert isinstance(drafter, SharedKv)
    return drafter


def folder_of(source: ExportSource) -> AssistantFolder:
    drafter = drafter_of(source)
    if drafter.vocab is not None:
        found, wanted = f"a vocabulary of {drafter.vocab.size:,} ids", "the target's whole one"
        raise _refused("an assistant has a row for every token", found, wanted)
    kinds = _kinds(source)
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.tensors().items()}
    named = {"model.embed_tokens.weight": tensors.pop("lm_head.weight").contiguous()}
    groups = drafter.options.head_groups
    if groups is not None:
        named[CENTROIDS] = tensors.pop(ROUTER).contiguous()
        named[ORDERING] = _ordering(tensors.pop(GROUPS), tensors.pop(ORDER), groups)
    for name, tensor in tensors.items():
        named[name if name.startswith(OUTER) else f"model.{name}"] = tensor.contiguous()
    clusters: dict[str, Any] = {"use_ordered_embeddings": groups is not None}
    if groups is not None:
        clusters["num_centroids"] = groups
        clusters["centroid_intermediate_top_k"] = drafter.options.head_top
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": KIND,
        "backbone_hidden_size": drafter.spec.hidden_size,
        "tie_word_embeddings": True,
        "text_config": _text(source, kinds),
        **clusters,
        **dtype_fields(source),
    }
    return AssistantFolder(config, named)


def _refused(what: str, found: str, expected: str) -> IncompatibleError:
    return IncompatibleError(what, found=found, expected=expected, do=OTHER)


def _kinds(source: ExportSource) -> list[str]:
    """Of each layer: what its window makes it, if it reads what engines show such a layer."""
    drafter, last = drafter_of(source), last_layers(source.target)
    windows = drafter.options.windows or (0,) * drafter.options.layers
    kinds = [SLIDING if window else FULL for window in windows]
    if kinds[-1] != FULL or len({*windows} - {0}) > 1:
        found = f"windows: {list(windows)}"
        expected = "one width of windows, and none in the last layer"
        raise _refused("an assistant's layers see other parts of a text", found, expected)
    shown = [last[kind] for kind in kinds]
    if shown != list(drafter.reads):
        found, expected = f"reads: {list(drafter.reads)}", f"{shown}, the last layer of each kind"
        raise _refused("an assistant is shown other layers of the target", found, expected)
    return kinds


def _ordering(group_V: Tensor, order_V: Tensor, groups: int) -> Tensor:
    """[V]: the ids cluster by cluster, as they were listed, or else as they stand."""
    size = len(group_V)
    wanted_V = torch.arange(size) // max(1, size // groups)
    if size % groups or not torch.equal(group_V.sort().values, wanted_V):
        found = f"{size:,} ids in {groups} clusters"
        raise _refused("the clusters are not of one size", found, "ids that they divide")
    is_listed = torch.equal(group_V[order_V], wanted_V)
    return (order_V if is_listed else listed(group_V)).contiguous()


def _text(source: ExportSource, kinds: list[str]) -> dict[str, Any]:
    """What says how the layers are made. Heads of keys are the target's."""
    drafter, last = drafter_of(source), last_layers(source.target)
    spec, options = drafter.spec, drafter.options
    sizes = options.sizes(spec)
    width_of = dict(zip(kinds, sizes.head_dims, strict=True))
    heads_of = {kind: source.target.lm.kv_shape(layer).key_heads for kind, layer in last.items()}
    local = SLIDING if SLIDING in kinds else FULL
    is_alike = heads_of[local] == heads_of[FULL]
    windows = {*(options.windows or ())} - {0}
    text = {
        **FIXED,
        "vocab_size": spec.vocab_size,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": options.layers,
        "num_kv_shared_layers": options.layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": heads_of[local],
        "head_dim": width_of[local],
        "global_head_dim": width_of[FULL],
        "attention_k_eq_v": not is_alike,
        "layer_types": kinds,
        "sliding_window": max(windows, default=1),
        "rope_parameters": {kind: _rope(drafter, kinds, kind) for kind in (SLIDING, FULL)},
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        **special_ids(source),
    }
    return text if is_alike else text | {"num_global_key_value_heads": heads_of[FULL]}


def _rope(drafter: SharedKv, kinds: list[str], kind: str) -> dict[str, Any]:
    """The rotation in layers of that kind, which all have the same."""
    options, count = drafter.options, drafter.options.layers
    thetas = options.rope_thetas or (drafter.spec.rope_theta,) * count
    widths = options.sizes(drafter.spec).head_dims
    each = zip(kinds, thetas, options.rotated or (0,) * count, widths, strict=True)
    found = {(theta, num, width) for one, theta, num, width in each if one == kind}
    if not found:
        return UNREAD
    if len(found) > 1:
        shown = f"{len(found)} rotations or widths of heads in layers of {kind}"
        raise _refused("an assistant's layers of one kind are alike", shown, "one of each")
    ((theta, num, width),) = found
    if not num:
        return {"rope_type": "default", "rope_theta": theta}
    part = 2 * num / width
    if int(part * width // 2) < num:  # so it is read; of a quotient rounded down, one pair less
        part = math.nextafter(part, 2.0)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}


def write(source: ExportSource, folder: Path) -> None:
    written = folder_of(source)
    refuse_not_finite({n: t for n, t in written.tensors.items() if t.is_floating_point()})
    write_tensors(written.tensors, folder / WEIGHTS)
    dump_json(written.config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    """The folder is imported again: the same drafter, which says what transformers makes of it."""
    check_files(folder)
    config = json.loads((folder / "config.json").read_text(encoding="ascii"))
    tensors, drafter = load_file(folder / WEIGHTS), drafter_of(source)
    compare_tensors(folder_of(source).tensors, tensors)
    again = read(Published(folder, config, tensors, (folder / WEIGHTS,)), source.target)
    made = again.drafter
    assert isinstance(made, SharedKv)
    compare_tensors(*(_weights(each) for each in (drafter, made)))
    ways = [_ways(each) for each in (drafter, made)]
    if ways[0] != ways[1]:
        raise GateError(
            "config.json says another drafter", found=f"{ways[1]}", expected=f"{ways[0]}"
        )
    again.prove(source)


def _ways(drafter: SharedKv) -> tuple[Any, ...]:
    """What it reads, how its queries are rotated, and how many clusters it reads."""
    options, spec = drafter.options, drafter.spec
    thetas = options.rope_thetas or (spec.rope_theta,) * options.layers
    widths = options.sizes(spec).head_dims
    turned = options.rotated or (0,) * options.layers
    rope = [
        (theta, num or width // 2) for theta, num, width in zip(thetas, turned, widths, strict=True)
    ]
    return drafter.reads, drafter.reach, widths, rope, options.head_top


def _weights(drafter: SharedKv) -> dict[str, Tensor]:
    """All but the order of tokens within a cluster."""
    found = {name: tensor.detach().cpu() for name, tensor in drafter.tensors().items()}
    return {name: tensor for name, tensor in found.items() if name != ORDER}


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    length = source.manifest.serve.get("length") or 1
    assert isinstance(length, int)
    return (vllm_command("mtp", length, folder),)


def notes(source: ExportSource) -> tuple[str, ...]:
    return ("vLLM and transformers 5 read this layout; neither has been run with it here",)


FORMAT = Format(
    name="gemma4-assistant",
    summary="shared-kv as a Gemma-4 assistant, beside a Gemma-4 target",
    families=("shared-kv",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    layout=folder_of,
)
