"""Our own package folder: written whole or not at all, loaded only by the target it was made for.

    model.safetensors   the drafter's own weights (never the target's), d2t and t2d when trimmed
    model.gguf          in place of weights: the file whose model the drafter is (held_file.py)
    manifest.json       everything else a loader must know; see docs/package-format.md
    README.md           the model card, written from the manifest

`d2t` and `t2d` follow EAGLE-3: target id = i + d2t[i], t2d marks the kept ids.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import (
    IncompatibleError,
    IntegrityError,
    SpecctlError,
)
from specctl.core.storage.files import Disk, replace_file
from specctl.drafters import families
from specctl.export.package.atomic import new_folder
from specctl.export.package.card import render_card
from specctl.export.package.compat import check_allow
from specctl.export.package.files import check_name
from specctl.export.package.held_file import hold, num_parameters
from specctl.export.package.manifest import (
    CARD,
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    check_files,
    file_records,
    read_manifest,
)
from specctl.export.package.origin import redacted, utc_now, versions
from specctl.export.package.proof_record import RECORDS
from specctl.export.package.target_rows import rows_left_out
from specctl.export.package.tensors import (
    MAP_NAMES,
    compare_tensors,
    refuse_not_finite,
    widest_float,
    write_tensors,
)
from specctl.models.hf.without_fills import without_fills
from specctl.models.llama.fast_llama import LlamaModel
from specctl.recipes.drafter_names import drafter_names
from specctl.recipes.ollama_store import PREFIX
from specctl.recipes.serve import is_relaxed
from specctl.recipes.targets import aliases, resolve
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import AppliedAdapter


def save_package(
    drafter: Drafter,
    target: Target,
    out: Path,
    *,
    serve: Mapping[str, Any],
    recipe_digest: str,
    acceptance: Mapping[str, Any] | None,
    command: Sequence[str],
) -> Manifest:
    """Write a drafter as a package at `out` and return its manifest.

    An older package there is replaced in one step; anything else there is refused.
    """
    tensors = package_tensors(drafter)
    if drafter.file is None:
        refuse_unbuildable(drafter)
    left_out = rows_left_out(drafter, target, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    about = describe(drafter, target, tensors)
    if is_relaxed(serve.get("rule")):
        about["verification"] = "approximate"
    about |= {
        "target_rows": list(left_out),
        "serve": dict(serve),
        "recipe_digest": recipe_digest,
        "acceptance": None if acceptance is None else dict(acceptance),
        "command": redacted(command),
    }
    with new_folder(Path(out), own_files) as folder:
        if tensors:
            write_tensors(tensors, folder / WEIGHTS)
            compare_tensors(tensors, load_file(folder / WEIGHTS))
        if drafter.file is not None:
            hold(drafter.file, folder)
        return seal_folder(folder, about)


def own_files(folder: Path) -> tuple[str, ...] | None:
    """The files of a package that specctl wrote, the manifest last, so that a deletion that was
    cut short can be finished; None for any other folder. What cannot be read is a FileError."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        names = read_manifest(folder).files
        for name in names:
            check_name(name)
    except (IntegrityError, IncompatibleError):
        return None
    return (*RECORDS, *names, MANIFEST)


def seal_folder(folder: Path, about: Mapping[str, Any]) -> Manifest:
    """Add the card and the manifest to a folder whose other files are complete."""
    body = {**about, "files": _as_json(file_records(folder))}
    replace_file(Disk(), folder / CARD, render_card(_seal(body)).encode())
    manifest = _seal({**about, "files": _as_json(file_records(folder))})
    replace_file(Disk(), folder / MANIFEST, manifest.render())
    return manifest


def _seal(body: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.seal(body)
    except (ValidationError, TypeError) as error:
        raise SpecctlError(
            "a package cannot be described",
            found=str(error).replace("\n", " ")[:400],
            expected="values that a manifest can hold",
            do="correct the named field of the recipe or of the measured acceptance",
        ) from error


def _as_json(records: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.model_dump() for name, record in records.items()}


def describe(drafter: Drafter, target: Target, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a manifest that follow from the drafter and its target."""
    needs, vocab, spec = drafter.needs(), drafter.vocab, drafter.spec
    own = {n: t for n, t in tensors.items() if n not in MAP_NAMES}
    count = sum(t.numel() for t in own.values() if t.is_floating_point())
    return {
        "format_version": FORMAT_VERSION,
        "format": "specctl",
        "created": utc_now(),
        "family": drafter.family,
        "options": asdict(drafter.options),
        "spec": spec.to_json(),
        "dtype": widest_float(own),
        "parameters": count if drafter.file is None else num_parameters(drafter),
        "target": target_record(target),
        "tokenizer": target.tokenizer_fingerprint,
        "chat_template": target.template_digest,
        "taps": {
            "convention": "hidden_states",
            "indices": list(needs.taps),
            "topk": needs.topk,
            "borrow": needs.borrow,
        },
        "vocabulary": {
            "target_size": spec.vocab_size,
            "draft_size": spec.vocab_size if vocab is None else vocab.size,
            "digest": None if vocab is None else vocab.digest(),
        },
        "verification": "lossless" if drafter.lossless else "approximate",
        "versions": versions(),
    }


def target_record(target: Target) -> dict[str, Any]:
    """How a manifest names a target: so that it is found from any folder of this machine."""
    return {
        "name": _lasting(target.name),
        "repo": _repo(target.name),
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "inflated": target.inflated,
        "dtype": target.dtype_name,
        **({} if target.changed is None else {"changed": asdict(target.changed)}),
        **({"adapters": [_adapter(one) for one in target.adapters]} if target.adapters else {}),
    }


def _lasting(name: str) -> str:
    """A target's name; of a folder or a file its whole path: a relative one means nothing
    elsewhere. Names of Ollama's models mean the same everywhere."""
    try:
        is_here = name not in aliases() and resolve(name).repo is None
    except SpecctlError:
        return name
    return whole_path(name) if is_here and not name.startswith(PREFIX) else name


def _adapter(applied: AppliedAdapter) -> dict[str, Any]:
    is_folder = Path(applied.name).expanduser().is_dir()
    return asdict(applied) | ({"name": whole_path(applied.name)} if is_folder else {})


def whole_path(name: str) -> str:
    """The path of that name from the root; links stay as they are."""
    return os.path.abspath(Path(name).expanduser())


def _repo(name: str) -> str | None:
    """The hub repository behind a target's name, None for a folder or a model made in memory."""
    try:
        return resolve(name).repo
    except SpecctlError:
        return None


def package_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """What a package stores as tensors, on the CPU: own weights and the vocabulary maps; all
    finite. Of the model of a GGUF file the maps alone."""
    tensors = drafter.tensors() if drafter.file is None else {}
    clash = [name for name in MAP_NAMES if name in tensors]
    assert not clash, f"{drafter.family} stores {clash} itself; the package writes them"
    whole = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    refuse_not_finite(whole)
    if drafter.vocab is not None:
        whole["d2t"] = drafter.vocab.d2t().cpu().contiguous()
        whole["t2d"] = drafter.vocab.t2d().cpu().contiguous()
    return whole


def refuse_unbuildable(drafter: Drafter) -> None:
    """A loader builds from family, options and target shape alone: they must describe this drafter
    (those of a model taken from elsewhere may not). A memory of any length is no part of that."""
    if drafter.holds_data:
        return
    with without_fills():  # shapes only, and no random numbers are drawn
        again = families()[drafter.family].build(drafter.options, drafter.spec, drafter.vocab)
    if _layout(again) != _layout(drafter):
        raise IncompatibleError(
            f"the options of {drafter.family} do not describe this drafter",
            found=f"a {type(drafter.module).__name__} of another shape than the options give",
            expected="a drafter that its options, its vocabulary and its target's shape rebuild",
            do="use the transformers folder it came from as it is, or train a draft with specctl",
        )


def _layout(drafter: Drafter) -> tuple[Any, ...]:
    """Names and shapes of what is stored, and the constants of a Llama that are not stored."""
    sizes = {name: tuple(t.shape) for name, t in drafter.tensors().items()}
    if not isinstance(drafter.module, LlamaModel):
        return (sizes,)
    rotary = drafter.module.rotary
    return sizes, drafter.module.shape, rotary.scale, rotary.inv_freq.tolist()


def load_drafter(
    path_or_name: str | Path,
    target: Target,
    *,
    allow: Sequence[str] = (),
    translate: str | None = None,
) -> Drafter:
    """A drafter from a package folder, a transformers folder or hub id, or a family's name; names
    joined by `+` make a team of them.

    Every file is verified and every mismatch with `target` refused; `allow` lets named soft
    mismatches pass ("target", "tokenizer", "template", "eos", ...). A language model of another
    tokenizer is refused, too, unless `translate` says how its tokens become the target's: "tli",
    "slem", "slrs" or "auto" (docs/verification.md).
    """
    from specctl.export.package.find import load_found, load_team, locate

    check_allow(allow)
    names = drafter_names(str(path_or_name))
    if len(names) > 1:
        return load_team([locate(name) for name in names], target, allow)
    return load_found(locate(path_or_name), target, allow, translate)


def write_served(folder: Path, engine: str, found: str) -> Manifest:
    """The folder with `Served by ENGINE: FOUND` on its card; what was said of that engine before is
    replaced. The folder changes in one step, its other files not at all."""
    manifest, opening = check_files(folder), f"Served by {engine}: "
    about = manifest.to_json()
    notes = [note for note in manifest.notes if not note.startswith(opening)]
    about["notes"] = [*notes, opening + found]
    with new_folder(folder, own_files) as temp:
        for name in manifest.files:
            if name != CARD:
                shutil.copyfile(folder / name, temp / name)
        return seal_folder(temp, {k: v for k, v in about.items() if k not in ("digest", "files")})
