"""UNO's additions as an adapter folder of peft, which SGLang reads (`--uno-lora-path`): plain LoRA,
the factors as they are stored. Which rows they are for, and up to which id noise goes, peft has no
place for: engines know the one and take the whole vocabulary for the other.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.drafters.tokens.uno import Uno
from specctl.export.formats import TARGET, ExportSource, Format
from specctl.export.layouts.adapter import published
from specctl.export.layouts.engines import dump_json
from specctl.export.package.manifest import check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS, plain_config, read_adapters


def drafter_of(source: ExportSource) -> Uno:
    drafter = source.drafter
    assert isinstance(drafter, Uno)
    return drafter


def tensors_of(source: ExportSource) -> dict[str, Tensor]:
    tensors = published(drafter_of(source).tensors())
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def fits(source: ExportSource) -> None:
    if drafter_of(source).vocab is not None:
        raise IncompatibleError(
            "an adapter has no draft vocabulary",
            found="a trimmed drafter",
            expected="the target's whole vocabulary",
            do="export the package that it was trimmed from",
        )


def write(source: ExportSource, folder: Path) -> None:
    options, tensors = drafter_of(source).options, tensors_of(source)
    refuse_not_finite(tensors)
    write_tensors(tensors, folder / TENSORS)
    base = source.manifest.target.repo
    dump_json(plain_config(options.rank, options.alpha, base, options.targets), folder / CONFIG)


def check(source: ExportSource, folder: Path) -> None:
    """Bit for bit the factors, scaled as the drafter scales them by peft's own rules."""
    check_files(folder)
    compare_tensors(tensors_of(source), load_file(folder / TENSORS))
    (adapter,) = read_adapters((str(folder),))
    options = drafter_of(source).options
    assert {*adapter.scales.values()} == {options.alpha / options.rank}, adapter.scales
    assert json.loads((folder / CONFIG).read_text("ascii"))["target_modules"]


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """SGLang's linear mode: the width counts the newest token's row."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", TARGET]
    words += ["--speculative-algorithm", "UNO", "--uno-lora-path", folder]
    width = str(drafter_of(source).options.num_heads)
    return (shlex.join([*words, "--speculative-num-draft-tokens", width]),)


def notes(source: ExportSource) -> tuple[str, ...]:
    found = "SGLang drafts so on CUDA with FA3 attention, on one device, without grammars"
    mask_id = drafter_of(source).options.mask_id
    if mask_id is None:
        return (found,)
    return (found, f"its noise is of the whole vocabulary, not of the ids below {mask_id}")


FORMAT = Format(
    name="peft",
    summary="UNO's additions as a LoRA adapter of peft, for SGLang",
    families=("uno",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    fits=fits,
)
