"""The speculators format, which `vllm serve FOLDER` recognises by itself: config.json names the
algorithm, the target and the number of drafted tokens; one safetensors file holds the drafter.

Each family has a layout of its own in `export.speculators`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from safetensors.torch import load_file

from specctl.export.formats import ExportSource, Format
from specctl.export.layouts.engines import check_vocab, dump_json, vllm_command
from specctl.export.layouts.speculators import dflash, dflash2, dspark, eagle3, p_eagle
from specctl.export.layouts.speculators.layout import (
    SpeculatorsFolder,
    SpeculatorsLayout,
    config_of,
)
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors

LAYOUTS: dict[str, SpeculatorsLayout] = {
    "dflash": dflash.LAYOUT,
    "dflash2": dflash2.LAYOUT,
    "dspark": dspark.LAYOUT,
    "eagle3": eagle3.LAYOUT,
    "p-eagle": p_eagle.LAYOUT,
}


def layout(source: ExportSource) -> SpeculatorsFolder:
    return LAYOUTS[source.manifest.family].write(source)


def write(source: ExportSource, folder: Path) -> None:
    written = layout(source)
    refuse_not_finite(written.tensors)
    write_tensors(written.tensors, folder / WEIGHTS)
    dump_json(config_of(written, source), folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    """What lies there is whole, has sound vocabulary tables, and drafts what the drafter drafts."""
    check_files(folder)
    kind, tensors = LAYOUTS[source.manifest.family], load_file(folder / WEIGHTS)
    vocabulary = source.manifest.vocabulary
    check_vocab(tensors, vocabulary.draft_size, vocabulary.target_size)
    kind.check(source, folder)
    compare_tensors(kind.write(source).tensors, tensors)


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """The folder alone where its target has a repository; and with the target named."""
    kind = LAYOUTS[source.manifest.family]
    named = vllm_command(kind.method, kind.length(source), folder, **kind.how)
    alone = shlex.join(["vllm", "serve", folder])
    return (alone, named) if source.manifest.target.repo else (named,)


FORMAT = Format(
    name="speculators",
    summary="config.json and weights that `vllm serve` recognises by itself",
    families=tuple(sorted(LAYOUTS)),
    write=write,
    check=check,
    serve=serve,
    layout=layout,
)
