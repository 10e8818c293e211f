"""What serving engines agree on, and the few places where they do not: said once for all formats.

Layer ids. specctl counts transformers' `hidden_states` (0 = embedding output, k = output of layer
k - 1). vLLM's and speculators' top-level lists say the same; SGLang's nested list, and the
`target_layer_ids` of DFlash and DSpark, count layers (v = output of layer v = hidden state v + 1).
Vocabulary. `d2t` holds offsets (target id = row + d2t[row]), `t2d` a mask over the target's ids.
Letters: K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import GateError, IncompatibleError
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.nets.axes import axes_of
from specctl.drafters.nets.blocks import LayerShape
from specctl.export.formats import FOLDER, TARGET, ExportSource
from specctl.models.axes import section_of
from specctl.models.hf.hf_spec import head_scale

LENGTH = 3  # tokens drafted a round where the package names no number

# -- layer ids ---------------------------------------------------------------------------------


def hidden_state_ids(taps: Sequence[int], num_layers: int) -> list[int]:
    """Taps for a field that counts hidden states (vLLM, speculators). Refused: the last one, which
    in transformers is normed and in the engines is not, and one that is named twice."""
    return _checked(taps, range(num_layers), num_layers)


def layer_ids(taps: Sequence[int], num_layers: int) -> list[int]:
    """The same taps for a field that counts layers (SGLang; DFlash and DSpark everywhere), which
    has no number for the embedding."""
    return [tap - 1 for tap in _checked(taps, range(1, num_layers), num_layers)]


def _checked(taps: Sequence[int], known: range, num_layers: int) -> list[int]:
    if any(tap not in known for tap in taps) or len(set(taps)) != len(taps):
        raise IncompatibleError(
            "an engine hands out the states between its layers only, each once",
            found=f"taps {list(taps)} of a target with {num_layers} layers",
            expected=f"distinct taps from {known[0]} to {known[-1]}",
            do="train with other taps (--set drafter.options.taps=[...]), or export --to specctl",
        )
    return [int(tap) for tap in taps]


def taps_of_layer_ids(ids: Sequence[int]) -> list[int]:
    """hidden_states indices of a field that counts layers."""
    return [int(v) + 1 for v in ids]


def ascending(taps: Sequence[int]) -> list[int]:
    """Where each tap stands in `taps`, lowest tap first: engines hand features out in the order of
    their layers, whatever the order of the list, so what reads them is written in that order."""
    return sorted(range(len(taps)), key=lambda at: taps[at])


# -- vocabulary --------------------------------------------------------------------------------


def vocab_tensors(vocab: VocabMap | None) -> dict[str, Tensor]:
    """`d2t` int64 [K] and `t2d` bool [V] of a trimmed vocabulary, nothing for a whole one."""
    if vocab is None or vocab.size == vocab.target_size:
        return {}
    return {"d2t": vocab.d2t().cpu().contiguous(), "t2d": vocab.t2d().cpu().contiguous()}


def check_vocab(tensors: Mapping[str, Tensor], rows: int, target_size: int) -> Tensor:
    """int64 [K]: the target id of every head row, by the tables of a written folder; a GateError
    where they contradict each other, the head or the target."""
    if "d2t" not in tensors and "t2d" not in tensors:
        if rows != target_size:
            raise gate(f"{rows} head rows without d2t and t2d", f"{target_size} rows, or the maps")
        return torch.arange(rows)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or t2d is None or d2t.dtype != torch.long or t2d.dtype != torch.bool:
        kinds = ["missing" if t is None else str(t.dtype) for t in (d2t, t2d)]
        raise gate(f"d2t {kinds[0]}, t2d {kinds[1]}", "d2t of int64 and t2d of bool")
    if d2t.shape != (rows,) or t2d.shape != (target_size,):
        found = f"d2t {tuple(d2t.shape)}, t2d {tuple(t2d.shape)}"
        raise gate(found, f"d2t ({rows},), t2d ({target_size},)")
    ids_K = torch.arange(rows) + d2t
    if bool((ids_K[1:] <= ids_K[:-1]).any()) or int(ids_K[0]) < 0 or int(ids_K[-1]) >= target_size:
        raise gate("d2t is no table of offsets", "row + d2t[row] ascends inside the target's ids")
    if not torch.equal(t2d.nonzero()[:, 0], ids_K):
        raise gate("t2d marks other ids than d2t gives", "the same ids in both")
    return ids_K


# -- config.json -------------------------------------------------------------------------------


def rope_fields(shape: LayerShape, source: ExportSource) -> dict[str, Any]:
    """A drafter's own rope, plain or scaled as its target's, in the new and the old spelling; with
    the axes of M-RoPE where it has them, which SGLang and vLLM then rotate it by."""
    theta, scaling = shape.rope_theta, source.manifest.model_spec.rope_scaling
    if shape.inv_freq is None:
        scaling = None
    if (axis := axes_of(source.drafter.options)) is not None:
        scaling = {**(scaling or {"rope_type": "default"}), **_section_keys(axis)}
    return {
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _section_keys(axis: Sequence[int]) -> dict[str, Any]:
    found = section_of(axis)
    if found is None:
        raise IncompatibleError(
            "no key of an engine says these axes of M-RoPE",
            found=f"mrope: {list(axis)}",
            expected="axes one behind another, or interleaved as in Qwen3-VL",
            do="--to specctl, or train with the target's own axes (leave mrope out)",
        )
    section, is_interleaved = found
    return {"mrope_section": section} | ({"mrope_interleaved": True} if is_interleaved else {})


def dimensions(shape: LayerShape, source: ExportSource, num_layers: int) -> dict[str, Any]:
    """The sizes that every engine reads. `vocab_size` and the positions are the target's."""
    spec = source.manifest.model_spec
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def special_ids(source: ExportSource) -> dict[str, Any]:
    """The target's ids of begin, end and padding."""
    spec, eos = source.manifest.model_spec, list(source.target.eos_ids)
    return {
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": spec.pad_id,
    }


def dtype_fields(source: ExportSource) -> dict[str, str]:
    """The dtype of the weights in the new and the old spelling."""
    return {"dtype": source.manifest.dtype, "torch_dtype": source.manifest.dtype}


def dump_json(body: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="ascii")


# -- refusals and faults -----------------------------------------------------------------------


def refuse_scaled_embedding(source: ExportSource, engine: str) -> None:
    """Gemma scales embeddings before its layers, and a drafter beside it reads the scaled ones; an
    engine that shares the bare rows would feed it others."""
    scale = source.manifest.model_spec.embed_scale
    if scale != 1.0:
        raise IncompatibleError(
            f"{engine} hands unscaled embeddings to a drafter",
            found=f"a target that scales its embeddings by {scale:g}",
            expected="a target that reads its embedding rows as they are",
            do="--to specctl",
        )


def head_factor(source: ExportSource) -> float:
    """What the target multiplies the product with its LM head by (Granite, Cohere): a drafter that
    borrows the head has it in the rows, an engine that shares them has not."""
    config = getattr(getattr(source.target.lm, "module", None), "config", None)
    return 1.0 if config is None else head_scale(config)


def refuse_sink(window: AttentionWindow | None) -> None:
    """Of every published layout: none has a key for first tokens that a window keeps, so that its
    readers would let them go. (SGLang's --speculative-draft-sink-size is a flag of the server; an
    `attention_sink_bias` is a learned logit of a head, without a token.)"""
    if window is not None and window.sink:
        raise IncompatibleError(
            "no published layout says that a window keeps the first tokens: engines would read the "
            "drafter as one without them",
            found=f"window: {window.size}, sink: {window.sink}",
            expected="sink: 0",
            do="--to specctl, or train with --set drafter.options.sink=0",
        )


def refuse_window(source: ExportSource, engine: str) -> None:
    """An engine that lets the drafter's attention see the whole text."""
    options = source.drafter.options
    if options.window is not None:
        raise IncompatibleError(
            f"{engine} has no window for an EAGLE-3 drafter",
            found=f"window: {options.window}, sink: {options.sink}",
            expected="window: null",
            do="--to speculators (vLLM reads windows without sinks), or train with "
            "--set drafter.options.window=null",
        )


def refuse_axes(source: ExportSource, engine: str) -> None:
    """An engine that counts the drafter's positions by the index, images or not."""
    if (axis := axes_of(source.drafter.options)) is not None:
        raise IncompatibleError(
            f"{engine} rotates such a drafter by the index, not by the axes of M-RoPE",
            found=f"mrope: {list(axis)}",
            expected="mrope: null or []",
            do="--to specctl (of family eagle3 also sglang or speculators), or train with "
            "--set 'drafter.options.mrope=[]'",
        )


def refuse_scaled_head(source: ExportSource, engine: str) -> None:
    """Of drafters that read the target's own LM head."""
    factor = head_factor(source)
    if factor != 1.0:
        raise IncompatibleError(
            f"{engine} shares the bare LM head with a drafter",
            found=f"a target that multiplies its logits by {factor:g}",
            expected="a target whose LM head gives its logits",
            do="--to specctl",
        )


def gate(found: str, expected: str) -> GateError:
    """What `check` raises: the folder as an engine reads it is not the drafter."""
    return GateError(
        "an engine would not compute what the drafter computes",
        found=found,
        expected=expected,
        do="report this with the package's manifest.json; --to specctl is unaffected",
    )


# -- serving -----------------------------------------------------------------------------------


def draft_length(source: ExportSource) -> int:
    """Tokens drafted a round: the package's own number."""
    length = source.manifest.serve.get("length")
    return length if isinstance(length, int) and length > 0 else LENGTH


def vllm_command(method: str, length: int, folder: str = FOLDER, **more: Any) -> str:
    """`vllm serve` with the drafter beside its target."""
    how = {"method": method, "model": folder, "num_speculative_tokens": length, **more}
    return shlex.join(["vllm", "serve", TARGET, "--speculative-config", json.dumps(how)])


def sglang_command(algorithm: str, length: int, folder: str = FOLDER) -> str:
    """SGLang's server with the drafter beside its target, drafting a chain of `length` tokens."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", TARGET]
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder]
    words += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(length + 1)])
