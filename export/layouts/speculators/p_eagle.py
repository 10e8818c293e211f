"""P-EAGLE in the speculators format (`peagle`; vLLM drafts with it in parallel).

A masked row stands for a token that is not known yet. Engines give it the embedding of a token, the
mask token, so the drafter's learned mask becomes that token's row and the embedding goes along with
the drafter. The token must be one that no text contains; it costs acceptance, never correctness,
where one does.
Letters: D hidden width, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.features.p_eagle import PEagle
from specctl.drafters.nets.blocks import LayerShape
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import draft_length
from specctl.export.layouts.speculators.eagle3 import (
    embedding_rows,
    feature_keys,
    layer_config,
    written_tensors,
)
from specctl.export.layouts.speculators.layout import SpeculatorsFolder, SpeculatorsLayout
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, twin
from specctl.export.readers.vllm_eagle3 import EMBEDDING, ENGINE, MASK, VllmEagle3
from specctl.runtime.target.templates.spare_token import spare_token


def write(source: ExportSource) -> SpeculatorsFolder:
    drafter = source.drafter
    assert isinstance(drafter, PEagle)
    shape = LayerShape.of(source.manifest.model_spec)
    return SpeculatorsFolder(
        kind="peagle",
        architecture="PEagleDraftModel",
        length=length(source),
        layer=layer_config(source, shape, drafter.options.layers),
        own={**feature_keys(source), "mask_token_id": mask_token(source)},
        tensors=_tensors(source, drafter),
    )


def length(source: ExportSource) -> int:
    """Tokens drafted a round, at most as many as were trained."""
    trained: int = source.drafter.options.num_heads
    return min(draft_length(source), trained)


def _tensors(source: ExportSource, drafter: PEagle) -> dict[str, Tensor]:
    own = written_tensors(source, drafter.own_taps)
    tensors = {name.removeprefix("net."): tensor for name, tensor in own.items()}
    rows_VD = embedding_rows(source)
    rows_VD[mask_token(source)] = tensors.pop("mask")
    return {**tensors, MASK: tensors[MASK].view(1, 1, -1), EMBEDDING: rows_VD}


def mask_token(source: ExportSource) -> int:
    """A token that no text contains (`specctl.runtime.target.templates.spare_token`)."""
    target = source.target
    found = spare_token(target.tokenizer, source.manifest.model_spec, target.eos_ids)
    if found is not None:
        return found
    raise IncompatibleError(
        "no token can stand for what is not known yet",
        found="a vocabulary without unused ids, and no padding of its own",
        expected="an id that no text contains, whose embedding row masked places can have",
        do="--to specctl",
    )


def check(source: ExportSource, folder: Path) -> None:
    """vLLM drafts what the drafter drafts, all of a draft in one pass."""
    drafter, mask = source.drafter, mask_token(source)
    assert isinstance(drafter, PEagle)
    trial = Trial.of(source, drafter.options.num_heads - 1, without=mask)
    reader = VllmEagle3(folder, embedding_of(source))
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(twin(source, drafter), trial))


LAYOUT = SpeculatorsLayout(write, check, "eagle3", length, {"parallel_drafting": True})
