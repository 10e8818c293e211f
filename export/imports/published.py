"""A published folder as it lies there: config.json and tensors, read by our own rules. Nothing of
it is run and nothing unpickled; code that it names (`auto_map`) is never looked for.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.storage.model_folder import ADAPTER, is_adapter_alone, is_inside, something_else
from specctl.export.package.files import (
    PICKLE_SUFFIXES,
    model_files,
    open_folder,
    read_header,
    read_json,
)
from specctl.export.package.manifest import CARD, MANIFEST, WEIGHTS, read_manifest
from specctl.export.package.tensors import read_tensors, write_tensors
from specctl.models.weights.mtp_layout import KINDS
from specctl.runtime.target.folders.checkpoint_folder import INDEX, weight_files
from specctl.runtime.target.folders.stored_names import check_unwrapped, plain_name, wrapper_note
from specctl.runtime.target.mtp_checkpoint import read_layout, stored_module
from specctl.runtime.target.variants import adapter
from specctl.runtime.target.variants.adapter import read_adapters

CONFIG = "config.json"
OF_ADAPTERS = "uno"  # the family whose drafters are published as adapters of the target
OF_A_RUN = ("training_args", "optimizer", "scheduler", "rng_state", "trainer_state", "scaler")
MOST_CLAIMS, MOST_SHOWN = 3, 160
_CLAIM = re.compile(
    r"(?=.*\d)(accept\w*[ _-](length|rate|len|per)|mean accepted|\btau\b)", re.IGNORECASE
)
CONVERT = (
    "where you trust its author, convert it beside itself and delete the pickle: "
    "t = torch.load('{name}', weights_only=True, map_location='cpu') ; "
    "safetensors.torch.save_file({{n: w.clone() for n, w in t.items()}}, '{stem}.safetensors')"
)


@dataclass(frozen=True, slots=True)
class Published:
    """The folder, its configuration, its tensors by name, the files that hold them, and the lines
    of its README that speak of acceptance. `notes` say how it was read; `is_renamed`: the files
    have a wrapper's names, `tensors` those that are left without it."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    claims: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_renamed: bool = False

    @contextmanager
    def staged(self, tensors: Mapping[str, Tensor] | None = None, **fields: Any) -> Iterator[Path]:
        """A folder with the same weights, or with `tensors`, and a configuration with other values
        of these keys and without code, for a reader that needs an engine's own spelling."""
        body = {key: value for key, value in self.config.items() if key != "auto_map"}
        tensors = self.tensors if tensors is None and self.is_renamed else tensors
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / CONFIG).write_text(json.dumps(body | fields), encoding="utf-8")
            if tensors is not None:
                write_tensors({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS)
            for path in self.files if tensors is None else ():
                os.symlink(path, folder / path.name)
            yield folder


def read_published(path: Path, is_adapter: bool = False) -> Published:
    """The folder, or why it cannot be read; `is_adapter`: it is to be an adapter of peft."""
    folder = open_folder(path)
    if is_adapter:
        return _adapter(folder)
    if (module := _carried(folder)) is not None:
        return module
    if is_adapter_alone(folder):
        raise IncompatibleError(
            "the folder holds a LoRA adapter, not a drafter's head",
            found=ADAPTER,
            expected=f"{CONFIG} and weights in safetensors",
            do=f"of a draft model it drafts as it is: --draft {folder}; of a target: "
            f"--target {folder}; UNO's: --family {OF_ADAPTERS}",
            where=str(path),
        )
    files = model_files(folder)
    _refuse_ours(folder, files)
    weights = [name for name in files if name.endswith(".safetensors")]
    if INDEX in files:
        weight_files(folder)  # what it names is plain safetensors
    elif WEIGHTS not in files:
        _refuse_pickles(folder)
    if CONFIG not in files or not weights:
        names = sorted(item.name for item in folder.iterdir())
        raise something_else(folder) or FileError(
            "the folder holds no published drafter",
            found=", ".join(names[:5]) or "an empty folder",
            expected=f"{CONFIG} and weights in safetensors",
            do="give the whole folder: `hf download OWNER/NAME --local-dir FOLDER`",
            where=str(path),
        )
    paths = tuple(
        files[name].resolve() if files[name].is_symlink() else files[name] for name in weights
    )
    card = folder / CARD
    claims = _claims(card) if card.is_file() and is_inside(card) else ()
    stored = _tensors(weights, paths)
    check_unwrapped(stored, str(folder))
    tensors = {plain_name(name): tensor for name, tensor in stored.items()}
    config, note = read_json(files[CONFIG]), wrapper_note(stored)
    notes = (note,) if note else ()
    return Published(folder, config, tensors, paths, claims, notes, is_renamed=bool(note))


def _adapter(folder: Path) -> Published:
    """Its settings and tensors, checked as those of a target's adapter are."""
    (checked,) = read_adapters((str(folder),))
    path = checked.folder / adapter.TENSORS
    tensors = read_tensors(path.resolve() if path.is_symlink() else path)
    return Published(folder, read_json(folder / ADAPTER), tensors, (path,))


def _refuse_pickles(folder: Path) -> None:
    """Of a folder without safetensors of the usual name, whose weights they may be."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    kept = [name for name in names if not name.startswith(OF_A_RUN)]
    pickles = [name for name in kept if Path(name).suffix.lower() in PICKLE_SUFFIXES]
    if pickles and (folder / CONFIG).is_file():
        name = ascii(pickles[0])[1:-1]
        raise IntegrityError(
            "refused pickled weights: loading them can run code",
            found=name,
            expected="safetensors",
            do=CONVERT.format(name=name, stem=Path(name).stem),
        )


def _carried(folder: Path) -> Published | None:
    """Of a whole checkpoint the module that it carries beside the model; None without one."""
    path = folder / CONFIG
    if not path.is_file() or (folder / MANIFEST).is_file():
        return None
    body = read_json(path)
    inner = body.get("text_config")
    kinds = [each.get("model_type") for each in (body, inner) if isinstance(each, dict)]
    if not any(kind in KINDS for kind in kinds):
        return None
    _, layout = read_layout(folder)
    tensors = stored_module(folder, layout)
    return Published(folder, body, tensors, weight_files(folder)) if tensors else None


def _claims(path: Path) -> tuple[str, ...]:
    """Lines that put a number on acceptance, shortened and without what a terminal would obey."""
    with path.open("rb") as stream:
        lines = stream.read(1 << 20).decode("utf-8", errors="replace").splitlines()
    said = [ascii(" ".join(line.split()))[1:-1] for line in lines if _CLAIM.search(line)]
    return tuple(line[:MOST_SHOWN] for line in said[:MOST_CLAIMS])


def _refuse_ours(folder: Path, files: Mapping[str, Path]) -> None:
    """A package is at home already; exports for engines may come back."""
    if MANIFEST in files and read_manifest(folder).is_loadable:
        raise IncompatibleError(
            "the folder is a specctl package already",
            found=MANIFEST,
            expected="a drafter that another toolkit published",
            do=f"use it as it is: specctl show {folder}",
        )


def _tensors(names: Sequence[str], paths: Sequence[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, path in zip(names, paths, strict=True):
        twice = sorted(read_header(path).keys() & found.keys())
        if twice:
            raise IntegrityError(
                "two files hold a tensor of one name",
                found=ascii(twice[0])[1:-1][:100],
                expected="every tensor once",
                do="keep the files of one version of the weights",
                where=name,
            )
        found |= read_tensors(path)
    return found
