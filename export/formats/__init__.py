"""Export formats: one module of this folder per format, found by its FORMAT.

A format writes a drafter's files into a temp folder; `export` adds the card and the manifest, reads
everything back, and only then puts the folder in its place.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import FileError, IncompatibleError, RecipeError, nearest
from specctl.core.plugins import Plugins, declared, plugins
from specctl.export.package.manifest import CARD, MANIFEST, Manifest

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.export.package.publication import Publication
    from specctl.runtime.target.target import Target

FOLDER, TARGET = "THIS_FOLDER", "TARGET_FOLDER"  # stand for paths in the commands of a card
PACKAGE = "specctl"  # the format of our own package
STORED = ("bfloat16", "float16", "float32")  # what a package's weights may be written anew in


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is exported: the verified package folder, its manifest, and the loaded drafter beside a
    target. The manifest names that target, which --allow may have let differ from the package's.
    `engine_python` has the engine's own tools, for formats that these write; None is this one.
    `store`: the dtype that a package is written anew in, without rows that are the target's; None
    copies its weights as they are."""

    folder: Path
    manifest: Manifest
    drafter: Drafter
    target: Target
    allow: tuple[str, ...] = ()
    engine_python: str | None = None
    store: str | None = None


def _no_notes(source: ExportSource) -> tuple[str, ...]:
    return ()


def _whole(source: ExportSource) -> dict[str, Any]:
    """An engine's format holds the rows that the package leaves to its target."""
    tensors, rows = source.drafter.tensors(), source.manifest.target_rows
    count = source.manifest.parameters + sum(tensors[name].numel() for name in rows)
    return {"target_rows": [], "parameters": count}


@dataclass(frozen=True, slots=True)
class Format:
    """One export format. `families` it can hold (None = all); `write(source, folder)` writes its
    files; `check(source, folder)` reads the sealed folder back and raises if anything differs;
    `serve(source, folder)` gives the shell commands that serve it from `folder`, with TARGET where
    the target's folder or repository belongs; `notes(source)` is what a user must know of it;
    `fields(source)` are those of the manifest that are not as in the source's;
    `fits(source)` raises for a drafter of these families that the format has no place for, and
    `ready(engine_python)` where what writes it is not installed, which is called second.
    `layout(source)` makes in memory what `write` puts into files and raises what `write` refuses,
    also of tensors without content (`specctl.export.foreseen`); of formats whose `fits` says all
    there is, nothing."""

    name: str
    summary: str
    families: tuple[str, ...] | None
    write: Callable[[ExportSource, Path], None]
    check: Callable[[ExportSource, Path], None]
    serve: Callable[[ExportSource, str], tuple[str, ...]]
    notes: Callable[[ExportSource], tuple[str, ...]] = _no_notes
    fields: Callable[[ExportSource], dict[str, Any]] = _whole
    fits: Callable[[ExportSource], object] = lambda source: None
    layout: Callable[[ExportSource], object] = lambda source: None
    ready: Callable[[str | None], object] = lambda engine_python: None

    def holds(self, family: str) -> bool:
        return self.families is None or family in self.families


@cache
def formats() -> Plugins[Format]:
    """Every format by name, in alphabetical order."""
    return plugins(__name__, "FORMAT")


# Where engines read more than one format, the one that an engine's own tools write comes first.
# TensorRT-LLM is given what its loaders name: EAGLE-3's flat checkpoint and plain draft models.
ENGINES: dict[str, tuple[str, ...]] = {
    "vllm": ("speculators", "hf", "vllm-medusa", "vllm-xpress", "mlp-speculator", "sglang"),
    "sglang": ("sglang", "hf", "peft"),
    "llama.cpp": ("gguf",),
    "trtllm": ("sglang", "hf"),
    "openvino": ("openvino",),
    "mlx": ("hf",),
    "onnxruntime": ("onnx",),
}
# Of the flat checkpoints the families that an engine is given; SGLang reads them all.
GIVEN_FLAT: dict[str, tuple[str, ...]] = {"trtllm": ("eagle3",), "vllm": ("lilicorr",)}
PREFERRED = ("speculators", "sglang", "hf", "vllm-medusa", "vllm-xpress", "mlp-speculator", "peft")


def format_for(name: str, family: str) -> str:
    """The format of `name`: its own where it is one, else the one in which the engine of that name
    reads a family. An engine that reads no format of the family is refused with what there is.

    `sglang` is an engine and a format: families that the format cannot hold get the engine's other.
    """
    check_name(name)
    known = formats()
    if name not in ENGINES:
        return name
    for form in ENGINES[name]:
        is_flat = form == "sglang" and name in GIVEN_FLAT
        if known[form].holds(family) and (not is_flat or family in GIVEN_FLAT[name]):
            return form
    fits = _fitting(family)
    readers = [e for e in ENGINES if e != name and any(f in ENGINES[e] for f in fits)]
    raise IncompatibleError(
        f"no format lets {name} read a drafter of family {family}",
        where="--to",
        found=f"family {family}",
        expected="an engine or a format that holds it: " + ", ".join([*readers, *fits]),
        do=f"--to {fits[0]}",
    )


def check_name(name: str) -> None:
    """Refuse what is neither an engine nor a format, with the nearest of both; no torch."""
    known = dict.fromkeys([*ENGINES, *declared(__name__, "FORMAT")])
    if name not in known:
        raise RecipeError(
            f"unknown export format {name!r}",
            where="--to",
            found=name,
            expected="one of " + ", ".join(known),
            do=f"--to {nearest(name, known, 1)}",
        )


def check_store(store: str | None, to: str | None) -> None:
    """Refuse a dtype that nothing is stored in, or that format `to` ignores; no torch."""
    if store is None:
        return
    if to != PACKAGE:
        raise RecipeError(
            "--store writes the weights of a package anew, and of no other format",
            where="--store",
            found="no --to" if to is None else f"--to {to}",
            expected=f"--to {PACKAGE}",
            do=f"--to {PACKAGE} --out FOLDER, or leave --store out",
        )
    if store not in STORED:
        raise RecipeError(
            f"weights are not stored in {store!r}",
            where="--store",
            found=store,
            expected="one of " + ", ".join(STORED),
            do=f"--store {nearest(store, STORED, 1)}",
        )


def _fitting(family: str) -> list[str]:
    """The formats that hold a family, an engine's before our own."""
    fits = [n for n, form in formats().working().items() if form.holds(family)]
    return sorted(fits, key=lambda n: (n == PACKAGE, n not in PREFERRED, *_place(n)))


def _place(name: str) -> tuple[int, str]:
    return (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name)


def find_format(name: str, family: str) -> Format:
    """The format of that name, or of the engine of that name; one that cannot hold the family is
    refused with those that can."""
    known, name = formats(), format_for(name, family)
    if not known[name].holds(family):
        fits = _fitting(family)
        raise IncompatibleError(
            f"format {name} cannot hold a drafter of family {family}",
            found=f"family {family}",
            expected=f"{name} holds " + ", ".join(known[name].families or ()),
            do=f"--to {fits[0]} (formats that fit: {', '.join(fits)})",
        )
    return known[name]


def export(
    package: Path | str,
    to: str,
    out: Path | str,
    target: Target,
    *,
    allow: Sequence[str] = (),
    engine_python: str | None = None,
    store: str | None = None,
    publication: Publication | None = None,
) -> Manifest:
    """Write `package` (its folder, or that of its run) in format `to` at `out`; the new manifest.

    The source is verified byte for byte first, what was written is read back and compared before
    it takes its place, and nothing foreign is overwritten. `store` is for packages alone (see
    ExportSource); `publication` says what one that comes with specctl adds.
    """
    from specctl.export.package.atomic import new_folder
    from specctl.export.package.files import open_folder
    from specctl.export.package.folder import own_files, seal_folder
    from specctl.export.package.load import read_package
    from specctl.export.package.manifest import package_in, read_manifest
    from specctl.export.package.origin import versions

    folder, out = open_folder(package_in(Path(package))), Path(out)
    _refuse_overlap(folder, out)
    manifest = read_manifest(folder)
    form = find_format(to, manifest.family)
    check_store(store, form.name)
    drafter = read_package(folder, target, allow, widened=True).to(target.device)  # in its dtype
    beside = _beside(manifest, target)
    source = ExportSource(folder, beside, drafter, target, tuple(allow), engine_python, store)
    form.fits(source)
    form.ready(engine_python)
    with new_folder(out, own_files) as temp:
        form.write(source, temp)
        written = [path.name for path in temp.iterdir()]
        assert not {CARD, MANIFEST} & set(written), f"format {to} wrote {written}"
        about = manifest.to_json() | {"format": to, "versions": versions()} | form.fields(source)
        record = beside.target
        named = TARGET if record.adapters else record.repo or TARGET
        about["served_by"] = [line.replace(TARGET, named) for line in form.serve(source, FOLDER)]
        about["notes"] = [
            *_other_target(manifest, source),
            *_with_adapters(source),
            *form.notes(source),
        ]
        if publication is not None:
            about |= publication.fields(about, target)
        sealed = seal_folder(temp, {k: v for k, v in about.items() if k != "digest"})
        form.check(source, temp)
        return sealed


def _beside(manifest: Manifest, target: Target) -> Manifest:
    """The manifest naming the target that is there, where it is not the one of the package."""
    from specctl.export.package.folder import target_record
    from specctl.export.package.manifest import TargetRecord

    if manifest.target.fingerprint == target.fingerprint:
        return manifest
    record = TargetRecord.model_validate(target_record(target))
    return manifest.model_copy(update={"target": record})


def _other_target(manifest: Manifest, source: ExportSource) -> list[str]:
    if source.manifest is manifest:
        return []
    from specctl.export.package.card import shown_target

    made_for, beside = shown_target(manifest), shown_target(source.manifest)
    return [
        f"Exported beside {beside}, not beside {made_for}, which the drafter was made for: what is "
        "shared or copied of a target is that of the former, the acceptance above was measured "
        "with the latter."
    ]


def _with_adapters(source: ExportSource) -> list[str]:
    from specctl.export.package.card import shown_target

    if not source.manifest.target.adapters:
        return []
    return [
        f"The target is {shown_target(source.manifest)} with LoRA adapters. An engine is to serve "
        "it with them merged: `merge_and_unload()` and `save_pretrained(TARGET_FOLDER)` of peft."
    ]


def filled(command: str, folder: Path | str, target: Path | str | None) -> str:
    """A command of the card with its places filled in; without a target's folder that one stays."""
    words = [word.replace(FOLDER, str(folder)) for word in shlex.split(command)]
    if target is not None:
        words = [word.replace(TARGET, str(target)) for word in words]
    return shlex.join(words)


def _refuse_overlap(folder: Path, out: Path) -> None:
    there = out.resolve()
    if there == folder or there in folder.parents or folder in there.parents:
        raise FileError(
            "the export would be written over its own source",
            found=str(out),
            expected="a folder outside the package",
            do="choose another --out",
        )
