"""LiLiCorr as a flat checkpoint, which SGLang and vLLM read: DFlash's, with the lattice under the
names of engines (ModelOpt's trainer counts the parts of an MLP). What holds of DFlash's embedding,
mask and vocabulary holds here. None of the lattice's sizes has a default in an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.lilicorr import LiLiCorr
from specctl.export.formats import ExportSource
from specctl.export.layouts.sglang import blocks
from specctl.export.layouts.sglang.layout import Flat, FlatFolder
from specctl.export.readers.lattice import MOST
from specctl.export.readers.sglang_blocks import ENGINE
from specctl.export.readers.sglang_lilicorr import LILICORR, SglangLattice
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin


def write(source: ExportSource) -> FlatFolder:
    drafter = source.drafter
    assert isinstance(drafter, LiLiCorr)
    options = drafter.options
    count = options.candidates
    if count > MOST or count & (count - 1) or count > drafter.spec.vocab_size:
        raise IncompatibleError(
            "engines choose among a power of two of candidates",
            found=f"candidates: {count}",
            expected=f"1, 2, 4, 8 or {MOST}",
            do="serve the package itself, or train with --set drafter.options.candidates=8",
        )
    if not options.lattice_layers:
        raise IncompatibleError(
            "engines have a lattice of one layer or more",
            found="lattice_layers: 0",
            expected="lattice_layers: 1 or more",
            do="serve the package itself, or train with --set drafter.options.lattice_layers=2",
        )
    own: dict[str, Any] = {
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": count,
        "lilicorr_hidden_size": options.width,
        "lilicorr_num_layers": options.lattice_layers,
        "lilicorr_num_heads": options.lattice_heads,
        "lilicorr_mlp_ratio": options.mlp_ratio,
        "lilicorr_factor_dim": options.factor,
        "lilicorr_vector_eps": options.eps,
        "lilicorr_logit_scale": options.scale,
    }
    if options.conv_taps:
        own |= {"conv_kernel_size": options.conv_taps, "conv_group_size": options.conv_group}
    return blocks.folder_of(source, LILICORR, own)


def check(source: ExportSource, folder: Path) -> None:
    """SGLang links the candidates of each slot as the drafter does."""
    drafter = source.drafter
    assert isinstance(drafter, LiLiCorr)
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    layers = drafter.spec.num_layers
    reader = SglangLattice(folder, embedding_of(source), head_of(source), layers)
    trial = reader.walked(trial)
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(twin(source, drafter), trial))


def notes(source: ExportSource) -> tuple[str, ...]:
    return ("SGLang drafts greedily unless SGLANG_ENABLE_LILICORR_SAMPLING=1 is set",)


FLAT = Flat("DFLASH", write, check, blocks.serve_both, notes)
