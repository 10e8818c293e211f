"""DFly and DFlare as AngelSlim publishes them: flat checkpoints for AngelSpec's and AngelSlim's own
tools. No released engine reads either; vLLM's pull request 50246, which is open, reads DFly's.

AngelSpec has the settings of DFly at the top of config.json, where `num_target_layers` counts the
layers that are read; AngelSlim has those of DFlare inside `dflash_config`. Which token a slot
predicts stands in no folder of theirs. It is written all the same, in the words of speculators
(`sample_from_anchor`) and of vLLM's DSpark (`dspark_bonus_anchor`), which runs DFly there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from specctl.core.errors import IncompatibleError
from specctl.drafters.blocks.dfly import DFly
from specctl.export.formats import ExportSource, Format
from specctl.export.layouts.blocks import blocks_of
from specctl.export.layouts.engines import dump_json, refuse_scaled_embedding
from specctl.export.layouts.sglang import blocks
from specctl.export.layouts.sglang.layout import FlatFolder
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors
from specctl.export.readers.angelslim import ENGINES, FLARE, FLY, READERS
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin

FILLS_IN = {"sample_from_anchor": False, "dspark_bonus_anchor": True}


def folder_of(source: ExportSource) -> FlatFolder:
    """config.json and the tensors."""
    drafter, engine = blocks_of(source), ENGINES[source.manifest.family]
    refuse_scaled_embedding(source, engine)
    _refuse_others(source, engine)
    if not isinstance(drafter, DFly):
        flat = blocks.folder_of(source, FLARE, {}, engine=engine)
        own: dict[str, Any] = {"model_arch": "dflare", "sample_from_anchor": False}
        return FlatFolder({**flat.config, **own}, flat.tensors)
    flat = blocks.folder_of(source, FLY, {}, is_twice=True, engine=engine)
    own = {
        "model_arch": "dfly",
        "num_target_layers": len(drafter.own_taps),
        "target_hidden_size": drafter.spec.hidden_size,
        "target_num_hidden_layers": drafter.spec.num_layers,
        "enable_hidden_correction": True,
        "hidden_correction_intermediate_size": drafter.options.inner,
        **FILLS_IN,
    }
    plain = {key: value for key, value in flat.config.items() if key != "dflash_config"}
    return FlatFolder({**plain, **own}, flat.tensors)


def _refuse_others(source: ExportSource, engine: str) -> None:
    """What their modules do not compute."""
    options = blocks_of(source).options
    wanted = {"causal": False, "window": None, "fusion": True}
    for name, value in wanted.items():
        found = getattr(options, name, value)
        if found != value:
            shown = "null" if value is None else str(value).lower()
            raise IncompatibleError(
                f"{engine}'s block has no such switch",
                found=f"{name}: {str(found).lower()}",
                expected=f"{name}: {shown}",
                do=f"--to specctl, or train with --set drafter.options.{name}={shown}",
            )


def write(source: ExportSource, folder: Path) -> None:
    written = folder_of(source)
    refuse_not_finite(written.tensors)
    write_tensors(written.tensors, folder / WEIGHTS)
    dump_json(written.config, folder / "config.json")


def check(source: ExportSource, folder: Path) -> None:
    """The block is scored there as the drafter scores it."""
    check_files(folder)
    drafter, family = blocks_of(source), source.manifest.family
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    rows = embedding_of(source), head_of(source)
    reader = READERS[family](folder, *rows, drafter.spec.num_layers)
    ours = drafted_logits(twin(source, drafter), trial)
    compare(ENGINES[family], reader.drafted_logits(trial), ours)
    compare_tensors(folder_of(source).tensors, load_file(folder / WEIGHTS))


def notes(source: ExportSource) -> tuple[str, ...]:
    words = "no released engine serves this folder"
    if source.manifest.family == "dfly":
        words += "; vLLM's open pull request 50246 reads it, with the method dspark"
    return (words + "; specctl serves the package",)


FORMAT = Format(
    name="angelslim",
    summary="DFly and DFlare as AngelSlim publishes them",
    families=tuple(sorted(READERS)),
    write=write,
    check=check,
    serve=lambda source, folder: (),
    notes=notes,
    layout=folder_of,
)
