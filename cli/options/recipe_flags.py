"""The flags that say what is trained: the recipe and its changes, where, and on what it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from specctl.cli.app.follow_up import given_flags
from specctl.cli.options.flags import Offline, Sets, panel
from specctl.cli.options.names import complete_recipe, complete_target

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe

run_option, hardware_option = panel("Run"), panel("Hardware")

DryRun = Annotated[bool, run_option("--dry-run", help="Show the plan and stop.")]


@dataclass(frozen=True, slots=True)
class RecipeFlags:
    """Which recipe, and what the command line changes of it. `FIELDS`: option -> recipe field."""

    FIELDS: ClassVar[Mapping[str, str]] = {
        "target": "target.name", "data": "data.source", "endpoint": "data.endpoint",
        "init": "drafter.init", "adapter": "target.adapters", "device_map": "target.device_map",
    }  # fmt: skip
    FAMILIES: ClassVar[tuple[str, ...]] = ()  # that the command trains; empty: all
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            help="A recipe's name (specctl recipes ls) or a YAML file.",
            autocompletion=complete_recipe,
        ),
    ] = "distill"
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="Alias, hub id or folder; else the recipe's.",
            autocompletion=complete_target,
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="File, folder or hub data set, or self: questions that the target writes "
            "(repeatable, all are read); else the recipe's.",
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="FOLDER[@WEIGHT]",
            help="LoRA adapter of peft, added to the target (repeatable, in order).",
        ),
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            "--device-map",
            metavar="MODE|JSON|FILE",
            help="Spread the target's layers: auto, balanced, cpu-offload, or a map.",
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL[,URL]",
            help="OpenAI-compatible servers of the target (vLLM, SGLang) that write the answers.",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; else runs/TARGET-RECIPE.")
    ] = None
    init: Annotated[
        str | None,
        typer.Option(
            "--init",
            help="Start from these weights: target, a package, a run or a Hugging Face folder.",
        ),
    ] = None
    sets: Sets = None

    def load(self) -> Recipe:
        """The recipe with these changes, checked."""
        from specctl.api.arguments.families import check_options
        from specctl.recipes.load import load_recipe

        recipe = load_recipe(
            self.recipe,
            self.sets or (),
            flags=self._fields(),
            named={field: f"--{name.replace('_', '-')}" for name, field in self.FIELDS.items()},
        )
        check_options(recipe, self.recipe)
        return recipe

    def _fields(self) -> dict[str, Any]:
        """Fields of the recipe that flags of their own set."""
        given = {field: getattr(self, name) for name, field in self.FIELDS.items()}
        if self.data is not None and len(self.data) == 1:
            given["data.source"] = self.data[0]
        return {field: value for field, value in given.items() if value is not None}

    def words(self, but: Collection[str] = ()) -> list[str]:
        """The recipe and every change of it, as they are typed; the fields `but` are left out."""
        name = [] if "recipe" in but else ["--recipe", self.recipe]
        return [*name, *given_flags(self, type(self)(), ("recipe", *but))]

    def folder(self, target: str, recipe: str) -> Path:
        """--out, or runs/TARGET-RECIPE by the names of both."""
        from specctl.api.arguments.recipe import run_folder

        return self.out if self.out is not None else run_folder(target, recipe)


@dataclass(frozen=True, slots=True)
class TunedFlags(RecipeFlags):
    """The flags of every command that trains, or plans a training."""

    FIELDS: ClassVar[Mapping[str, str]] = {
        **RecipeFlags.FIELDS, "lr": "train.learning_rate", "batch_size": "train.rows",
    }  # fmt: skip
    lr: Annotated[
        float | None, run_option("--lr", min=0.0, help="Peak learning rate; else the recipe's.")
    ] = None
    batch_size: Annotated[
        int | None,
        run_option("--batch-size", min=1, help="Rows per batch, over all processes."),
    ] = None
    device: Annotated[
        str, hardware_option("--device", help="Training device: auto, cpu, cuda, cuda:1.")
    ] = "auto"


@dataclass(frozen=True, slots=True)
class PlanFlags(TunedFlags):
    """The flags of a training command that a plan depends on."""

    FIELDS: ClassVar[Mapping[str, str]] = {**TunedFlags.FIELDS, "steps": "train.steps"}
    steps: Annotated[
        int | None, run_option("--steps", min=1, help="Training steps; else the recipe's.")
    ] = None
    time: Annotated[
        str | None,
        run_option(
            "--time",
            metavar="TIME",
            help="Train for about this time (40m, 2h): sizes, answers and steps are chosen for the "
            "target, the data and this machine. 40m if the recipe is a demonstration for another "
            "target.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class TrainingFlags(PlanFlags):
    """The flags of a training command."""

    gpus: Annotated[
        int, hardware_option("--gpus", min=1, max=1024, help="GPUs, one process each.")
    ] = 1
    processes: Annotated[
        int, hardware_option("--processes", min=1, max=1024, help="Number of CPU processes.")
    ] = 1
    resume: Annotated[
        bool, run_option("--resume/--no-resume", help="Continue the run in OUT if there is one.")
    ] = True
    dry_run: DryRun = False
    allow: Annotated[
        list[str] | None,
        run_option(
            "--allow",
            metavar="FIELD",
            help="Continue although this changed: config, target, data (what is there stays, what "
            "is new is added), vocab, init, world-size. "
            "Also: restart (begin again if no checkpoint is intact), memory (run although it does "
            "not fit), recipe (use one made for another target).",
        ),
    ] = None
    offline: Offline = False
