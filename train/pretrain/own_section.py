"""Recipes of `specctl pretrain` that consist of one section of their own, and train no model from
nothing: the filter of a diffusion model, and its distillation."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from specctl.core.errors import FileError, RecipeError
from specctl.core.storage.bounded_read import read_text
from specctl.recipes.files import parse_yaml
from specctl.recipes.section import Section

OneSection = TypeVar("OneSection", bound=Section)


def own_section(path: Path, name: str, kind: type[OneSection], example: str) -> OneSection | None:
    """The section `name` of a YAML file; None where the file is a recipe of another kind. Raises
    FileError where there is none, RecipeError for a section with other keys or values than `kind`
    has; `example` is the recipe that has all of them."""
    try:
        found = parse_yaml(read_text(path), str(path))
    except OSError as error:
        raise FileError(f"no recipe at {path}", do="name a YAML file") from error
    if not isinstance(found, dict) or set(found) != {name}:
        return None
    try:
        return kind.model_validate(found[name])
    except ValidationError as error:
        problem = error.errors()[0]
        raise RecipeError(
            f"'{name}.{'.'.join(map(str, problem['loc']))}' of the recipe is not valid",
            where=str(path),
            found=repr(problem["input"])[:120],
            expected=problem["msg"],
            do=f"correct it; recipes/{example}.yaml has every key",
        ) from error


def folder_of(target: str, where: str, export: Path) -> Path:
    """The folder of the diffusion model that such a recipe begins with. Raises FileError where
    there is none, or where it is `export`, which is written."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        raise FileError(
            "the recipe's diffusion model is not here",
            where=where,
            found=target,
            expected="a folder that specctl pretrain --recipe tiny-diffusion wrote",
            do="make it first, or name another folder",
        )
    if folder.resolve() == export.resolve():
        raise FileError(
            "the recipe's diffusion model would be overwritten by what is made of it",
            where=where,
            found=target,
            expected="another folder than the output",
            do="give another folder with --out",
        )
    return folder
