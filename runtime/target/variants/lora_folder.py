"""A folder of a LoRA adapter given as a model: the base that it names, with the adapter added.

peft writes the base's name into adapter_config.json, as a folder or as a hub id. The tokenizer and
chat template are the adapter's own where they lie beside it, since it was trained with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, NetworkError, SpecctlError
from specctl.core.storage.model_folder import ADAPTER, is_adapter_alone, refuse_stand_ins
from specctl.recipes.targets import ResolvedTarget, resolve
from specctl.runtime.target.checkpoint import (
    Loaded,
    check_config,
)
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.adapter_alone import AdapterAlone
from specctl.runtime.target.folders.checkpoint_folder import (
    read_object,
    read_settings,
    refuse_named_code,
)
from specctl.runtime.target.folders.folder_tokenizer import has_tokenizer, load_tokenizer

MOST_LINKS = 4  # adapters of adapters


@dataclass(frozen=True, slots=True)
class LoraModel:
    """What was loaded of the base, and the folders of the adapters to be added, in order."""

    loaded: Loaded
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoraBase:
    """Of a folder that is an adapter: the adapters in order, and the model below them."""

    adapters: tuple[str, ...]
    resolved: ResolvedTarget


def load_model(
    resolved: ResolvedTarget, load: Callable[[ResolvedTarget], Loaded], offline: bool = False
) -> LoraModel:
    """The checkpoint by `load`; where it is an adapter, its base, with what is to be added."""
    try:
        return LoraModel(load(resolved))
    except AdapterAlone as found:
        folder = found.folder
    base = base_of(resolved, folder, offline)
    loaded = load(base.resolved)
    own = Path(base.adapters[-1])
    if has_tokenizer(own):
        refuse_named_code(own)
        refuse_stand_ins(own)
        loaded = replace(loaded, tokenizer=load_tokenizer(own, loaded.model.config))
    said = f"{resolved.name} is a LoRA adapter: loaded with its base, {base.resolved.name}"
    return LoraModel(replace(loaded, notes=(said, *loaded.notes)), base.adapters)


def base_of(resolved: ResolvedTarget, folder: Path, offline: bool = False) -> LoraBase:
    """The whole model that the adapter in `folder` was trained on, through adapters of adapters."""
    adapters: list[str] = []
    while True:
        if resolved.path is None:  # only its texts were fetched so far
            folder = hub.download(resolved, offline, lambda _: None)
            if not is_adapter_alone(folder):
                read_settings(folder)  # weights came with it: refused, with the reason
        adapters.insert(0, str(folder if resolved.path is None else resolved.path))
        resolved = _named_base(folder)
        inner = _folder_of(resolved, folder, offline)
        if inner is None or not is_adapter_alone(inner):
            return LoraBase(tuple(adapters), resolved)
        if len(adapters) >= MOST_LINKS:
            raise _no_base(folder, f"more than {MOST_LINKS} adapters of adapters")
        folder = inner


def _named_base(folder: Path) -> ResolvedTarget:
    body = read_object(folder / ADAPTER)
    name, revision = body.get("base_model_name_or_path"), body.get("revision")
    if not isinstance(name, str) or not name.strip():
        raise _no_base(folder, f"base_model_name_or_path: {ascii(name)[:80]}")
    beside = folder / name
    if not Path(name).expanduser().exists() and beside.is_dir():
        name = str(beside)
    try:
        found = resolve(name, revision if isinstance(revision, str) else None)
    except SpecctlError as error:
        raise _no_base(folder, f"base_model_name_or_path: {ascii(name)[1:-1][:120]}") from error
    if found.file is not None:
        raise _no_base(folder, f"base_model_name_or_path: {ascii(name)[1:-1][:120]}, a GGUF file")
    if found.path is not None and found.path.resolve() == folder.resolve():
        raise _no_base(folder, "base_model_name_or_path: the adapter's own folder")
    return found


def _folder_of(resolved: ResolvedTarget, adapter: Path, offline: bool) -> Path | None:
    """The base's folder, its texts fetched; None where whoever loads it will say what is wrong."""
    if resolved.path is not None:
        return resolved.path

    def check(folder: Path) -> Any:
        return None if is_adapter_alone(folder) else check_config(folder, True)

    try:
        return hub.download(resolved, offline, check)
    except NetworkError as error:
        raise _no_base(adapter, f"{resolved.repo}: {error.found}"[:200]) from error


def _no_base(folder: Path, found: str) -> FileError:
    return FileError(
        "the base of the LoRA adapter is not to be had",
        found=found,
        expected=f"a folder or hub id in base_model_name_or_path of {ADAPTER}",
        do=f"write the base's folder or hub id into base_model_name_or_path of {ADAPTER}; of a "
        f"target you may say it instead: --target BASE --adapter {folder}",
        where=str(folder / ADAPTER),
    )


def beside(folders: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """The adapters of a model folder, then those that were given and are none of them."""
    known = {Path(folder).resolve() for folder in folders}
    others = [word for word in given if Path(word).expanduser().resolve() not in known]
    return (*folders, *others)
