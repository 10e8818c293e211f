"""EAGLE-3 as a GGUF file, for llama.cpp's graph `eagle3` (src/models/eagle3.cpp).

The graph rotates neighbours, so rows of the query and key projections are reordered as for `llama`;
it reads the inputs of three layers of the target, which are hidden states by our count; `d2t` are
absolute ids there. It has no norm of features (`fc_norm`), none of queries and keys, and feeds back
the un-normed state: what has another switch is refused. The embedding is the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.features.eagle3 import Eagle3
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import (
    hidden_state_ids,
    refuse_axes,
    refuse_scaled_embedding,
    refuse_window,
)
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.model import (
    KINDS,
    add_tensor,
    neighbours,
    new_file,
    write_sizes,
)
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.export.layouts.speculators.eagle3 import written_tensors
from specctl.models.llama.llama import default_inv_freq

ARCH, NUM_TAPS, LAYER = "eagle3", 3, "layers.0."
NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    f"{LAYER}input_layernorm": "blk.0.attn_norm",
    f"{LAYER}hidden_norm": "blk.0.attn_norm_2",
    f"{LAYER}self_attn.q_proj": "blk.0.attn_q",
    f"{LAYER}self_attn.k_proj": "blk.0.attn_k",
    f"{LAYER}self_attn.v_proj": "blk.0.attn_v",
    f"{LAYER}self_attn.o_proj": "blk.0.attn_output",
    f"{LAYER}post_attention_layernorm": "blk.0.ffn_norm",
    f"{LAYER}mlp.gate_proj": "blk.0.ffn_gate",
    f"{LAYER}mlp.up_proj": "blk.0.ffn_up",
    f"{LAYER}mlp.down_proj": "blk.0.ffn_down",
}


def write(source: ExportSource, path: Path) -> None:
    """Write one file that llama.cpp loads beside its target."""
    drafter, gguf, kind = source.drafter, library(), KINDS[source.manifest.dtype]
    assert isinstance(drafter, Eagle3)
    refuse(source)
    with new_file(path, ARCH, f"specctl {source.manifest.family} draft", kind) as writer:
        _sizes(writer, source, drafter)
        vocabulary_of(source.target.tokenizer, source.manifest.model_spec).write(writer)
        for name, tensor in tensors_of(source, drafter).items():
            add_tensor(writer, name, tensor, kind, gguf)


def refuse(source: ExportSource) -> None:
    """Switches and shapes for which the graph has no place."""
    options = source.drafter.options
    taps = options.taps or ()
    found = [name for name in ("fc_norm", "norm_output", "qk_norm") if getattr(options, name)]
    if len(taps) != NUM_TAPS:
        found.append(f"{len(taps)} taps")
    if found:
        raise IncompatibleError(
            "llama.cpp's EAGLE-3 graph does not compute this drafter",
            found=", ".join(found),
            expected=f"{NUM_TAPS} taps; fc_norm, norm_output and qk_norm off",
            do="--to speculators (vLLM) or sglang, or train for it: "
            "--set drafter.options.fc_norm=false --set drafter.options.norm_output=false "
            "--set drafter.options.qk_norm=false --set drafter.options.norm_before_residual=true",
        )
    refuse_window(source, "llama.cpp")
    refuse_axes(source, "llama.cpp")
    refuse_scaled_embedding(source, "llama.cpp")


def tensors_of(source: ExportSource, drafter: Eagle3) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names; features in the order of the target's layers."""
    shape, found = drafter.module.shape, {}
    heads = {"blk.0.attn_q": shape.num_heads, "blk.0.attn_k": shape.num_kv_heads}
    for name, tensor in written_tensors(source, drafter.options.taps).items():
        stem, _, leaf = name.rpartition(".")
        if stem in NAMES:
            new = NAMES[stem]
            turned = neighbours(tensor, heads[new]) if new in heads else tensor
            found[f"{new}.{leaf}"] = turned
        elif name == "d2t":
            found["d2t"] = tensor + torch.arange(len(tensor))
        else:
            assert name == "t2d", name
    if shape.inv_freq is not None:
        plain = default_inv_freq(shape.head_dim, shape.rope_theta)
        found["rope_freqs.weight"] = plain / torch.tensor(shape.inv_freq)
    return found


def _sizes(writer: Any, source: ExportSource, drafter: Eagle3) -> None:
    spec = source.manifest.model_spec
    writer.add_vocab_size(spec.vocab_size)
    write_sizes(writer, drafter.module.shape, spec, layers=1)
    taps = hidden_state_ids(sorted(drafter.options.taps or ()), spec.num_layers)
    writer.add_array(f"{ARCH}.target_layers", taps)
    writer.add_uint32(f"{ARCH}.target_hidden_size", spec.hidden_size)
    writer.add_bool(f"{ARCH}.norm_before_residual", drafter.options.norm_before_residual)
