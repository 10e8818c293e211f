"""Recipes of `specctl pretrain`: a model from nothing, or what is trained of one, with a schema of
their own. Here they are read as they stand; `specctl pretrain` checks them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specctl.recipes.built_in import is_built_in
from specctl.recipes.files import PRETRAINED, parse_yaml
from specctl.recipes.notes import notes_of
from specctl.recipes.section import flatten

THEN = " Then: "  # behind it, a command that uses what was made


@dataclass(frozen=True, slots=True)
class PretrainingRecipe:
    """One that comes with specctl, and what its first lines say of it."""

    name: str
    summary: str
    text: str

    @property
    def tree(self) -> dict[str, Any]:
        """Its sections, as plain values."""
        tree: dict[str, Any] = parse_yaml(self.text, f"{self.name}.yaml")
        return tree

    @property
    def values(self) -> dict[str, Any]:
        """Dotted field -> value."""
        return flatten(self.tree)

    @property
    def notes(self) -> dict[str, str]:
        """Dotted field -> the remark behind its value."""
        return notes_of(self.text)


def pretraining_recipe(name: str | Path) -> PretrainingRecipe | None:
    """The recipe of `specctl pretrain` of that name; None where there is none."""
    if not is_built_in(name, PRETRAINED, "recipe of specctl pretrain"):
        return None
    path = resources.files("specctl.recipes") / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    return PretrainingRecipe(str(name), _summary(text), text)


def pretraining_recipes() -> list[PretrainingRecipe]:
    """All of them, in the order in which they build on each other."""
    return [made for name in PRETRAINED if (made := pretraining_recipe(name)) is not None]


def _summary(text: str) -> str:
    """The comment between the command in the first line and the first section."""
    lines = text.splitlines()[1:]
    count = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:count])
    return comment.partition(THEN)[0]
