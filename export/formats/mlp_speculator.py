"""The MLP speculator as IBM publishes it: text-generation-inference, and vLLM up to 0.9.

Our equations are those of both engines (arXiv 2404.19124, section 3): the weights w_s and w_e, the
exact GELU, a root-mean-square norm with scale and shift and eps 1e-6. Two traps are in the layout.
TGI has no `scale_input` and would leave it out without a word, so such a drafter is written without
the prefix that TGI demands: it stops there, and vLLM loads it. TGI reads `inner_dim` 0 as zero, so
it is always written. A trimmed head is written whole; see `specctl.export.layouts.whole_head`.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specctl.core.errors import IncompatibleError
from specctl.drafters.heads.mlp_speculator import MlpSpeculator
from specctl.export.formats import ExportSource, Format
from specctl.export.layouts import tgi
from specctl.export.layouts.engines import dtype_fields, dump_json, vllm_command
from specctl.export.layouts.whole_head import whole_head, without_cut
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import write_tensors
from specctl.export.readers.mlp_speculator import TgiMlp, VllmMlp
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin

PREFIX = "speculator."


def _drafter(source: ExportSource) -> MlpSpeculator:
    assert isinstance(source.drafter, MlpSpeculator)
    return source.drafter


def write(source: ExportSource, folder: Path) -> None:
    drafter, options = _drafter(source), _drafter(source).options
    if not options.read_tokens:
        raise IncompatibleError(
            "the engines add the embedding of the drafted token at every step",
            found="read_tokens false",
            expected="read_tokens true",
            do="--to specctl",
        )
    dtype = getattr(torch, source.manifest.dtype)
    prefix = "" if options.scale_input else PREFIX
    tensors = {}
    for name, tensor in drafter.tensors().items():
        weight = tensor.detach().to("cpu", dtype, copy=True)
        if name.startswith("head."):
            weight = whole_head(weight, drafter.vocab)
        tensors[prefix + name] = weight.contiguous()
    write_tensors(tensors, folder / WEIGHTS)
    spec, count = source.manifest.model_spec, options.num_heads
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "base_model_name_or_path": tgi.base_model(source),
        "vocab_size": spec.vocab_size,
        "emb_dim": spec.hidden_size,
        "inner_dim": options.inner or spec.hidden_size,
        "n_predict": count,
        "top_k_tokens_per_head": [max(1, 5 - i) for i in range(count)],
        "n_candidates": 5,
        "tie_weights": options.tie and count > 1,  # one head has nothing to share
        "scale_input": options.scale_input,
        **dtype_fields(source),
    }
    dump_json(config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    """Every step by the rules of each engine that can serve the folder, on random states."""
    check_files(folder)
    drafter = twin(source, _drafter(source))
    trial = Trial.of(source, drafter.options.num_heads - 1)
    ours_NV = drafted_logits(drafter, trial)
    state_D = trial.states[source.manifest.model_spec.num_layers][-1]
    tokens = (trial.ids[-1], *trial.drafted)
    readers: list[VllmMlp | TgiMlp] = [VllmMlp(folder)]
    if not drafter.options.scale_input:
        readers.append(TgiMlp(folder))
    for reader in readers:
        theirs_NV = without_cut(reader.logits(state_D, tokens), drafter.vocab)
        compare(reader.name, theirs_NV, ours_NV)


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """TGI derives w_s from `--speculate`: it must be the number of heads."""
    options = _drafter(source).options
    vllm = vllm_command("mlp_speculator", options.num_heads, folder)
    return (vllm,) if options.scale_input else (tgi.command(folder, options.num_heads), vllm)


def notes(source: ExportSource) -> tuple[str, ...]:
    found = ["vLLM serves MLP speculators up to 0.9; its engine of later versions does not."]
    if _drafter(source).options.scale_input:
        found.append(
            "Text-generation-inference has no scale_input: this folder stops it on loading."
        )
    else:
        found.append("Text-generation-inference weighs by --speculate: keep the number of heads.")
        found += tgi.notes(source)
    return tuple(found)


FORMAT = Format(
    name="mlp-speculator",
    summary="MLP speculator in IBM's layout, for text-generation-inference and vLLM up to 0.9",
    families=("mlp-speculator",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
)
