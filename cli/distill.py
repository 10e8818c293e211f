"""`specctl distill`: train an independent small language model on the target's distribution."""

from __future__ import annotations

from specctl.cli.console import Console
from specctl.cli.training import TrainingFlags, run_training
from specctl.recipes.errors import RecipeError


def distill(console: Console, run: TrainingFlags) -> None:
    """Train a small language model of its own on the target's distribution.

    It needs nothing of the target while it runs, so it can be exported and used as
    assistant_model in transformers. The recipe's family must be small-lm.

    Examples:

      specctl distill --target tiny --out runs/distill
      specctl distill --target qwen3-8b --data chats.jsonl --dry-run
    """
    family = run.load().drafter.family
    if family != "small-lm":
        raise RecipeError(
            "distill trains independent small models only",
            where=f"{run.recipe}:drafter.family",
            found=family,
            expected="small-lm",
            do=f"specctl train-draft --recipe {run.recipe}   (trains {family})",
        )
    run_training(console, run)
