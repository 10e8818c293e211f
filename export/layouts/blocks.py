"""What exports of block drafters share: which they refuse, their parameters, their mask.

Our equations are the published ones but for the mask: ours is a vector of its own unless `mask_id`
was set in training, theirs is the embedding row of a token. An engine that reads an embedding from
the folder is given the target's with that one row replaced; one that always takes the target's
cannot hold such a drafter.
Letters: D hidden width, K draft vocabulary, N nodes, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.dflash import InjectedBlocks
from specctl.drafters.blocks.dspark import GATED, PLAIN, RNN, DSpark
from specctl.drafters.nets.heads import head_rows
from specctl.export.formats import ExportSource
from specctl.export.layouts.block_names import published_name
from specctl.export.layouts.engines import gate, head_factor, refuse_sink
from specctl.export.layouts.speculators.eagle3 import embedding_rows, scaled_rows, written_tensors
from specctl.export.layouts.speculators.p_eagle import mask_token
from specctl.export.readers.block_heads import VANILLA
from specctl.export.readers.trial import TOLERANCE, Trial, spoken, twin

MARKOV = {PLAIN: VANILLA, GATED: GATED, RNN: RNN}  # `correction` -> `markov_head_type`


def blocks_of(source: ExportSource) -> InjectedBlocks:
    """The drafter, refused where no engine has room for what it is."""
    drafter = cast(InjectedBlocks, source.drafter)
    if isinstance(drafter, DSpark) and drafter.options.rank == 0:
        raise IncompatibleError(
            "a DSpark checkpoint has a correction for the token before",
            found="rank: 0",
            expected="rank: 1 or more",
            do="train dflash instead, or train with --set drafter.options.rank=32",
        )
    refuse_sink(drafter.window)
    options = drafter.options
    if drafter.family == "dflash2" and not (options.candidates and options.conv_taps):
        raise IncompatibleError(
            "a DFlash2 checkpoint has convolutions and a selector",
            found=f"conv_taps: {options.conv_taps}, candidates: {options.candidates}",
            expected="1 or more of both",
            do="serve the package itself, or train with --set drafter.options.conv_taps=2 "
            "--set drafter.options.candidates=16",
        )
    return drafter


def refuse_heads(source: ExportSource, engine: str) -> None:
    """Of an engine that computes DSpark's plain correction only."""
    drafter = source.drafter
    if isinstance(drafter, DSpark) and drafter.options.correction != PLAIN:
        raise IncompatibleError(
            f"{engine} computes DSpark's plain correction only",
            found=f"correction: {drafter.options.correction}",
            expected=f"correction: {PLAIN}",
            do="--to sglang, or train with --set drafter.options.correction=plain",
        )


def refuse_part(source: ExportSource, engine: str) -> None:
    """Of a family that an engine drafts over all of the target's ids."""
    vocab = source.drafter.vocab
    if vocab is not None and vocab.size < vocab.target_size:
        raise IncompatibleError(
            f"{engine} drafts a block over all of the target's ids",
            found=f"a vocabulary of {vocab.size:,} ids",
            expected=f"all {vocab.target_size:,}",
            do="--to speculators (vLLM) for dflash and dspark, or train with --set vocab.size=null",
        )


def window_keys(drafter: InjectedBlocks) -> dict[str, Any]:
    """Which layers have a window: all, or none. Engines count the row itself, as we do."""
    kind = "full_attention" if drafter.window is None else "sliding_attention"
    size = None if drafter.window is None else drafter.window.size
    return {"layer_types": [kind] * len(drafter.net.layers), "sliding_window": size}


def block_tensors(source: ExportSource) -> dict[str, Tensor]:
    """Every parameter but the mask under its published name, and the target's LM-head rows where
    an engine could not share them as they are: of a trimmed vocabulary, or multiplied (Granite)."""
    drafter = blocks_of(source)
    written = written_tensors(source, drafter.own_taps)
    tensors = {published_name(n, drafter.family): t for n, t in written.items() if n != "mask"}
    if "d2t" in tensors or head_factor(source) != 1.0:
        rows_KD = head_rows(source.target.borrowed(), drafter.vocab).detach()
        dtype = getattr(torch, source.manifest.dtype)
        tensors["lm_head.weight"] = rows_KD.to("cpu", dtype, copy=True).contiguous()
    return tensors


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
