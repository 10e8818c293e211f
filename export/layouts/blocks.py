"""DFlash's, DSpark's and Domino's parameters under their published names.

Our equations are the published ones but for the mask: ours is a vector of its own unless `mask_id`
was set in training, theirs is the embedding row of a token. An engine that reads an embedding from
the folder is given the target's with that one row replaced; one that always takes the target's
cannot hold such a drafter.
Letters: D hidden width, K draft vocabulary, N nodes, V target vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.dflash import InjectedBlocks
from specctl.drafters.dspark import PLAIN, DSpark
from specctl.drafters.nets.heads import head_rows
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import gate, head_factor
from specctl.export.layouts.speculators.eagle3 import embedding_rows, scaled_rows, written_tensors
from specctl.export.layouts.speculators.p_eagle import mask_token
from specctl.export.package.tensors import MAP_NAMES
from specctl.export.readers.trial import TOLERANCE, Trial, spoken, twin

SHARED = {  # our prefix -> theirs; the mask has no place of its own
    "fc.": "fc.",
    "fc_norm.": "hidden_norm.",
    "net.layers.": "layers.",
    "norm.": "norm.",
}
OWN = {  # of a family's correction
    "dspark": {
        "before.": "markov_head.markov_w1.",
        "bias.": "markov_head.markov_w2.",
        "confidence.": "confidence_head.proj.",
    },
    "domino": {
        "memory.weight_ih": "prefix_gru.weight_ih_l0",
        "memory.weight_hh": "prefix_gru.weight_hh_l0",
        "down.": "embed_proj.0.",
        "up.": "embed_proj.2.",
    },
}


def published_names(family: str) -> dict[str, str]:
    """Of a family's parameters: our prefix -> theirs."""
    return SHARED | OWN.get(family, {})


def blocks_of(source: ExportSource) -> InjectedBlocks:
    """The drafter, refused where an engine has no room for a part of it."""
    drafter = cast(InjectedBlocks, source.drafter)
    if isinstance(drafter, DSpark) and drafter.options.rank == 0:
        raise IncompatibleError(
            "a DSpark checkpoint has a correction for the token before",
            found="rank: 0",
            expected="rank: 1 or more",
            do="train dflash instead, or train with --set drafter.options.rank=32",
        )
    if drafter.window is not None:
        raise IncompatibleError(
            "engines do not agree on what a window means inside a block",
            found=f"window: {drafter.window}",
            expected="window: null",
            do="--to specctl, or train with --set drafter.options.window=null",
        )
    if isinstance(drafter, DSpark) and drafter.options.correction != PLAIN:
        raise IncompatibleError(
            "this format is written for DSpark's plain correction only",
            found=f"correction: {drafter.options.correction}",
            expected=f"correction: {PLAIN}",
            do="serve the package itself, or train with --set drafter.options.correction=plain",
        )
    return drafter


def block_tensors(source: ExportSource) -> dict[str, Tensor]:
    """Every parameter but the mask under its published name, and the target's LM-head rows where
    an engine could not share them as they are: of a trimmed vocabulary, or multiplied (Granite)."""
    drafter = blocks_of(source)
    tensors = {
        _published(name, drafter.family): tensor
        for name, tensor in written_tensors(source, drafter.own_taps).items()
        if name != "mask"
    }
    if "d2t" in tensors or head_factor(source) != 1.0:
        rows_KD = head_rows(source.target.borrowed(), drafter.vocab).detach()
        dtype = getattr(torch, source.manifest.dtype)
        tensors["lm_head.weight"] = rows_KD.to("cpu", dtype, copy=True).contiguous()
    return tensors


def _published(name: str, family: str) -> str:
    for ours, theirs in published_names(family).items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    assert name in MAP_NAMES, name
    return name


def mask_row(source: ExportSource) -> int:
    """The token id of every mask: the one it was trained with, or one that texts do not contain."""
    given: int | None = blocks_of(source).options.mask_id
    return mask_token(source) if given is None else given


def embedding_tensors(source: ExportSource) -> dict[str, Tensor]:
    """The drafter's own embedding, where the target's bare rows are not what it reads: the mask in
    the row of its token, all others scaled as the target scales them (Gemma)."""
    mask_D = blocks_of(source).module.mask
    if mask_D is None:
        return scaled_rows(source)
    rows_VD = embedding_rows(source)
    rows_VD[mask_row(source)] = mask_D.detach().to(rows_VD)
    return {"embed_tokens.weight": rows_VD}


def check_confidence(source: ExportSource, theirs_N: Tensor | None, trial: Trial) -> None:
    """A GateError unless an engine is as sure of each place as the drafter is while serving."""
    if theirs_N is None:
        raise gate("no confidence head", "the drafter's own")
    with torch.no_grad():
        steps = spoken(twin(source, source.drafter), trial)
        ours_N = torch.stack([state.confidence()[0] for state, _ in steps])
    error = float((theirs_N - ours_N).abs().max())
    if not error <= TOLERANCE:
        raise gate(f"confidences differ by {error:.1e}", f"at most {TOLERANCE:g}")
