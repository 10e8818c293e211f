"""The shape of the weights that a run starts from, where their folder says another than a Llama's.

A draft of another architecture is built from its configuration, so that is put into the recipe
before anything is planned or loaded: plan, run.yaml and package then say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.core.errors import NetworkError, RecipeError
from specctl.core.storage.model_folder import is_adapter_alone
from specctl.recipes.load import build_recipe
from specctl.recipes.section import flatten
from specctl.recipes.stages import PREFIX

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe

FAMILY, ORIGIN = "small-lm", "drafter.init"
FIELD = "drafter.options.architecture"


def following_init(recipe: Recipe, warn: Callable[[str], None] = lambda text: None) -> Recipe:
    """The recipe with the architecture of the folder that drafter.init names; itself where that is
    a Llama's or none. Sizes and a draft vocabulary that the built-in recipe gives make way for it;
    those that somebody chose are refused where the draft is built. `warn` is called where the
    configuration is on a hub that cannot be reached."""
    name = recipe.drafter.init
    if name in (None, "target") or name.startswith(PREFIX) or recipe.drafter.family != FAMILY:
        return recipe
    try:
        found = _architecture_in(name)
    except NetworkError as error:
        warn(f"the shape of {name} is not known ({error.found}): that of the recipe is planned")
        return recipe
    given = recipe.drafter.options.get("architecture")
    if found is None or given == found:
        return recipe
    if given is not None and not _is_recipes_own(recipe.origin, FIELD):
        raise RecipeError(
            "the architecture of the draft was given twice",
            where=FIELD,
            found=f"{given.get('model_type')} there, {found['model_type']} in {name}",
            expected="that of the folder, or no drafter.init",
            do="leave drafter.options.architecture out",
        )
    return _with_architecture(recipe.to_json(), recipe.origin, found)


def _with_architecture(
    tree: dict[str, Any], said_by: Mapping[str, str], architecture: dict[str, Any]
) -> Recipe:
    """The recipe of a tree of values, whose origin is `said_by`, with that architecture."""
    from specctl.drafters.lm.small_lm import LLAMA_ONLY

    origin = dict(said_by)
    options = tree["drafter"]["options"]
    for option in LLAMA_ONLY:
        if option in options and _is_recipes_own(said_by, f"drafter.options.{option}"):
            del options[option]
    options["architecture"] = architecture
    if _is_recipes_own(said_by, "vocab.size"):
        tree["vocab"]["size"], origin["vocab.size"] = None, ORIGIN
    opening = "drafter.options"
    origin = {f: o for f, o in origin.items() if not f.startswith(opening)}
    for field in flatten({opening: options}):
        below = field.startswith(f"{FIELD}.")
        origin[field] = ORIGIN if below else said_by.get(field, ORIGIN)
    return build_recipe(tree, ORIGIN).with_origin(origin)


def _is_recipes_own(origin: Mapping[str, str], field: str) -> bool:
    """Whether a built-in recipe gives a field, or all that is below it, and nobody else."""
    from specctl.train.data.sources.shipped import is_shipped

    fields = [each for each in origin if each == field or each.startswith(f"{field}.")]
    return all(is_shipped(origin[each]) or origin[each] == "default" for each in fields)


def _architecture_in(name: str) -> dict[str, Any] | None:
    """What builds the draft of a folder, a run, a package or a hub repository; None for a Llama,
    and where a name means nothing that could be read: the run says so."""
    from specctl.export.package.manifest import MANIFEST, package_in, read_manifest
    from specctl.recipes.targets import aliases, is_gguf_name, is_on_hub, resolve
    from specctl.train.saving.run_file import RECORD, recorded

    path = package_in(Path(name).expanduser())
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        if manifest.format == "specctl":
            return _object(manifest.options.get("architecture"))
    elif (path / RECORD).is_file():
        run = recorded(path / RECORD)
        drafter = run.get("drafter") if isinstance(run, dict) else None
        options = drafter.get("options") if isinstance(drafter, dict) else None
        return _object(options.get("architecture") if isinstance(options, dict) else None)
    if path.is_dir():
        return None if is_adapter_alone(path) else _configured(str(path))
    if name in aliases():
        return _configured(resolve(name).repo or name)
    return _configured(name) if is_on_hub(name) or is_gguf_name(name) else None


def _object(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _configured(name: str) -> dict[str, Any] | None:
    """The architecture of a transformers configuration, by folder, file or hub repository."""
    import torch
    from transformers import AutoModelForCausalLM

    from specctl.models.hf.from_config import architecture_of
    from specctl.recipes.schema import TargetPart
    from specctl.train.planning.target_shape import target_shape

    shape = target_shape(TargetPart(name=name))
    if shape.plain_head:
        return None
    with torch.device("meta"):
        return architecture_of(AutoModelForCausalLM.from_config(shape.config))
