"""What a drafter and the way it drafts need of a target that only one of attention alone has.

Known from names, packages and recipes: the target is refused before it is loaded, and so are
settings that do not go together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specctl.api.arguments.families import family_infos
from specctl.core.errors import SpecctlError
from specctl.core.forward.attention_only import AttentionOnly, borrowing, of_serving
from specctl.core.storage.model_folder import CONFIG
from specctl.models.hf.hf_spec import PLAIN_HEADS, has_state_layers
from specctl.recipes.built_in import as_path_word
from specctl.recipes.drafter_names import drafter_names, drafter_words
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.recipes.published import path_named
from specctl.recipes.serve import check_in_parallel
from specctl.recipes.targets import ResolvedTarget, resolve
from specctl.runtime.target.folders.checkpoint_folder import read_object


def attention_only(
    drafters: Iterable[object],
    parallel: bool | None = None,
    policy: object = None,
    rule: str | None = None,
) -> tuple[AttentionOnly, ...]:
    """Of drafters by name, folder or as they are, drafting `parallel`, grown by a policy or
    verified by a rule where these are given; else as their packages say. RecipeError for a rule
    that is none in parallel."""
    settings = {"parallel": parallel, "rule": rule}
    given = {name: value for name, value in settings.items() if value is not None}
    return tuple(found for one in drafters for found in _of_one(one, given, policy))


def of_recipe(name: str) -> tuple[AttentionOnly, ...]:
    """Of a recipe, as its training refuses a target."""
    recipe = load_recipe(name)
    serve = recipe.serve.model_dump()
    return tuple(_of_settings(recipe.drafter.family, recipe.drafter.options, serve))


def is_recurrent(target: str) -> bool:
    """Whether the configuration of a target says that it has recurrent layers. The hub is left
    alone: a repository that is not here counts as one of attention alone."""
    folder = _config_folder(resolve(target))
    if folder is None:
        return False
    named = read_object(folder / CONFIG).get("architectures") or [""]
    if named[0] in PLAIN_HEADS:  # most are, and need no transformers to say so
        return False
    from specctl.runtime.target.checkpoint import check_config

    with suppress(SpecctlError):  # loading it says what is wrong with it
        return has_state_layers(check_config(folder, is_read_only=True))
    return False


def _config_folder(target: ResolvedTarget) -> Path | None:
    """The folder on this machine that holds the configuration of a target, if there is one."""
    if target.repo is not None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(target.repo, CONFIG, revision=target.revision)
        return Path(found).parent if isinstance(found, str) else None
    path = target.path
    return path if path is not None and (path / CONFIG).is_file() else None


def _of_one(drafter: object, given: Mapping[str, Any], policy: object) -> Iterator[AttentionOnly]:
    if not isinstance(drafter, (str, Path)):
        kept = {name: getattr(drafter, name, None) for name in ("parallel", "rule")}
        given = {**kept, **given}
        inner = getattr(drafter, "drafter", drafter)
        policy = getattr(drafter, "policy", None) if policy is None else policy
        layer = {"early_layer": getattr(policy, "early_layer", None)}
        names = {"members": getattr(inner, "names", ())}
        yield from _of_settings(getattr(inner, "family", ""), names, given | layer)
        return
    for name in drafter_names(as_path_word(drafter)):
        family, options, serve = _named(name)
        if policy is not None and policy != serve.get("policy"):
            serve = {**serve, "early_layer": getattr(policy, "early_layer", None), "rule": None}
        yield from _of_settings(family, options, {**serve, **given}, name)


def _named(name: str) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    """Family, options and settings of serving behind the name of a drafter; none of these where it
    stands for a model of its own."""
    from specctl.export.package.manifest import MANIFEST, package_in, read_manifest

    if name in family_infos():
        return name, {}, {}
    if name in recipe_names():
        recipe = load_recipe(name)
        return recipe.drafter.family, recipe.drafter.options, recipe.serve.model_dump()
    if name in drafter_words() or not os.path.exists(path_named(name)):
        return "", {}, {}
    folder = package_in(path_named(name))
    if not (folder / MANIFEST).is_file():
        return "", {}, {}
    manifest = read_manifest(folder)
    return manifest.family, manifest.options, manifest.serve


def _of_settings(
    family: str, options: Mapping[str, Any], serve: Mapping[str, Any], name: str = ""
) -> Iterator[AttentionOnly]:
    infos = family_infos()
    for one in (family, *(options.get("members") or ())):
        if one in infos and infos[one].borrows_layers:
            yield borrowing(name or one)
    check_in_parallel(serve.get("parallel"), serve.get("rule"))
    yield from of_serving(serve)
