"""Flat checkpoints for SGLang; those of EAGLE-3, DFlash2 and LiLiCorr load in vLLM as well. One
layout per kind of drafter in `specctl.export.layouts.sglang`.

SGLang drops tensors whose names it does not know and leaves parameters that it does not find as
they are, so nothing here depends on its messages: the readers that `check` uses refuse both.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from specctl.export.formats import ExportSource, Format
from specctl.export.layouts.engines import check_vocab, dump_json, refuse_scaled_embedding
from specctl.export.layouts.sglang import blocks, dflash2, domino, eagle, eagle3, lilicorr
from specctl.export.layouts.sglang.layout import Flat, FlatFolder
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors

LAYOUTS: dict[str, Flat] = {
    "coral": eagle.FLAT,
    "dflash": blocks.DFLASH_FLAT,
    "dflash2": dflash2.FLAT,
    "domino": domino.FLAT,
    "dspark": blocks.DSPARK_FLAT,
    "eagle": eagle.FLAT,
    "eagle3": eagle3.FLAT,
    "fspad": eagle.FLAT,
    "hass": eagle.FLAT,
    "lilicorr": lilicorr.FLAT,
}


def layout(source: ExportSource) -> FlatFolder:
    refuse_scaled_embedding(source, "SGLang")
    return LAYOUTS[source.manifest.family].write(source)


def write(source: ExportSource, folder: Path) -> None:
    written = layout(source)
    refuse_not_finite(written.tensors)
    write_tensors(written.tensors, folder / WEIGHTS)
    dump_json(written.config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    """What lies there is whole, drafts what the drafter drafts, and has sound vocabulary tables."""
    check_files(folder)
    kind, tensors = LAYOUTS[source.manifest.family], load_file(folder / WEIGHTS)
    vocabulary = source.manifest.vocabulary
    kind.check(source, folder)
    check_vocab(tensors, vocabulary.draft_size, vocabulary.target_size)
    compare_tensors(kind.write(source).tensors, tensors)


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    kind = LAYOUTS[source.manifest.family]
    return kind.serve(source, folder, kind.algorithm)


def notes(source: ExportSource) -> tuple[str, ...]:
    return LAYOUTS[source.manifest.family].notes(source)


FORMAT = Format(
    name="sglang",
    summary="flat checkpoint for SGLang (of EAGLE-3, DFlash2, LiLiCorr for vLLM as well)",
    families=tuple(sorted(LAYOUTS)),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    layout=layout,
)
