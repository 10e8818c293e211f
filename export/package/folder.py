"""Our own package folder: written whole or not at all, loaded only by the target it was made for.

    model.safetensors   the drafter's own weights (never borrowed ones), d2t and t2d when trimmed
    manifest.json       everything else a loader must know; see docs/package-format.md
    README.md           the model card, written from the manifest

`d2t` and `t2d` follow EAGLE-3: target id = i + d2t[i], t2d marks the kept ids.
"""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import specctl
from specctl.core.drafter import Drafter
from specctl.core.errors import (
    GateError,
    IncompatibleError,
    IntegrityError,
    SpecctlError,
    is_out_of_memory,
)
from specctl.drafters import families
from specctl.export.package.atomic import FULL, new_folder, write_file
from specctl.export.package.card import render_card
from specctl.export.package.compat import check_allow
from specctl.export.package.files import check_name, read_header
from specctl.export.package.manifest import (
    CARD,
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    file_records,
    read_manifest,
)
from specctl.export.package.proof_record import RECORDS
from specctl.models.fast_llama import LlamaModel
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target

MAP_NAMES = ("d2t", "t2d")


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
    refuse_unbuildable(drafter)
    about = describe(drafter, target, tensors)
    about |= {
        "serve": dict(serve),
        "recipe_digest": recipe_digest,
        "acceptance": None if acceptance is None else dict(acceptance),
        "command": redacted(command),
    }
    with new_folder(Path(out), own_files) as folder:
        if tensors:
            write_tensors(tensors, folder / WEIGHTS)
            compare_tensors(tensors, load_file(folder / WEIGHTS))
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
    write_file(folder / CARD, render_card(_seal(body)).encode())
    manifest = _seal({**about, "files": _as_json(file_records(folder))})
    write_file(folder / MANIFEST, manifest.render())
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
    return {
        "format_version": FORMAT_VERSION,
        "format": "specctl",
        "created": utc_now(),
        "family": drafter.family,
        "options": asdict(drafter.options),
        "spec": spec.to_json(),
        "dtype": widest_float(own),
        "parameters": sum(t.numel() for t in own.values() if t.is_floating_point()),
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
    """How a manifest names a target."""
    return {
        "name": target.name,
        "repo": _repo(target.name),
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "inflated": target.inflated,
        "dtype": str(target.dtype).removeprefix("torch."),
        **({} if target.changed is None else {"changed": asdict(target.changed)}),
    }


def _repo(name: str) -> str | None:
    """The hub repository behind a target's name, None for a folder or a model made in memory."""
    try:
        return resolve(name).repo
    except SpecctlError:
        return None


def utc_now() -> str:
    """The present second, as packages write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def versions() -> dict[str, str]:
    """Versions of what wrote a package."""
    names = ("torch", "transformers", "safetensors", "tokenizers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"specctl": specctl.__version__, "python": platform.python_version(), **found}


def widest_float(tensors: Mapping[str, Tensor]) -> str:
    """The widest floating dtype among tensors, in which nothing is lost."""
    floats = {t.dtype for t in tensors.values() if t.is_floating_point()}
    widest = max(floats, key=lambda d: (torch.finfo(d).bits, str(d)), default=torch.float32)
    return str(widest).removeprefix("torch.")


def package_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """What a package stores, on the CPU: own weights and the vocabulary maps; all finite."""
    tensors = drafter.tensors()
    clash = [name for name in MAP_NAMES if name in tensors]
    assert not clash, f"{drafter.family} stores {clash} itself; the package writes them"
    whole = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    refuse_not_finite(whole)
    if drafter.vocab is not None:
        whole["d2t"] = drafter.vocab.d2t().cpu().contiguous()
        whole["t2d"] = drafter.vocab.t2d().cpu().contiguous()
    return whole


def compare_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> int:
    """The number of tensors, all of them bit for bit equal; else a GateError naming the first."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        is_same = old is not None and new is not None and old.dtype == new.dtype
        if not is_same or not torch.equal(old, new):  # type: ignore[arg-type]
            raise GateError(
                "a tensor changed between memory and disk",
                found=f"{name}: {_shown(new)}",
                expected=_shown(old),
                do="run it again; report it if it happens twice",
                where=name,
            )
    return len(before)


def _shown(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def refuse_unbuildable(drafter: Drafter) -> None:
    """A loader builds from family, options and target shape alone: they must describe this drafter
    (those of a model taken from elsewhere may not). A memory of any length is no part of that."""
    if drafter.holds_data:
        return
    with torch.device("meta"):  # shapes only, and no random numbers are drawn
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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a foreign safetensors file: the header first, then finite numbers only."""
    for name, entry in read_header(path).items():
        if math.prod(max(size, 1) for size in entry.shape) >= 1 << 48:  # an empty one may be vast
            raise IntegrityError(
                "a tensor has an absurd shape",
                found=f"{ascii(name)[1:-1][:100]} {entry.shape}",
                expected="sizes that a drafter could have",
                do="get the package again",
                where=path.name,
            )
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, ValueError, OverflowError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise IntegrityError(
            "the weights cannot be read",
            found=str(error)[:200],
            expected="a safetensors file",
            do="get the package again",
            where=path.name,
        ) from error
    refuse_not_finite(tensors)
    return tensors


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise IntegrityError(
                "the weights are quantised, which no drafter is",
                found=f"{str(tensor.dtype).removeprefix('torch.')} in {ascii(name)[1:-1][:100]}",
                expected="float16, bfloat16, float32 or float64",
                do="get the weights as they were before they were quantised",
                where=name,
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(
                "the drafter's weights are not finite",
                found=f"NaN or Inf in {name}",
                expected="finite numbers",
                do="package an earlier checkpoint of the run",
                where=name,
            )


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library reports a full disk in its own words
        full = any(f"os error {code}" in str(error) for code in FULL)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


def redacted(command: Sequence[str]) -> list[str]:
    """A command line without the values of secret-looking options and hub tokens."""
    shown: list[str] = []
    hide = False
    for word in map(str, command):
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(
            s in name for s in ("token", "key", "secret", "passw")
        )
        secret = secret and not name.endswith(("tokens", "-file"))
        if hide or word.startswith(("hf_", "sk-")):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide = secret and not equals
        shown.append(word)
    return shown


def load_drafter(
    path_or_name: str | Path,
    target: Target,
    *,
    allow: Sequence[str] = (),
    translate: str | None = None,
) -> Drafter:
    """A drafter from a package folder, a transformers folder or hub id, or a family's name.

    Every file is verified and every mismatch with `target` refused; `allow` lets named soft
    mismatches pass ("target", "tokenizer", "template", "eos", ...). A language model of another
    tokenizer is refused, too, unless `translate` says how its tokens become the target's: "tli",
    "slem", "slrs" or "auto" (docs/verification.md).
    """
    from specctl.export.package.find import load_found, locate

    check_allow(allow)
    return load_found(locate(path_or_name), target, allow, translate)
