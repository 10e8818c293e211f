"""DFlash as optimum-intel 2.2 reads it: z-lab's flat checkpoint, `DFlashDraftModel` over Qwen3.

The IR takes embedding rows and gives normed states: OpenVINO GenAI puts the target's own embedding
before it and the target's own LM head behind it, so neither the mask nor the vocabulary can be the
drafter's. It fetches the outputs of layers by a list in the IR, which counts layers.
Letters: D hidden width, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from specctl.core.errors import IncompatibleError
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import blocks_of
from specctl.export.layouts.engines import dump_json, refuse_scaled_embedding
from specctl.export.layouts.sglang import blocks
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.trial import Trial, embedding_of

ENGINE = "OpenVINO GenAI"


def refuse(source: ExportSource) -> None:
    """What its class or OpenVINO GenAI has no place for."""
    refuse_scaled_embedding(source, ENGINE)
    blocks.refuse(source, ENGINE)
    drafter = blocks_of(source)
    if drafter.is_causal or drafter.window is not None:
        raise IncompatibleError(
            f"{ENGINE} computes blocks whose slots see each other and the whole text",
            found=f"causal: {str(drafter.is_causal).lower()}, "
            f"window: {drafter.options.window or 'null'}",
            expected="causal: false, window: null",
            do="--to speculators (vLLM), --to sglang or --to gguf",
        )


def write(source: ExportSource, folder: Path) -> None:
    """A folder for the converter."""
    made = blocks.write(source, ENGINE)
    save_file(dict(made.tensors), folder / WEIGHTS, metadata={"format": "pt"})
    dump_json(made.config, folder / "config.json")


def num_places(source: ExportSource) -> int:
    """The drafted places of a block, as many as were trained."""
    return int(blocks_of(source).options.num_heads)


def mask_id(source: ExportSource) -> int:
    return int(blocks_of(source).options.mask_id)


def trial_of(source: ExportSource) -> Trial:
    return Trial.of(source, num_places(source) - 1, without=mask_id(source))


def fed_TD(source: ExportSource, trial: Trial) -> torch.Tensor:
    """[T, D] float64: the target's rows of the newest token and of the masks behind it."""
    ids = [trial.ids[-1], *[mask_id(source)] * num_places(source)]
    return embedding_of(source)[torch.tensor(ids)]
