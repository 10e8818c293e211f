"""`specctl pretrain`: train a small language model from nothing, as the embedded target was."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.arguments.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.memory import peak_memory, peak_text
from specctl.cli.options.flags import Out
from specctl.cli.options.names import complete_pretraining
from specctl.core.storage.diffusion_kinds import is_diffusion_folder
from specctl.core.storage.grid_kinds import is_grid_folder

if TYPE_CHECKING:
    from specctl.train.pretrain.dparallel import DParallelRecipe
    from specctl.train.pretrain.shapes import ShapesRecipe
    from specctl.train.pretrain.token_filter import FilterRecipe


def pretrain(
    console: Console,
    out: Out,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            help="A name such as tiny-target (specctl recipes ls --all) or a YAML file like it.",
            autocompletion=complete_pretraining,
        ),
    ] = "tiny-target",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue what OUT holds.")
    ] = True,
) -> None:
    """Train a small model from nothing on the Python text of this machine.

    tiny-target: the embedded target, about an hour and a half on two CPU cores. tiny-hybrid: a
    smaller model with recurrent layers and the same tokenizer, some minutes on one.
    tiny-diffusion: a masked diffusion model that begins as the embedded target; tiny-learn2pd: the
    filter that decodes it in parallel; tiny-dparallel: the same model, distilled to be certain
    earlier. tiny-digits: a target whose tokens are pictures of digits; tiny-neighbours and
    tiny-any-order: models that write the same pictures in orders of their own. tiny-shapes and
    tiny-shapes-qwen2-vl: multimodal targets, which say what an image shows. The same command
    continues a stopped run of a model, but of these two.

    Example:

      specctl pretrain --recipe tiny-target --out runs/tiny
    """
    path = recipe_path(recipe)
    check_folder(out)
    from specctl.train.pretrain.dparallel import dparallel_recipe
    from specctl.train.pretrain.shapes import shapes_recipe
    from specctl.train.pretrain.token_filter import filter_recipe

    if (of_filter := filter_recipe(path)) is not None:
        _filter(console, of_filter, out)
        return
    if (distilled := dparallel_recipe(path)) is not None:
        _distilled(console, distilled, out)
        return
    if (of_shapes := shapes_recipe(path)) is not None:
        _shapes(console, of_shapes, out)
        return
    from specctl.images.codebook import has_codebook
    from specctl.train.pretrain.run import has_state
    from specctl.train.pretrain.run import pretrain as pretrain_

    final = pretrain_(path, out, resume=resume and has_state(out), reporter=console)
    is_masked = is_diffusion_folder(out / "export")
    loss, accuracy = ("bound", "masked-token") if is_masked else ("loss", "next-token")
    if is_grid_folder(out / "export"):
        accuracy = "patch"
    console.out(
        f"{out / 'export'} | held-out {loss} {final.loss:.3f} nats | "
        f"{accuracy} accuracy {final.accuracy:.3f} over {final.tokens:,} tokens | {peak_text()}"
    )
    result = {
        "path": str(out / "export"),
        "heldout_loss": final.loss,
        "heldout_accuracy": final.accuracy,
        "heldout_tokens": final.tokens,
        "peak_bytes": peak_memory(),
    }
    following = command_line("train-draft", "--target", out / "export", "--recipe", "distill")
    if has_codebook(out / "export"):
        following = command_line(
            "generate", "--target", out / "export", "--temperature", 1,
            "--set", f"picture.out={out / 'seven.png'}", "7",
        )  # fmt: skip
    if is_masked:  # nothing drafts for it
        following = command_line("generate", "--target", out / "export", "--stats", "def main(")
    console.done(result, next=[following])


def _filter(console: Console, recipe: FilterRecipe, out: Path) -> None:
    from specctl.train.pretrain.token_filter import train_filter

    report = train_filter(recipe, out)
    console.out(
        f"{report.path} | held-out loss {report.loss:.3f} nats | at .9: precision "
        f"{report.precision:.3f}, recall {report.recall:.3f} | {report.passes:,} passes"
    )
    figures = {name: getattr(report, name) for name in ("loss", "precision", "recall", "passes")}
    following = _generate(report.path, recipe.block, "learn2pd:0.9")
    console.done({"path": str(report.path), **figures}, next=[following])


def _distilled(console: Console, recipe: DParallelRecipe, out: Path) -> None:
    from specctl.train.pretrain.dparallel import train_dparallel

    report = train_dparallel(recipe, out, console)
    before, after = report.before, report.after
    console.out(
        f"{report.path} | held-out entropy where right {before.entropy:.3f} -> {after.entropy:.3f} "
        f"nats, cross-entropy {before.cross_entropy:.3f} -> {after.cross_entropy:.3f} nats, "
        f"right {before.right:.3f} -> {after.right:.3f} | {report.texts:,} texts"
    )
    figures = {"before": asdict(before), "after": asdict(after), "texts": report.texts}
    following = _generate(report.path, recipe.block, "entropy:0.5")
    console.done({"path": str(report.path), **figures}, next=[following])


def _shapes(console: Console, recipe: ShapesRecipe, out: Path) -> None:
    from specctl.images.shapes import QUESTION
    from specctl.train.pretrain.shapes import HELDOUT, train_shapes

    report = train_shapes(recipe, out, console)
    console.out(f"{report.path} | held-out loss {report.loss:.3f} nats | {report.seconds:.0f} s")
    for what, found in report.named.items():
        console.out(
            f"{found.images} captions of {what}: {found.right} right in all words, "
            f"{found.words} of the words"
        )
    following = command_line(
        "generate", "--target", report.path, "--image", out / HELDOUT / "0.png", QUESTION
    )
    console.done({"path": str(report.path), **report.figures()}, next=[following])


def _generate(folder: Path, block: int, unmask: str) -> str:
    """The command that decodes with what was made."""
    return command_line(
        "generate", "--target", folder, "--set", f"diffusion.block={block}",
        "--set", f"diffusion.unmask={unmask}", "def main(",
    )  # fmt: skip


def recipe_path(name: str) -> Path:
    """The file of a pre-training recipe: a path, or the one that comes with specctl."""
    from importlib import resources

    from specctl.core.errors import unreadable
    from specctl.core.storage.bounded_read import read_text
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
