"""Published drafters as packages: one module of this folder per format, found by its IMPORTER.

config.json says the format, or the names of the tensors where it does not. An importer reads what a
key means, and what its absence means, as the format's engine does, refuses what our drafter does
not compute, and at last proves that the drafter says what the engine's rules make of the same
folder; only then is the package written.
Letters: K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import GateError, IncompatibleError, RecipeError
from specctl.core.plugins import Plugins, plugins

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.export.formats import ExportSource
    from specctl.export.imports.published import Published
    from specctl.export.package.manifest import Manifest
    from specctl.runtime.target.target import Target


# What a value of a wrong kind raises somewhere on its way through transformers and the readers.
FOREIGN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Imported:
    """The drafter of a folder, and by which engine's rules `prove` reads the folder; `length` is
    how many tokens it is meant to draft a round, `notes` what a user must know. `readings` are
    drafters that the folder may mean as well, by what they do otherwise: tau tells them apart."""

    drafter: Drafter
    engine: str
    prove: Callable[[ExportSource], None]
    length: int
    notes: tuple[str, ...] = ()
    readings: Mapping[str, Drafter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Importer:
    """One format: whether a configuration, with tensors of these names beside it, is of it, and
    what the folder holds for a target."""

    name: str
    summary: str
    knows: Callable[[Mapping[str, Any], Set[str]], bool]
    read: Callable[[Published, Target], Imported]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an imported drafter reaches beside the target: tau, what the package records of it, and
    tau of the folder's other readings."""

    tau: float
    record: Mapping[str, Any]
    readings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """What was imported: the format, the engine whose rules agree, the package's manifest, what was
    measured (None: nothing), and what the folder's README says of acceptance."""

    format: str
    engine: str
    manifest: Manifest
    notes: tuple[str, ...]
    measured: Measured | None = None
    claims: tuple[str, ...] = ()


@cache
def importers() -> Plugins[Importer]:
    """Every importer by name, in alphabetical order."""
    return plugins(__name__, "IMPORTER")


def find_importer(config: Mapping[str, Any], names: Set[str] = frozenset()) -> Importer:
    """The one format that config.json, and the tensors of these names, are of."""
    known = importers().working()
    found = [importer for importer in known.values() if importer.knows(config, names)]
    if len(found) == 1:
        return found[0]
    named = ascii(config.get("architectures"))[:100]
    raise IncompatibleError(
        "config.json tells no format that is imported"
        if not found
        else "config.json tells more than one format",
        found=f"architectures {named}, model_type {ascii(config.get('model_type'))[:60]}",
        expected="; ".join(f"{name} ({form.summary})" for name, form in known.items()),
        do="a whole language model is a drafter as it is: specctl bench --draft FOLDER; "
        "any other stays with its own engine",
        where="config.json",
    )


def import_published(
    path: Path | str,
    target: Target,
    out: Path | str,
    *,
    command: Sequence[str],
    measure: Callable[[Imported, Mapping[str, Any]], Measured] | None = None,
    family: str | None = None,
) -> Report:
    """Write the published drafter at `path` as a package for `target` at `out`. `measure` is given
    the drafter and how it is to draft (`serve`), once it is proved. `family` says what an adapter
    of peft is; every other folder says so itself."""
    from specctl.drafters import families
    from specctl.export.formats import ExportSource
    from specctl.export.imports.published import OF_ADAPTERS, read_published
    from specctl.export.package.files import reading
    from specctl.export.package.folder import describe, package_tensors, save_package
    from specctl.export.package.manifest import Manifest

    if family not in (None, OF_ADAPTERS):
        raise RecipeError(
            "a family is named for adapters of peft alone, which say no family of their own",
            where="--family",
            found=family,
            expected=OF_ADAPTERS,
            do="leave --family out",
        )
    with reading(path):
        published = read_published(Path(path), is_adapter=family is not None)
    importer = find_importer(published.config, published.tensors.keys())
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
    measured = None if measure is None else measure(found, about["serve"])
    if measured is not None:
        about["acceptance"] = dict(measured.record)
    manifest = save_package(drafter, target, Path(out), command=command, **about)
    notes = published.notes + found.notes + _eos_note(drafter, target)
    return Report(importer.name, found.engine, manifest, notes, measured, published.claims)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """An engine's reader speaks of exports; here its fault is a refusal of the folder. So is what
    a configuration does to those who read it if a value is of another kind than its key's."""
    try:
        yield
    except FOREIGN as error:
        raise IncompatibleError(
            f"the configuration is none of the format {name}",
            found=f"{type(error).__name__}: {ascii(str(error))[1:-1][:160]}",
            expected="the keys and kinds of values that the format's engine reads",
            do="get config.json again, from one version of the repository",
            where="config.json",
        ) from error
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
    cut = sorted(set(target.usual_ends) - set(drafter.vocab.ids_K.tolist()))
    if not cut:
        return ()
    note = f"its vocabulary lacks end-of-text {cut}: it drafts no ends, and loads with --allow eos"
    return (note,)
