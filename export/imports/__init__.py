"""Published drafters as packages: one module of this folder per format, found by its IMPORTER.

config.json alone says the format. An importer reads what a key means, and what its absence means,
as the format's engine does, refuses what our drafter does not compute, and at last proves that the
drafter says what the engine's rules make of the same folder; only then is the package written.
Letters: K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import GateError, IncompatibleError
from specctl.core.plugins import plugins

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.export.formats import ExportSource
    from specctl.export.imports.published import Published
    from specctl.export.package.manifest import Manifest
    from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class Imported:
    """The drafter of a folder, and by which engine's rules `prove` reads the folder; `length` is
    how many tokens it is meant to draft a round, `notes` what a user must know."""

    drafter: Drafter
    engine: str
    prove: Callable[[ExportSource], None]
    length: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Importer:
    """One format: whether a configuration is of it, and what the folder holds for a target."""

    name: str
    summary: str
    knows: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Published, Target], Imported]


@dataclass(frozen=True, slots=True)
class Report:
    """What was imported: the format, the engine whose rules agree, the package's manifest."""

    format: str
    engine: str
    manifest: Manifest
    notes: tuple[str, ...]


@cache
def importers() -> dict[str, Importer]:
    """Every importer by name, in alphabetical order."""
    return plugins(__name__, "IMPORTER")


def find_importer(config: Mapping[str, Any]) -> Importer:
    """The one format that config.json is of."""
    known = importers()
    found = [importer for importer in known.values() if importer.knows(config)]
    if len(found) == 1:
        return found[0]
    names = ascii(config.get("architectures"))[:100]
    raise IncompatibleError(
        "config.json tells no format that is imported"
        if not found
        else "config.json tells more than one format",
        found=f"architectures {names}, model_type {ascii(config.get('model_type'))[:60]}",
        expected="; ".join(f"{name} ({form.summary})" for name, form in known.items()),
        do="a whole language model is a drafter as it is: specctl bench --draft FOLDER; "
        "any other stays with its own engine",
        where="config.json",
    )


def import_published(
    path: Path | str, target: Target, out: Path | str, *, command: Sequence[str]
) -> Report:
    """Write the published drafter at `path` as a package for `target` at `out`."""
    from specctl.drafters import families
    from specctl.export.formats import ExportSource
    from specctl.export.imports.published import read_published
    from specctl.export.package.files import reading
    from specctl.export.package.folder import describe, package_tensors, save_package
    from specctl.export.package.manifest import Manifest

    with reading(path):
        published = read_published(Path(path))
    importer = find_importer(published.config)
    with _refusing(importer.name):
        found = importer.read(published, target)
        drafter, policy = found.drafter, families()[found.drafter.family].policies[0]
        about: dict[str, Any] = {
            "serve": {"policy": policy, "length": found.length},
            "recipe_digest": "",
            "acceptance": None,
        }
        described = describe(drafter, target, package_tensors(drafter))
        draft = Manifest.seal({**described, **about, "files": {}, "command": []})
        found.prove(ExportSource(published.folder, draft, drafter, target))
    manifest = save_package(drafter, target, Path(out), command=command, **about)
    return Report(importer.name, found.engine, manifest, found.notes + _eos_note(drafter, target))


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """An engine's reader speaks of exports; here its fault is a refusal of the folder."""
    try:
        yield
    except GateError as error:
        raise GateError(
            f"the {name} folder is not the drafter that its engine would read",
            found=error.found,
            expected=error.expected,
            do="nothing was written; get the folder again, or ask its author what serves it",
        ) from error


def _eos_note(drafter: Drafter, target: Target) -> tuple[str, ...]:
    if drafter.vocab is None:
        return ()
    cut = sorted(set(target.eos_ids) - set(drafter.vocab.ids_K.tolist()))
    if not cut:
        return ()
    note = f"its vocabulary lacks end-of-text {cut}: it drafts no ends, and loads with --allow eos"
    return (note,)
