"""The names and options of the drafter families, read from their source: no torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from specctl.core.errors import RecipeError, nearest, unknown
from specctl.recipes.stages import stages_of

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """A family by its source: name, the fields of its options, whether it trains."""

    name: str
    options: tuple[str, ...]
    trainable: bool


@cache
def family_infos() -> dict[str, FamilyInfo]:
    """Every module of drafters/ that says FAMILY = Family(...)."""
    found: dict[str, FamilyInfo] = {}
    for file in resources.files("specctl.drafters").iterdir():
        if file.name.endswith(".py") and not file.name.startswith("_"):
            info = _read(ast.parse(file.read_text(encoding="utf-8")))
            if info is not None:
                found[info.name] = info
    return dict(sorted(found.items()))


def _read(tree: ast.Module) -> FamilyInfo | None:
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Family":
            given = {k.arg: k.value for k in value.keywords}
            names = ("name", "summary", "paper", "options", "build", "trainable", "policies")
            given |= dict(zip(names, value.args, strict=False))
            name, trainable = given["name"], given["trainable"]
            assert isinstance(name, ast.Constant), "a family's name is a literal"
            assert isinstance(trainable, ast.Constant), "a family's trainable is a literal"
            options = _fields(*_class(getattr(given["options"], "id", ""), tree))
            return FamilyInfo(str(name.value), options, bool(trainable.value))
    return None


def _fields(node: ast.ClassDef | None, tree: ast.Module) -> tuple[str, ...]:
    """The fields of an options class, those that it inherits first."""
    if node is None:
        return ()
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    inherited = [field for base in bases for field in _fields(*_class(base, tree))]
    own = [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    return tuple(dict.fromkeys([*inherited, *own]))


def _class(name: str, tree: ast.Module) -> tuple[ast.ClassDef | None, ast.Module]:
    """A class of this module, or one that it imports from another module of drafters/ or of its
    sub-rooms, and the module that defines it."""
    for item in tree.body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return item, tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            parts = (node.module or "").split(".")
            file = resources.files("specctl.drafters").joinpath(*parts[2:-1], f"{parts[-1]}.py")
            if parts[:2] == ["specctl", "drafters"] and file.is_file():
                return _class(name, ast.parse(file.read_text(encoding="utf-8")))
    return None, tree


def check_options(recipe: Recipe, where: str) -> FamilyInfo:
    """Refuse an unknown family or an option that the family does not have, in any stage."""
    for name, stage in stages_of(recipe, where).items():
        check_options(stage, f"{where}:stages.{name}")
    known = family_infos()
    name = recipe.drafter.family
    if name not in known:
        raise unknown(
            "drafter family", name, known, f"{where}:drafter.family", "specctl recipes ls"
        )
    info = known[name]
    for option in recipe.drafter.options:
        if option not in info.options:
            raise RecipeError(
                f"family {name} has no option {option!r}",
                where=f"{where}:drafter.options.{option}",
                found=option,
                expected="one of " + (", ".join(info.options) or "none"),
                do=f"write {nearest(option, info.options, 1) or 'no options'}",
            )
    return info
