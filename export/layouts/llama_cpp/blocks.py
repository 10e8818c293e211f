"""DFlash, DFlash2 and DSpark as a GGUF file, for llama.cpp's graph `dflash`
(src/models/dflash.cpp).

One graph serves all; a file with `markov_w1` is DSpark, one with `selector_hidden` DFlash2. It
rotates halves, so rows stay as they are; target layers are hidden states by our count; `d2t` are
absolute ids; the mask is the token that the vocabulary names as such. Without an embedding or an LM
head of its own the file borrows the target's: an embedding goes along where the mask is no row of
the target's, an LM head where the vocabulary is trimmed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.dflash2 import DFlash2
from specctl.drafters.blocks.dspark import DSpark
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import (
    block_tensors,
    blocks_of,
    embedding_tensors,
    mask_row,
    refuse_heads,
    refuse_part,
)
from specctl.export.layouts.engines import hidden_state_ids
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.model import (
    KINDS,
    add_tensor,
    new_file,
    write_sizes,
)
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.export.layouts.sglang.dflash2 import keys_of
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
    "candidate_selector.hidden_projection": "selector_hidden",
}
INSIDE = {  # of a layer, beside those of a language model
    **INNER,
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
BARE = {  # without an ending in one of the two layouts
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}


def refuse(source: ExportSource) -> None:
    """What the graph does not compute."""
    drafter = blocks_of(source)
    refuse_heads(source, "llama.cpp")
    if not isinstance(drafter, DFlash2):
        return
    refuse_part(source, "llama.cpp")
    count, width = keys_of(drafter)["selector_top_k"], drafter.spec.hidden_size
    if count * (count + 1) > width:
        raise IncompatibleError(
            "llama.cpp hands out the scores of DFlash2's candidates in place of a state",
            found=f"candidates: {count}, beside a target of width {width}",
            expected=f"candidates * (candidates + 1) up to {width}",
            do="train with fewer candidates: --set drafter.options.candidates=8",
        )


def write(source: ExportSource, path: Path) -> None:
    """Write one file that llama.cpp loads beside its target."""
    refuse(source)
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
        if drafter.window is not None:
            writer.add_uint32(f"{ARCH}.attention.sliding_window", drafter.window.size)
            pattern = [True] * len(net.layers)
            writer.add_array(f"{ARCH}.attention.sliding_window_pattern", pattern)
        if isinstance(drafter, DFlash2):
            for key, value in keys_of(drafter).items():
                writer.add_uint32(f"{ARCH}.{key}", value)
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
        layer, _, part = name.removeprefix("layers.").partition(".")
        if name == "d2t":
            found[name] = tensor + torch.arange(len(tensor))
        elif name in BARE:
            found[BARE[name]] = tensor
        elif name.startswith("layers.") and part in BARE:
            found[f"blk.{layer}.{BARE[part]}"] = tensor
        elif stem in OUTER:
            found[f"{OUTER[stem]}.{leaf}"] = tensor
        elif stem.startswith("layers."):
            found[f"blk.{layer}.{INSIDE[part.removesuffix(f'.{leaf}')]}.{leaf}"] = tensor
        else:
            assert name == "t2d", name
    return found
