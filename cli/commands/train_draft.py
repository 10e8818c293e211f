"""`specctl train-draft`: train a drafter for a target from a recipe."""

from __future__ import annotations

from specctl.cli.app.console import Console
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.cli.options.training import run_training


def train_draft(console: Console, run: TrainingFlags) -> None:
    """Train a drafter: the target writes answers, the drafter learns them, the best is packaged.

    Ctrl-C, SIGTERM or SIGHUP saves the state (exit code 75); the same command continues exactly.
    The package in OUT/package is the checkpoint with the best measured tau.

    Examples:

      specctl train-draft --target tiny --recipe eagle3
      specctl train-draft --target qwen3-8b --recipe qwen3-8b-eagle3 --data chats.jsonl --gpus 4
      specctl train-draft --recipe medusa --set train.steps=200 --dry-run
    """
    run_training(console, run)
