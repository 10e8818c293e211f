"""Projections of queries, keys and values that a checkpoint keeps in one matrix (MiMo-V2.5-Pro).

Its rows are [Q | K | V] (`plain`), or as many pieces [Q_c | K_c | V_c] as the model's full layers
have heads of keys (`interleaved`, as its authors published it; vLLM's pull request 57508). Both
have one shape, and config.json declares both as `attention_projection_layout: fused_qkv`, so
`fused_qkv_weight_order` must say which it is (SGLang's pull request 28100); it is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.models.hf.hf_spec import field_of

FUSED = "self_attn.qkv_proj.weight"
PARTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
ORDER, PLAIN, INTERLEAVED = "fused_qkv_weight_order", "plain", "interleaved"


def unfused(
    config: Any, layer: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a layer with the three projections apart, as large as those of `wanted`."""
    if FUSED not in layer or any(name not in wanted for name in PARTS):
        return dict(layer)
    rows, pieces = [len(wanted[name]) for name in PARTS], pieces_of(config)
    whole = layer[FUSED]
    if len(whole) != sum(rows) or any(count % pieces for count in rows):
        raise IncompatibleError(
            "the fused projection has other rows than the layer",
            found=f"{FUSED} {tuple(whole.shape)}",
            expected=f"{' + '.join(map(str, rows))} rows in {pieces} pieces",
            do="get config.json and the weights again, from one version of the repository",
        )
    each = [
        torch.split(piece, [count // pieces for count in rows]) for piece in whole.chunk(pieces)
    ]
    parts = {
        name: torch.cat(own).contiguous()
        for name, own in zip(PARTS, zip(*each, strict=True), strict=True)
    }
    return {name: x for name, x in layer.items() if name != FUSED} | parts


def fused(config: Any, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse."""
    pieces = pieces_of(config)
    each = zip(*(layer[name].chunk(pieces) for name in PARTS), strict=True)
    rows = torch.cat([part for piece in each for part in piece])
    return {name: x for name, x in layer.items() if name not in PARTS} | {FUSED: rows}


def says_fused(config: Any) -> bool:
    """Whether checkpoints of that configuration keep the three in one."""
    text = config.get_text_config(decoder=True)
    return bool(field_of(text, "attention_projection_layout") == "fused_qkv")


def pieces_of(config: Any) -> int:
    """In how many pieces a fused projection's rows lie."""
    text = config.get_text_config(decoder=True)
    order, heads = field_of(text, ORDER), field_of(text, "num_key_value_heads")
    if order == PLAIN:
        return 1
    if order == INTERLEAVED and isinstance(heads, int) and heads > 0:
        return heads
    raise IncompatibleError(
        "the checkpoint does not say in which order the rows of its fused projection lie",
        found=f"{FUSED}, {ORDER}: {ascii(order)[:40]}",
        expected=f"{ORDER} in config.json: {PLAIN} or {INTERLEAVED}",
        do=f"write {INTERLEAVED} for MiMo-V2.5-Pro as published, {PLAIN} for what transformers "
        "has saved again, or split the projections",
        where=f"config.json:{ORDER}",
    )
