"""DFlash's and DSpark's parameters under their published names.

Our equations are the published ones but for the mask: ours is a vector of its own, theirs is the
embedding row of a spare token id. An engine that reads an embedding from the folder is given the
target's with that one row replaced; one that always takes the target's cannot hold such a drafter.
Letters: K draft vocabulary, V target vocabulary, D width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from specctl.drafters.dflash import InjectedBlocks
from specctl.drafters.dspark import DSpark
from specctl.drafters.parts.heads import head_rows
from specctl.export.folder import MAP_NAMES
from specctl.export.formats import Source
from specctl.export.speculators.eagle3 import embedding_rows, written_tensors
from specctl.export.speculators.p_eagle import mask_token
from specctl.recipes.errors import IncompatibleError

PUBLISHED = {  # our prefix -> theirs; the mask has no place of its own
    "fc.": "fc.",
    "fc_norm.": "hidden_norm.",
    "net.layers.": "layers.",
    "norm.": "norm.",
    "before.": "markov_head.markov_w1.",
    "bias.": "markov_head.markov_w2.",
    "confidence.": "confidence_head.proj.",
}


def blocks_of(source: Source) -> InjectedBlocks:
    """The drafter, refused where an engine has no room for a part of it."""
    drafter = cast(InjectedBlocks, source.drafter)
    if isinstance(drafter, DSpark) and drafter.options.rank == 0:
        raise IncompatibleError(
            "a DSpark checkpoint has a correction for the token before",
            found="rank: 0",
            expected="rank: 1 or more",
            do="train dflash instead, or train with --set drafter.options.rank=32",
        )
    return drafter


def block_tensors(source: Source) -> dict[str, Tensor]:
    """Every parameter but the mask under its published name; of a trimmed vocabulary the target's
    rows as well."""
    drafter = blocks_of(source)
    tensors = {
        _published(name): tensor
        for name, tensor in written_tensors(source, drafter.own_taps).items()
        if name != "mask"
    }
    if "d2t" in tensors:
        rows_KD = head_rows(source.target.borrowed(), drafter.vocab).detach()
        dtype = getattr(torch, source.manifest.dtype)
        tensors["lm_head.weight"] = rows_KD.to("cpu", dtype, copy=True).contiguous()
    return tensors


def _published(name: str) -> str:
    for ours, theirs in PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    assert name in MAP_NAMES, name
    return name


def masked_embedding(source: Source) -> Tensor:
    """[V, D]: the target's embedding as the drafter reads it, the mask in the row of its token."""
    rows_VD, mask_D = embedding_rows(source), blocks_of(source).module.mask
    rows_VD[mask_token(source)] = mask_D.detach().to(rows_VD)
    return rows_VD
