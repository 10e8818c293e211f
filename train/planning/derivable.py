"""Which recipes `--time` can derive."""

from __future__ import annotations

from specctl.core.errors import FileError, RecipeError
from specctl.recipes.schema import DataPart, Recipe
from specctl.train.assemble import served_family
from specctl.train.data.images.image_checks import count_images


def _has_images(data: DataPart) -> bool:
    """Whether records hold images; of data that are not here yet nobody knows."""
    try:
        return count_images(data, 1) > 0
    except FileError:
        return False


def check_derivable(recipe: Recipe) -> None:
    """RecipeError for a recipe whose numbers cannot be found by its time: a pipeline, or one that
    changes the target."""
    served_family(recipe.drafter, recipe.train.joint, recipe.serve)
    for is_so, what in (
        (bool(recipe.stages), "has several stages"),
        (recipe.train.joint is not None, "also trains the target"),
        (recipe.train.lora is not None, "adapts a drafter that is trained already"),
        (recipe.data.on_policy > 0, "learns from text that the drafter writes"),
        (recipe.data.target_source != "inprocess", "reads the target's states from elsewhere"),
        (_has_images(recipe.data), "learns from data with images"),
    ):
        if is_so:
            raise RecipeError(
                f"--time cannot derive a recipe that {what}",
                where="--time",
                found=recipe.name,
                expected="a recipe of one stage, whose drafter learns the target's own answers and "
                "whose target is loaded here",
                do="--recipe eagle3 --time 40m; or leave --time out and change what differs by "
                "--set",
            )
