"""Parts of a recipe as the functions of training take them."""

from __future__ import annotations

from pathlib import Path

from specctl.api.derive import chosen_fields, is_foreign, kept, origin_digest
from specctl.core.drafter import Drafter
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.recipes.load import with_fields
from specctl.recipes.schema import Recipe
from specctl.recipes.section import flatten
from specctl.runtime.target.target import Target
from specctl.train.assemble import build_drafter
from specctl.train.data.preparation import Preparation
from specctl.train.planning.step_bytes import StepSettings


def drafter_of(recipe: Recipe, spec: ModelSpec, vocab: VocabMap | None = None) -> Drafter:
    """The recipe's drafter, fresh."""
    return build_drafter(recipe.drafter, recipe.train, spec, vocab)


def preparation_of(recipe: Recipe, target: Target) -> Preparation:
    """What makes the recipe's rows of that target."""
    return Preparation(recipe.data, recipe.train.seq_len, target, recipe.target)


def step_of(recipe: Recipe) -> StepSettings:
    """What a step of the recipe follows from."""
    size, source = recipe.vocab.size, recipe.data.target_source
    kept = size if isinstance(size, int) else None
    return StepSettings(recipe.drafter, recipe.train, kept, source != "inprocess")


def digest_of(recipe: Recipe) -> str:
    """Of what choices for the recipe are derived from."""
    return origin_digest(recipe.name, recipe.target, recipe.drafter, recipe.data)


def kept_by(recipe: Recipe, out: Path, seconds: float | None) -> Recipe | None:
    """The recipe with the choices that were kept in the folder of a run."""
    choices = kept(out, seconds, lambda: digest_of(recipe))
    if choices is None:
        return None
    fields = chosen_fields(choices, recipe.origin, flatten(recipe.to_json()))
    return with_fields(recipe, fields, "derived")


def foreign(recipe: Recipe, given: str) -> bool:
    """Whether the recipe of that name is a demonstration for another target."""
    return is_foreign(recipe.target, recipe.drafter.family, given, recipe.origin)
