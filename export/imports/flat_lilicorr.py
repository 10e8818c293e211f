"""Flat LiLiCorr folders (architecture LiLiCorrDraftModel, or DFlashDraftModel with
`projector_type: lilicorr`), read as SGLang reads them. vLLM reads them alike. Two spellings of the
lattice's tensors are read: that of engines, and that of ModelOpt's trainer, which counts the parts
of an MLP.

Scale and epsilon change scores without changing a shape, and lost sizes of convolutions leave out
the convolutions without a word: all keys of a part must be there. A DFlashDraftModel without its
projector type is a DFlash to every engine, so the tensors of the head are refused there by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import refuse_variants
from specctl.export.imports.flat import (
    FlatRules,
    imported,
    kind_of,
    nested_of,
    number_of,
    reading_of,
    settings_of,
)
from specctl.export.imports.heads import REPAIR, refused
from specctl.export.imports.published import Published
from specctl.export.readers.sglang_lilicorr import LILICORR, SglangLattice
from specctl.runtime.target.target import Target

COUNTS = {  # our options -> their keys
    "candidates": "lilicorr_candidate_topk",
    "lattice_layers": "lilicorr_num_layers",
    "lattice_heads": "lilicorr_num_heads",
    "factor": "lilicorr_factor_dim",
}
NUMBERS = {
    "mlp_ratio": "lilicorr_mlp_ratio",
    "eps": "lilicorr_vector_eps",
    "scale": "lilicorr_logit_scale",
}
CONV = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) == "lilicorr"


def read(published: Published, target: Target) -> Imported:
    body = published.config
    nested, settings = nested_of(body), settings_of(body)
    refuse_variants(settings, projector_type=(None, "lilicorr"), lilicorr_enabled=(None, True))
    own: dict[str, Any] = {option: number_of(nested, key) for option, key in COUNTS.items()}
    own |= {option: _real(nested, key) for option, key in NUMBERS.items()}
    width = number_of(nested, "lilicorr_hidden_size", 0)
    own["width"] = width or target.spec.hidden_size  # 0: that of the stack
    if any(nested.get(key) for key in CONV.values()):
        own |= {option: number_of(nested, key) for option, key in CONV.items()}
    size = number_of(settings, "block_size", 2)
    reading = reading_of(body, "lilicorr", size - 1, own)
    return imported(published, target, reading, FlatRules(LILICORR, SglangLattice))


def _real(settings: Mapping[str, Any], key: str) -> float:
    found = settings.get(key)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < 1e6:
        what = "config.json does not say a number that no shape shows"
        raise refused(what, f"{key}: {found}", "more than 0", REPAIR, f"config.json:{key}")
    return float(found)


IMPORTER = Importer(
    "flat-lilicorr",
    "architectures LiLiCorrDraftModel, DFlashDraftModel with projector_type lilicorr",
    knows,
    read,
)
