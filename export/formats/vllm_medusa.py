"""Medusa heads under vLLM's own names, for vLLM up to 0.32.

A drafter that reads through the target's LM head is written with one copy of it
(`original_lm_head`), and that copy may be trimmed: `token_map` holds the kept ids themselves, not
offsets. Heads of their own have one row per target token in vLLM; trimmed ones are written over the
whole vocabulary (`specctl.export.layouts.whole_head`).
Letters: D hidden width, K draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specctl.export.formats import ExportSource, Format
from specctl.export.formats.medusa import blocks_of, compare_heads, drafter_of, head_rows_of
from specctl.export.layouts.engines import dtype_fields, dump_json, vllm_command
from specctl.export.layouts.whole_head import whole_head
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import write_tensors
from specctl.export.readers.medusa import VllmMedusa


def write(source: ExportSource, folder: Path) -> None:
    drafter, spec = drafter_of(source), source.manifest.model_spec
    dtype, is_shared = getattr(torch, source.manifest.dtype), drafter.options.head == "shared"
    tensors: dict[str, Tensor] = {}
    for i, blocks in enumerate(blocks_of(source)):
        for j, linear in enumerate(blocks):
            tensors[f"blocks.{i}.layers.{j}.weight"] = linear.weight
            tensors[f"blocks.{i}.layers.{j}.bias"] = linear.bias
    spoken = spec.vocab_size
    if is_shared:
        tensors["lm_head.weight"] = head_rows_of(source)[0]
        spoken = len(tensors["lm_head.weight"])
    else:
        for i, rows_KD in enumerate(head_rows_of(source)):
            tensors[f"lm_heads.{i}.weight"] = whole_head(rows_KD, drafter.vocab)
    whole = {n: t.detach().to("cpu", dtype, copy=True).contiguous() for n, t in tensors.items()}
    if is_shared and drafter.vocab is not None:
        whole["token_map"] = drafter.vocab.ids_K.cpu().contiguous()
    write_tensors(whole, folder / WEIGHTS)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": drafter.options.num_heads,
        "num_hidden_layers": drafter.options.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "truncated_vocab_size": spoken,
        "max_paths": 64,
        "topk": 10,
        "logit_scale": 1.0,
        **dtype_fields(source),
    }
    dump_json(config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    check_files(folder)
    compare_heads(source, VllmMedusa(folder))


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    return (vllm_command("medusa", drafter_of(source).options.num_heads, folder),)


def notes(source: ExportSource) -> tuple[str, ...]:
    return ("vLLM serves Medusa up to 0.32.",)


FORMAT = Format(
    name="vllm-medusa",
    summary="Medusa heads under vLLM's own names, for vLLM up to 0.32",
    families=("medusa",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
)
