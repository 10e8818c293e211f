"""`specctl train-draft`: train a drafter for a target from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from specctl.cli.app.console import Console
from specctl.cli.options.flags import panel
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.cli.options.training import run_training
from specctl.core.errors import SpecctlError

follow_option = panel("Follow")


def train_draft(
    console: Console,
    run: TrainingFlags,
    follow: Annotated[
        Path | None,
        follow_option(
            "--follow",
            metavar="DIR",
            help="Train the drafter --init further on the newest traffic that specctl serve "
            "--keep-traffic DIR has kept.",
        ),
    ] = None,
    swap: Annotated[
        str | None,
        follow_option(
            "--swap",
            metavar="URL",
            help="With --follow: if it drafts better, let this server draft with it (admin key in "
            "SPECCTL_ADMIN_KEYS).",
        ),
    ] = None,
) -> None:
    """Train a drafter: the target writes answers, the drafter learns them, the best is packaged.

    Ctrl-C, SIGTERM or SIGHUP saves the state (exit code 75); the same command continues exactly.
    The package in OUT/package is the checkpoint with the best measured tau.

    Examples:

      specctl train-draft --target tiny --recipe eagle3
      specctl train-draft --target model.gguf --recipe eagle3 --data self --time 2h
      specctl train-draft --target qwen3-8b --recipe qwen3-8b-eagle3 --data chats.jsonl --gpus 4
      specctl train-draft --recipe medusa --set train.steps=200 --dry-run
    """
    if follow is not None:
        from specctl.cli.options.following import run_following

        run_following(console, run, follow, swap)
        return
    if swap is not None:
        raise SpecctlError(
            "--swap goes with --follow",
            where="the command line",
            found="--swap alone",
            expected="--follow DIR",
            do="add --follow DIR, or post the package to /v1/drafter",
        )
    run_training(console, run)
