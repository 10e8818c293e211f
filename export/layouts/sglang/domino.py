"""Domino as a flat checkpoint: DFlash's, in which the root predicts, with the recurrent head. What
holds of DFlash's embedding, mask and vocabulary holds here.
"""

from __future__ import annotations

from pathlib import Path

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.domino import Domino
from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import sglang_command
from specctl.export.layouts.sglang import blocks
from specctl.export.layouts.sglang.layout import Flat, FlatFolder
from specctl.export.readers.sglang_blocks import ENGINE
from specctl.export.readers.sglang_domino import DOMINO, REQUIRED, SglangDomino
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin


def write(source: ExportSource) -> FlatFolder:
    drafter = source.drafter
    assert isinstance(drafter, Domino)
    options = drafter.options
    if not options.recurrent:
        raise IncompatibleError(
            "SGLang's Domino reads all drafted tokens",
            found="recurrent: false",
            expected="recurrent: true",
            do="serve the package itself, or train with --set drafter.options.recurrent=true",
        )
    folder = blocks.write(source)
    sizes = {"emb_dim": options.rank, "gru_hidden_dim": options.state}
    nested = {**folder.config["dflash_config"], **REQUIRED, **sizes}
    config = {**folder.config, **sizes, "architectures": [DOMINO], "dflash_config": nested}
    return FlatFolder(config, folder.tensors)


def check(source: ExportSource, folder: Path) -> None:
    """SGLang scores the block as the drafter does."""
    drafter = source.drafter
    assert isinstance(drafter, Domino)
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    layers = drafter.spec.num_layers
    reader = SglangDomino(folder, embedding_of(source), head_of(source), layers)
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(twin(source, drafter), trial))


def notes(source: ExportSource) -> tuple[str, ...]:
    return (
        "SGLang drafts greedily, in bfloat16 on CUDA, from a pool of 2,048 tokens; "
        "--speculative-domino-candidate-pool-size 0 scores all of them",
    )


def serve(source: ExportSource, folder: str, algorithm: str) -> tuple[str, ...]:
    """SGLang counts the root among the tokens of a block, whose last row then drafts nothing."""
    number = int(source.drafter.options.num_heads)
    words = sglang_command(algorithm, number, folder).split(" --speculative-num-steps")[0]
    return (f"{words} --speculative-num-draft-tokens {number}",)


FLAT = Flat("DFLASH", write, check, serve, notes)
