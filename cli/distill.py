"""`specctl distill`: train an independent small language model on the target's distribution."""

from __future__ import annotations

from specctl.cli.console import Console
from specctl.cli.flags import Sets
from specctl.cli.train_draft import (
    AllowChange,
    Data,
    DryRun,
    Gpus,
    OutFolder,
    Processes,
    Recipe,
    Resume,
    Target,
)
from specctl.recipes.errors import RecipeError


def distill(
    console: Console,
    recipe: Recipe = "distill",
    target: Target = None,
    data: Data = None,
    out: OutFolder = None,
    set_: Sets = None,
    gpus: Gpus = 1,
    processes: Processes = 1,
    resume: Resume = True,
    dry_run: DryRun = False,
    allow: AllowChange = None,
) -> None:
    """Train a small language model of its own on the target's distribution.

    It needs nothing of the target while it runs, so it can be exported and used as
    assistant_model in transformers. The recipe's family must be small-lm.

    Examples:

      specctl distill --target tiny --out runs/distill
      specctl distill --target qwen3-8b --data chats.jsonl --dry-run
    """
    from specctl.cli.training import TrainingFlags, run_training

    flags = TrainingFlags(
        recipe, target, data, out, tuple(set_ or ()), gpus, processes, resume, dry_run,
        tuple(allow or ()),
    )  # fmt: skip
    family = flags.load().drafter.family
    if family != "small-lm":
        raise RecipeError(
            "distill trains independent small models only",
            where=f"{recipe}:drafter.family",
            found=family,
            expected="small-lm",
            do=f"specctl train-draft --recipe {recipe}   (trains {family})",
        )
    run_training(console, flags)
