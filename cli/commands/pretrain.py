"""`specctl pretrain`: train a small language model from nothing, as the embedded target was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.memory import peak_memory, peak_text
from specctl.cli.options.flags import Out


def pretrain(
    console: Console,
    out: Out,
    recipe: Annotated[
        str,
        typer.Option("--recipe", "-r", help="tiny-target, tiny-hybrid, or a YAML file like these."),
    ] = "tiny-target",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue what OUT holds.")
    ] = True,
) -> None:
    """Train a small model from nothing on the Python text of this machine.

    tiny-target: the embedded target, about an hour and a half on two CPU cores. tiny-hybrid: a
    smaller model with recurrent layers and the same tokenizer, some minutes on one. The same
    command continues a stopped run.

    Example:

      specctl pretrain --recipe tiny-target --out runs/tiny
    """
    path = recipe_path(recipe)
    check_folder(out)
    from specctl.train.pretrain.run import has_state
    from specctl.train.pretrain.run import pretrain as pretrain_

    final = pretrain_(path, out, resume=resume and has_state(out), reporter=console)
    console.out(
        f"{out / 'export'} | held-out loss {final.loss:.3f} nats | "
        f"next-token accuracy {final.accuracy:.3f} over {final.tokens:,} tokens | {peak_text()}"
    )
    result = {
        "path": str(out / "export"),
        "heldout_loss": final.loss,
        "heldout_accuracy": final.accuracy,
        "heldout_tokens": final.tokens,
        "peak_bytes": peak_memory(),
    }
    following = command_line("train-draft", "--target", out / "export", "--recipe", "distill")
    console.done(result, next=[following])


def recipe_path(name: str) -> Path:
    """The file of a pre-training recipe: a path, or the one that comes with specctl."""
    from importlib import resources

    from specctl.core.bounded_read import read_text
    from specctl.core.errors import unreadable
    from specctl.recipes.files import PRETRAINED

    path = Path(name)
    if name in PRETRAINED:
        path = Path(str(resources.files("specctl.recipes") / f"{name}.yaml"))
    try:
        read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        flag, expected = "--recipe", f"{', '.join(PRETRAINED)}, or a YAML file of the same form"
        do = "--recipe tiny-target"
        raise unreadable("the pre-training recipe", path, error, flag, expected, do) from error
    return path
