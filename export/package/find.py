"""What a drafter's name means: a folder, a training-free family or recipe, an alias or a hub
repository.

A plain word is a family, a recipe or an alias first; `./word` is always a folder (built_in.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.errors import (
    FileError,
    IncompatibleError,
    NetworkError,
    SpecctlError,
    did_you_mean,
)
from specctl.core.storage.hub_access import forbidden_by, way_online
from specctl.core.storage.model_folder import (
    is_adapter_alone,
    is_file_name,
    no_gguf_file,
    something_else,
)
from specctl.drafters import families
from specctl.drafters.nets.options import read_options
from specctl.export.package.files import open_folder, reading
from specctl.export.package.manifest import (
    LOADABLE,
    MANIFEST,
    package_in,
    read_manifest,
    refuse_export,
)
from specctl.recipes.built_in import is_built_in, say_hidden
from specctl.recipes.drafter_names import drafter_words
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.recipes.published import published_folder, published_names
from specctl.recipes.schema import Recipe
from specctl.recipes.targets import ResolvedTarget, gguf_at, is_gguf_name, is_hub_id, resolve
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.target import Target

CARRIED = "mtp"  # the family whose drafter a target may carry in its own checkpoint
CARRIED_SERVE = {"policy": "chain", "length": 3}
USUAL_LENGTH = 5  # of a member that says nothing
_WANTED = [
    "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md",
    "model.gguf", "model-*-of-*.gguf",  # of packages (held_file.py)
]  # fmt: skip


class Kind(StrEnum):
    FAMILY = "family"
    RECIPE = "recipe"
    PACKAGE = "package"
    PRETRAINED = "pretrained"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Found:
    """What a name was resolved to: a family's name, or a folder and what lies in it; `folder` is
    the file of a model in GGUF."""

    kind: Kind
    name: str
    folder: Path | None = None


def locate(path_or_name: str | Path) -> Found:
    """Resolve a drafter's name; an unknown one raises with the nearest known ones."""
    name = str(path_or_name)
    path = Path(name).expanduser()
    plain = isinstance(path_or_name, str) and not re.search(r"[/\\]", name)
    if not name or len(name) > 1000 or "\0" in name:
        raise unknown(name)
    if is_gguf_name(name):
        return _gguf(with_file(resolve(name), bool(forbidden_by())))
    if plain and name not in (".", "..", "~"):
        known = drafter_words() | families().keys()
        return _word(name) if is_built_in(name, known, "drafter or recipe") else _place(name, path)
    repo, _, revision = name.partition("@")
    if path.exists() or not is_hub_id(repo):
        return _folder(path)
    return _hub(repo, revision or None)


def _word(name: str) -> Found:
    """What a built-in name stands for where a drafter is expected."""
    if name in families():
        return _family(name)
    if free_recipe(name) is not None:
        return Found(Kind.RECIPE, name)
    if name in recipe_names():
        raise _untrained(name, "a recipe of trained drafters")
    target = _alias(name)
    return _gguf(target) if target.file else _hub(str(target.repo), target.revision)


def _gguf(target: ResolvedTarget) -> Found:
    assert target.file is not None, "names of GGUF files come with one"
    return Found(Kind.GGUF, target.name, target.file)


def _place(name: str, path: Path) -> Found:
    """A word that is no built-in name: a folder here, or a published drafter; one that the folder
    hides is said."""
    if path.exists():
        if name in published_names():
            say_hidden(f"{name} is what lies here, not the published drafter of that name")
        return _folder(path)
    if (published := published_folder(name)) is not None:
        return _folder(published)
    raise unknown(str(path))


def load_found(
    found: Found,
    target: Target,
    allow: Sequence[str],
    translate: str | None = None,
    widened: bool = False,
) -> Drafter:
    """The drafter behind a resolved name; with `translate` one of another tokenizer, too.
    `widened`: to be trained or cut, so that packed matrices are read as float32."""
    from specctl.drafters.team import TeamOptions
    from specctl.export.package.load import load_package
    from specctl.export.package.pretrained import load_pretrained

    recipe = free_recipe(found.name) if found.kind is Kind.RECIPE else None
    if recipe is not None:
        family = families()[recipe.drafter.family]
        options: Any = read_options(family.options, recipe.drafter.options)
        serve = recipe.serve.model_dump(mode="json")
        if isinstance(options, TeamOptions) and (joined := options.of(target.lm)) != options:
            options, serve = joined, serve | _sizes(USUAL_LENGTH)
        drafter = family.build(options, target.spec, None).to(target.device, target.dtype)
        return _served(drafter, serve)
    if found.folder is None and found.name == CARRIED:
        from specctl.runtime.target.mtp_checkpoint import own_module

        return _served(own_module(target).to(target.device, target.dtype), CARRIED_SERVE)
    if found.folder is None:
        family = families()[found.name]
        return family.build(family.options(), target.spec, None).to(target.device, target.dtype)
    if found.kind is Kind.GGUF:
        from specctl.export.package.gguf_draft import load_gguf

        return _served(load_gguf(found.folder, target, allow, translate, widened), {})
    with reading(found.folder):
        foreign = None if translate is None else _foreign(found.folder, target, translate, allow)
        if foreign is not None:
            drafter = foreign
        elif found.kind is Kind.PACKAGE:
            drafter = load_package(found.folder, target, allow)
        else:
            drafter = load_pretrained(found.folder, target, allow)
        is_package = (found.folder / MANIFEST).is_file()
        return _served(drafter, read_manifest(found.folder).serve if is_package else {})


def load_team(found: Sequence[Found], target: Target, allow: Sequence[str]) -> Drafter:
    """The drafters behind several names, one of which drafts in each round: those without weights
    where the text repeats itself, up to twice as far as the others draft elsewhere."""
    from specctl.drafters.team import Team

    members = [load_found(each, target, allow) for each in found]
    members.sort(key=lambda member: member.module is not None)
    usual = int(members[-1].serve.get("length", USUAL_LENGTH))
    serve = {"policy": "switch", "controller": "cascade", **_sizes(usual)}
    return _served(Team.of(members), serve)


def _sizes(usual: int) -> dict[str, Any]:
    """How far a team drafts of which a member usually drafts so far."""
    lengths = (usual, 3 * usual // 2, 2 * usual)
    return {"length": lengths[-1], "nodes": lengths[-1], "lengths": lengths}


def _served(drafter: Drafter, serve: Mapping[str, Any]) -> Drafter:
    """The drafter, knowing how its package or recipe says it is served."""
    drafter.serve = {name: value for name, value in serve.items() if value is not None}
    return drafter


def _foreign(folder: Path, target: Target, translate: str, allow: Sequence[str]) -> Drafter | None:
    from specctl.export.package.foreign import load_foreign

    return load_foreign(open_folder(folder), target, translate, allow)


def free_recipe(name: str) -> Recipe | None:
    """The recipe of that name if it needs no training: such a recipe is a drafter as it stands."""
    if name not in recipe_names():
        return None
    recipe = load_recipe(name)
    known = families().get(recipe.drafter.family)
    return None if known is None or known.trainable else recipe


def _family(name: str) -> Found:
    if not families()[name].trainable or name == CARRIED:
        return Found(Kind.FAMILY, name)
    raise _untrained(name, "a family of trained drafters")


def _untrained(name: str, kind: str) -> FileError:
    do = f"train one with `specctl train-draft --recipe {name}`, then give its package"
    if name not in recipe_names():
        do = "train one with `specctl train-draft`, then give its package"
    if Path(name).exists():
        do = f"give ./{name}, which is the folder here"
    return FileError(
        f"{name} is {kind}, not a drafter",
        found=name,
        expected="a package folder, or a family that needs no training, such as prompt-lookup",
        do=do,
    )


def _folder(path: Path) -> Found:
    """A folder by its contents; the folder of a run stands for the package in it."""
    with reading(path):
        return _look(path)


def _look(path: Path) -> Found:
    file = gguf_at(path)
    if file is not None:
        return Found(Kind.GGUF, file.name, file)
    folder = open_folder(package_in(path))
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        refuse_export(manifest, path, LOADABLE)
        native = manifest.format == "specctl"
        return Found(Kind.PACKAGE if native else Kind.PRETRAINED, folder.name, folder)
    if (folder / "config.json").exists() or is_adapter_alone(folder):
        return Found(Kind.PRETRAINED, folder.name, folder)
    if (other := something_else(folder)) is not None:
        raise other
    is_run = (folder / "run.yaml").is_file()
    raise FileError(
        "the folder holds no drafter",
        found=", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "an empty folder",
        expected=f"{MANIFEST} (a specctl package) or config.json (a transformers model)",
        do=f"let the run finish: give its command again (specctl show {path} says how far it is)"
        if is_run
        else "give the package folder of a run, such as runs/NAME/package",
        where=str(path),
    )


def _alias(name: str) -> ResolvedTarget:
    """Where the model of an alias is; unknown words are refused here."""
    try:
        resolved = resolve(name)
    except SpecctlError as error:
        raise unknown(name) from error
    if resolved.repo is None:
        raise IncompatibleError(
            f"{name} is a target, not a drafter",
            found=name,
            expected="a smaller model, a package, or a training-free family",
            do="train a drafter for it with `specctl train-draft`",
        )
    return with_file(resolved, bool(forbidden_by()))


def unknown(name: str) -> FileError:
    """The error for a word that means nothing, with what it may have meant."""
    if is_file_name(Path(name)):
        return no_gguf_file(Path(name))
    made = sorted(Path("runs").glob(f"*/package/{MANIFEST}"))
    known = [*families(), *published_names(), *(str(file.parents[1]) for file in made)]
    known += [p.name for p in sorted(Path().iterdir()) if (p / MANIFEST).exists()]
    return FileError(
        f"unknown drafter {ascii(name)[:80]}",
        found=ascii(name)[:80],
        expected="a package folder, a hub id owner/name, a training-free family, or a published "
        f"drafter ({', '.join(published_names()) or 'there is none yet'})",
        do=did_you_mean(name, known, "`specctl recipes ls --all` shows the families")
        + " (a folder is written ./NAME)",
    )


def _hub(repo: str, revision: str | None) -> Found:
    """Download a repository's JSON, text and safetensors (nothing that can run code)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    problems = (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)
    try:
        path = snapshot_download(repo, revision=revision, allow_patterns=_WANTED)
    except (*problems, HFValidationError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        if forbidden := forbidden_by():
            raise NetworkError(
                f"no folder {repo} here, and the hub may not be asked",
                found=f"{repo}, with {' and '.join(forbidden)}",
                expected="an existing folder, a repository in the cache, or leave to ask the hub",
                do=f"check the path, or {way_online(forbidden)} and give the same again",
            ) from error
        raise NetworkError(
            f"no folder {repo} here, and the hub did not give a repository of that name",
            found=found.removeprefix("Got: ")[:200],
            expected="an existing folder, or a hub id that can be reached",
            do="check the path; for the hub check the name, the network and `hf auth login`",
        ) from error
    return _folder(Path(path))
