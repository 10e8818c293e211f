"""Medusa heads in FasterDecoding's layout: text-generation-inference and vLLM 0.31 and 0.32.

One folder serves both, because `architectures` is left out (TGI would look for no heads) and
`medusa_fc_bias` is true (vLLM would drop the biases). Every head carries an LM head of its own, so
a drafter that reads through the target's head is written with a copy of it per head. A trimmed head
is written over the whole vocabulary; see `specctl.export.layouts.whole_head`.
Letters: D hidden width, K draft vocabulary, P path (one per head), V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from specctl.core.messages.sizes import size_text
from specctl.drafters.heads.medusa import Medusa
from specctl.drafters.nets.heads import ResBlock, head_rows
from specctl.export.formats import ExportSource, Format
from specctl.export.layouts import tgi
from specctl.export.layouts.engines import dtype_fields, dump_json, vllm_command
from specctl.export.layouts.whole_head import whole_head, without_cut
from specctl.export.package.manifest import check_files
from specctl.export.package.tensors import write_tensors
from specctl.export.readers.medusa import TgiMedusa, VllmMedusa
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin

FILE = "medusa_lm_head.safetensors"


def drafter_of(source: ExportSource) -> Medusa:
    assert isinstance(source.drafter, Medusa)
    return source.drafter


def head_rows_of(source: ExportSource) -> list[Tensor]:
    """[K, D] LM heads in the dtype of the package: one of its own per head, or the target's."""
    drafter, dtype = drafter_of(source), getattr(torch, source.manifest.dtype)
    own = [head.weight for head in drafter.own_heads()]
    rows = own or [head_rows(source.target.borrowed(), drafter.vocab)]
    return [rows_KD.detach().to("cpu", dtype) for rows_KD in rows]


def blocks_of(source: ExportSource) -> list[list[nn.Linear]]:
    """The layers of every head's residual blocks."""
    module = drafter_of(source).module
    return [
        [part.linear for part in head.modules() if isinstance(part, ResBlock)] for head in module
    ]


def write(source: ExportSource, folder: Path) -> None:
    drafter, dtype = drafter_of(source), getattr(torch, source.manifest.dtype)
    heads, tensors = head_rows_of(source), dict[str, Tensor]()
    for i, blocks in enumerate(blocks_of(source)):
        for j, linear in enumerate(blocks):
            tensors[f"{i}.{j}.linear.weight"] = linear.weight
            tensors[f"{i}.{j}.linear.bias"] = linear.bias
        rows_KD = heads[min(i, len(heads) - 1)]
        tensors[f"{i}.{len(blocks)}.weight"] = whole_head(rows_KD, drafter.vocab)
    whole = {n: t.detach().to("cpu", dtype, copy=True).contiguous() for n, t in tensors.items()}
    write_tensors(whole, folder / FILE)
    config = {
        "model_type": "medusa",
        "version": "2",
        "base_model_name_or_path": tgi.base_model(source),
        "medusa_num_heads": drafter.options.num_heads,
        "medusa_num_layers": drafter.options.num_blocks,
        "medusa_fc_bias": True,
        "hidden_size": source.manifest.model_spec.hidden_size,
        "vocab_size": source.manifest.model_spec.vocab_size,
        **dtype_fields(source),
    }
    dump_json(config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    check_files(folder)
    for reader in (TgiMedusa(folder), VllmMedusa(folder)):
        compare_heads(source, reader)


def compare_heads(source: ExportSource, reader: TgiMedusa | VllmMedusa) -> None:
    """Every head of an engine says what our head says."""
    drafter = twin(source, drafter_of(source))
    trial = Trial.of(source, drafter.options.num_heads - 1)
    state_D = trial.states[source.manifest.model_spec.num_layers][-1]
    theirs_PV = without_cut(reader.logits(state_D), drafter.vocab)
    compare(reader.name, theirs_PV, drafted_logits(drafter, trial))


def notes(source: ExportSource) -> tuple[str, ...]:
    drafter, found = drafter_of(source), []
    if drafter.options.head == "shared":
        size = head_rows_of(source)[0].element_size() * source.manifest.model_spec.hidden_size
        size *= source.manifest.model_spec.vocab_size * drafter.options.num_heads
        found.append(
            "The layout has no shared LM head: the target's is written "
            f"{drafter.options.num_heads} times ({size_text(size)}); the format vllm-medusa "
            "holds it once."
        )
    found += tgi.notes(source)
    found.append("vLLM serves Medusa up to 0.32; this layout needs 0.31 or 0.32.")
    return tuple(found)


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    length = drafter_of(source).options.num_heads
    return tgi.command(folder, length), vllm_command("medusa", length, folder)


FORMAT = Format(
    name="medusa",
    summary="Medusa heads in FasterDecoding's layout, for text-generation-inference and vLLM 0.32",
    families=("medusa",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
)
