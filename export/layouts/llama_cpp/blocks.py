"""DFlash and DSpark as a GGUF file, for llama.cpp's graph `dflash` (src/models/dflash.cpp).

One graph serves both; a file with `markov_w1` is DSpark. It rotates halves, so rows stay as they
are; target layers are hidden states by our count; `d2t` are absolute ids; the mask is the token
that the vocabulary names as such. Without an embedding or an LM head of its own the file borrows
the target's: an embedding goes along where the mask is no row of the target's, an LM head where
the vocabulary is trimmed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specctl.drafters.dspark import DSpark
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import block_tensors, blocks_of, embedding_tensors, mask_row
from specctl.export.layouts.engines import hidden_state_ids
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.model import (
    KINDS,
    add_tensor,
    new_file,
    write_sizes,
)
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.runtime.target.gguf.weights import INNER

ARCH = "dflash"
OUTER = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write(source: ExportSource, path: Path) -> None:
    """Write one file that llama.cpp loads beside its target."""
    drafter, gguf, kind = blocks_of(source), library(), KINDS[source.manifest.dtype]
    spec, net, tensors = drafter.spec, drafter.net, tensors_of(source)
    taps = hidden_state_ids(sorted(drafter.own_taps), spec.num_layers)
    is_spark = isinstance(drafter, DSpark)
    with new_file(path, ARCH, f"specctl {source.manifest.family} draft", kind) as writer:
        writer.add_vocab_size(spec.vocab_size)
        write_sizes(writer, net.shape, spec, len(net.layers))
        writer.add_array(f"{ARCH}.target_layers", taps)
        writer.add_uint32(f"{ARCH}.block_size", drafter.num_slots)
        writer.add_bool(f"{ARCH}.attention.causal", drafter.is_causal)
        if is_spark:
            writer.add_bool(f"{ARCH}.sample_from_anchor", True)
            writer.add_bool(f"{ARCH}.has_confidence_head", True)
        vocabulary_of(source.target.tokenizer, spec).write(writer)
        writer.add_mask_token_id(mask_row(source))
        for name, tensor in tensors.items():
            add_tensor(writer, name, tensor, kind, gguf)


def tensors_of(source: ExportSource) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names; features in the order of the target's layers."""
    found: dict[str, Tensor] = {}
    for name, tensor in (block_tensors(source) | embedding_tensors(source)).items():
        stem, _, leaf = name.rpartition(".")
        if name == "d2t":
            found[name] = tensor + torch.arange(len(tensor))
        elif stem in OUTER:
            found[f"{OUTER[stem]}.{leaf}"] = tensor
        elif stem.startswith("layers."):
            index, part = stem.removeprefix("layers.").split(".", 1)
            found[f"blk.{index}.{INNER[part]}.{leaf}"] = tensor
        else:
            assert name == "t2d", name
    return found
