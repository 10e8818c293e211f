"""EAGLE-3 in the speculators format. Our parameter names are the format's.

Engines hand features out in the order of the target's layers, so `fc` is written for that order. A
router over the LM head has no place there: the whole head is written. The embedding goes along:
without it speculators 0.9.0 computes with zeros, and vLLM shares the target's again where they are
the same. So a target that scales its embeddings (Gemma) is no obstacle, as the scaled rows are
written. Norms on queries and keys make it a qwen3 layer, else it is a llama layer.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.features.eagle3 import Eagle3
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.routed import PREFIX
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import (
    ascending,
    dimensions,
    draft_length,
    hidden_state_ids,
    refuse_sink,
    rope_fields,
    vocab_tensors,
)
from specctl.export.layouts.speculators.layout import SpeculatorsFolder, SpeculatorsLayout
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    twin,
    without_router,
)
from specctl.export.readers.vllm_eagle3 import ENGINE, VllmEagle3

FED_BACK = 3  # states of the drafter's own that are compared, besides those of the target


def write(source: ExportSource) -> SpeculatorsFolder:
    drafter = source.drafter
    assert isinstance(drafter, Eagle3)
    window = drafter.options.seen
    layer = layer_config(source, drafter.module.shape, 1, drafter.options.qk_norm)
    if window is not None:
        layer |= window_keys(window)
    return SpeculatorsFolder(
        kind="eagle3",
        architecture="Eagle3DraftModel",
        length=draft_length(source),
        layer=layer,
        own={
            **feature_keys(source),
            "norm_before_residual": drafter.options.norm_before_residual,
            "fc_norm": drafter.options.fc_norm,
            "norm_output": drafter.options.norm_output,
        },
        tensors={
            **written_tensors(source, drafter.options.taps),
            "embed_tokens.weight": embedding_rows(source),
        },
    )


def window_keys(window: AttentionWindow) -> dict[str, Any]:
    """`sliding_window` counts the row itself in vLLM and speculators, as in ours."""
    refuse_sink(window)
    return {"layer_types": ["sliding_attention"], "sliding_window": window.size}


def layer_config(
    source: ExportSource, shape: LayerShape, num_layers: int, qk_norm: bool = False
) -> dict[str, Any]:
    """transformer_layer_config. The number of features stands here because vLLM's llama class
    looks for it here and nowhere else."""
    kind: dict[str, Any] = {"model_type": "llama"}
    if qk_norm:
        layers = ["full_attention"] * num_layers
        kind = {"model_type": "qwen3", "layer_types": layers, "sliding_window": None}
    rope = rope_fields(shape, source)
    del rope["rope_scaling"]  # transformers 5, which reads this part, warns of it
    return {
        **kind,
        **dimensions(shape, source, num_layers),
        **rope,
        "num_aux_hidden_states": len(source.manifest.taps.indices),
    }


def feature_keys(source: ExportSource) -> dict[str, Any]:
    """Which hidden states are read, and what vLLM and speculators assume differently where it is
    not written."""
    taps = sorted(source.manifest.taps.indices)
    return {
        "eagle_aux_hidden_state_layer_ids": hidden_state_ids(
            taps, source.manifest.model_spec.num_layers
        ),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
    }


def written_tensors(source: ExportSource, taps: Sequence[int] | None) -> dict[str, Tensor]:
    """The drafter's tensors for features in the order of the layers, in the package's dtype, with
    the vocabulary's tables; a router's are left out."""
    dtype, order = getattr(torch, source.manifest.dtype), ascending(taps or ())
    tensors = {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in source.drafter.tensors().items()
        if not name.startswith(PREFIX)
    }
    for name in ("fc.weight", "fusion", "mask_hidden"):  # one block per tap on the last axis
        if name in tensors and len(order) > 1:
            blocks = tensors[name].chunk(len(order), dim=-1)
            tensors[name] = torch.cat([blocks[at] for at in order], dim=-1).contiguous()
    norms = [tensors.get(f"fc_norm.{at}.weight") for at in order]
    tensors |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms) if norm is not None}
    return tensors | vocab_tensors(source.drafter.vocab)


def embedding_rows(source: ExportSource) -> Tensor:
    """[V, D]: what the drafter reads as embeddings of its target, in the dtype of the package."""
    borrowed = source.target.borrowed()
    rows_VD = (borrowed.embedding_VD * borrowed.embed_scale).detach()
    return rows_VD.to("cpu", getattr(torch, source.manifest.dtype), copy=True).contiguous()


def scaled_rows(source: ExportSource) -> dict[str, Tensor]:
    """The drafter's own embedding where the target's bare rows are not what it reads."""
    if source.target.borrowed().embed_scale == 1.0:
        return {}
    return {"embed_tokens.weight": embedding_rows(source)}


def check(source: ExportSource, folder: Path) -> None:
    """vLLM drafts what the drafter drafts: behind random features, and on its own states."""
    ours = twin(source, without_router(source.drafter))
    reader, trial = VllmEagle3(folder, embedding_of(source)), Trial.of(source, FED_BACK)
    reader.check_window(source.drafter.options.window)
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(ours, trial))


LAYOUT = SpeculatorsLayout(write, check, "eagle3", draft_length)
