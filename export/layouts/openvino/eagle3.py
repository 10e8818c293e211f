"""EAGLE-3 as optimum-intel 2.2 reads it: SafeAILab's names, every tensor written out.

Its class has one layer called `midlayer`, an `fc` over three states, and takes what it does not
find as newly initialised. So nothing is left out: the embedding, which OpenVINO GenAI replaces by
the target's, and tables of the vocabulary even of a whole one. OpenVINO GenAI fetches the outputs
of layers by `hidden_layers_list`; the last of a layer's two additions is what it takes for them.
Letters: K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specctl.core.errors import IncompatibleError
from specctl.drafters.features.eagle3 import Eagle3
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import (
    dump_json,
    layer_ids,
    refuse_axes,
    refuse_scaled_embedding,
    refuse_window,
)
from specctl.export.layouts.sglang import eagle3
from specctl.export.layouts.speculators.eagle3 import embedding_rows
from specctl.export.package.manifest import WEIGHTS

NUM_TAPS = 3


def refuse(source: ExportSource) -> None:
    """Switches and shapes for which the converter's class has no place."""
    drafter = source.drafter
    assert isinstance(drafter, Eagle3)
    options, taps = drafter.options, drafter.options.taps or ()
    switches = ("fc_norm", "norm_output", "qk_norm", "norm_before_residual")
    found = [name for name in switches if getattr(options, name)]
    if len(taps) != NUM_TAPS:
        found.append(f"{len(taps)} taps")
    if found:
        raise IncompatibleError(
            "OpenVINO's EAGLE-3 does not compute this drafter",
            found=", ".join(found),
            expected=f"{NUM_TAPS} taps; {', '.join(switches[:-1])} and {switches[-1]} off",
            do="--to speculators (vLLM), or train with the recipe's own switches",
        )
    refuse_window(source, "OpenVINO GenAI")
    refuse_axes(source, "OpenVINO GenAI")
    refuse_scaled_embedding(source, "OpenVINO GenAI")


def hidden_layers(source: ExportSource) -> list[int]:
    """`hidden_layers_list`: layers by number, lowest first."""
    manifest = source.manifest
    return layer_ids(sorted(manifest.taps.indices), manifest.model_spec.num_layers)


def write(source: ExportSource, folder: Path) -> None:
    """A folder for the converter."""
    made = eagle3.write(source)
    vocabulary = source.manifest.vocabulary
    tensors = dict(made.tensors) | {"embed_tokens.weight": embedding_rows(source)}
    if "d2t" not in tensors:
        whole: dict[str, Any] = {
            "d2t": torch.zeros(vocabulary.draft_size, dtype=torch.long),
            "t2d": torch.ones(vocabulary.target_size, dtype=torch.bool),
        }
        tensors |= whole
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    dump_json(made.config, folder / "config.json")
