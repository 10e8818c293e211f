"""A Llama whose LM head keeps some of its rows, while its matrices stay as a GGUF file packs them.

Letters: D hidden width, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specctl.models.llama.llama import LlamaModel, LlamaShape
from specctl.models.native.packed import PackedWeights


def with_packed_rows(
    model: LlamaModel, shape: LlamaShape, embedding_VD: Tensor, rows_K: Tensor
) -> LlamaModel:
    """The model of that shape with these rows of its LM head alone, bit for bit, and that
    embedding; all else is its own memory. Its matrices must be packed."""
    own, rotary = model.packs.packed, model.rotary
    assert own is not None, "the rows of other models are cut as tensors"
    with torch.device("meta"):
        cut = LlamaModel(shape, rotary.inv_freq, rotary.scale)
    for name, parameter in model.named_parameters():
        if name.startswith("model."):
            owner, leaf = name.rsplit(".", 1)
            setattr(cut.get_submodule(owner), leaf, parameter)
    cut.model.embed_tokens.weight = nn.Parameter(embedding_VD, requires_grad=False)
    is_kept = cut.keep_packed(PackedWeights(own.layers, own.head.picked(rows_K)))
    assert is_kept, "the compiled step was there before"
    return cut.eval().requires_grad_(False)
