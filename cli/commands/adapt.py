"""`specctl adapt`: refresh a drafter for a fine-tuned target or a new domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.options.names import check_package
from specctl.cli.options.positional import DraftFlag, Word, one_drafter
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.cli.options.training import run_training
from specctl.core.errors import RecipeError
from specctl.recipes.published import path_named

if TYPE_CHECKING:
    from specctl.api.train import TrainResult

ADAPT = TrainingFlags(recipe="adapt")


@dataclass(frozen=True, slots=True)
class _Adapting(TrainingFlags):
    """The flags, and what the drafter itself says."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def _fields(self) -> dict[str, Any]:
        return {**self.given, **TrainingFlags._fields(self)}


def adapt(
    console: Console,
    package: Word = None,
    draft: DraftFlag = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="Rank of LoRA; else the recipe's.")
    ] = None,
    keep_adapter: Annotated[
        bool,
        typer.Option(
            "--keep-adapter/--no-keep-adapter",
            help="Also write the adapter by itself, OUT/adapter (peft).",
        ),
    ] = True,
    run: TrainingFlags = ADAPT,
) -> None:
    """Adapt a drafter by LoRA, and merge the result into a package for the target.

    For a target that was fine-tuned after the drafter was made, or for a new kind of text. Tau is
    measured before and after on held-out prompts of the data; what drafted best is packaged. With
    --adapter, the target is the given one, else the drafter's own, with that LoRA adapter added.

    Examples:

      specctl adapt runs/eagle3 --target ./my-tuned-model --data chats.jsonl --out runs/new
      specctl adapt runs/distill --target tiny --data notes.txt --rank 16
      specctl adapt runs/eagle3 --adapter ./my-lora --data chats.jsonl --out runs/new
    """
    source = path_named(one_drafter(package, draft, "specctl adapt runs/NAME"))
    check_package(str(source))
    given = drafter_fields(source)
    if rank is not None:
        given["train.lora.rank"] = rank
    given["train.lora.keep"] = keep_adapter
    if run.adapter and run.target is None:
        given |= target_fields(source)
    if run.init is not None:
        raise RecipeError(
            "adapt starts from the drafter",
            where="--init",
            found=run.init,
            expected="--draft alone",
            do=f"specctl adapt {run.init}",
        )
    flags = {item.name: getattr(run, item.name) for item in fields(run)}

    def before_and_after(result: TrainResult) -> dict[str, Any]:
        before = tau_at_start(result.out)
        if before is not None and result.tau is not None:
            console.out(f"tau {before:.3f} before, {result.tau:.3f} after adapting")
        return {"tau_before": before, "tau_after": result.tau}

    run_training(console, _Adapting(**flags, given=given), before_and_after)


def drafter_fields(draft: Path) -> dict[str, Any]:
    """What the recipe takes over from a package: family, options and how it is served."""
    from specctl.export.package.manifest import read_manifest

    package = draft / "package" if (draft / "package").is_dir() else draft
    manifest = read_manifest(package)
    serve = {f"serve.{key}": value for key, value in manifest.serve.items() if value is not None}
    return {
        "drafter.family": manifest.family,
        "drafter.options": dict(manifest.options),
        "drafter.init": str(package),
        **serve,
    }


def target_fields(draft: Path) -> dict[str, Any]:
    """The target that a package was made for, without its adapters."""
    from specctl.export.package.manifest import package_in, read_manifest

    target = read_manifest(package_in(draft)).target
    fields = {"name": target.name, "revision": target.revision, "inflate": target.inflated}
    return {f"target.{key}": value for key, value in fields.items() if value is not None}


def tau_at_start(out: Path) -> float | None:
    """Tau as measured before the first step of a run."""
    from specctl.train.metrics.metrics import read_log

    lines = [line for line in read_log(out / "metrics.jsonl") if "tau" in line]
    return float(lines[0]["tau"]) if lines and lines[0]["step"] == 0 else None
