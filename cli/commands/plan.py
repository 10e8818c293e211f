"""`specctl plan`: what a recipe will take, before anything is spent.

`python -m specctl.cli.commands.plan RECIPE.yaml OUT SECONDS` is the process that --rehearse starts:
it makes the small run and writes what it took to OUT/rehearsal.json.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.arguments.initial_shape import following_init
from specctl.api.derive import is_derived
from specctl.api.preflight import check_made_for, check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.launch import use_device
from specctl.cli.app.memory import peak_memory
from specctl.cli.app.progress import duration
from specctl.cli.options.deriving import Deriving
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import PlanFlags
from specctl.core.errors import SpecctlError, one_of_two
from specctl.core.messages.sizes import size_text
from specctl.core.storage.files import Disk
from specctl.core.storage.hub_access import go_offline
from specctl.train.runs.kept import continued

if TYPE_CHECKING:
    from specctl.recipes.schema import DataPart, Recipe
    from specctl.train.planning.capacity import Lack
    from specctl.train.planning.hardware import Cluster
    from specctl.train.planning.pace import Pace
    from specctl.train.planning.plan import Calibrate, RunPlan
    from specctl.train.planning.rehearsal import Rehearsal
    from specctl.train.planning.target_shape import TargetShape
    from specctl.train.planning.weighing import Weighing
    from specctl.train.planning.work import Part


def plan(
    console: Console,
    run: PlanFlags,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run five steps in a process of its own, and measure."),
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling", help="Train the recipe's grid; estimate the cost of 0.1 more tau."
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Plan for GPUs of this kind, e.g. h100; none needed here."),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=1, max=1024, help="GPUs in total, one process each.")
    ] = 1,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, max=1024, help="Number of machines; else 8 GPUs per machine."
        ),
    ] = None,
    offline: Offline = False,
) -> None:
    """Show parameters, memory, disk and time of a training run. Nothing is written.

    Memory is computed by tracing one training step on tensors that hold no data. A plan that does
    not fit this machine, or the GPUs named by --gpu, ends with exit code 6 and says what to change.
    Time is calibrated in some seconds, with a few steps and rounds of the run on this machine; for
    GPUs that this machine does not have it is an estimate.

    --rehearse makes a small run in a process and a folder of its own, so that memory is measured
    too. Once a run in OUT has made twenty steps, its time is measured there.

    --scaling trains a grid of small runs in OUT (the same command continues it), fits tau against
    tokens and size, and predicts the gain of more of either.

    Examples:

      specctl plan --recipe eagle3 --target tiny
      specctl plan --recipe eagle3 --target tiny --rehearse
      specctl plan --target llama3-8b --recipe llama3-8b-eagle3 --gpu h100 --gpus 8
      specctl plan --scaling --recipe scaling --out runs/scaling
      specctl plan --recipe medusa --steps 2000 --batch-size 16 --json
    """
    loaded = run.load()
    if rehearse and scaling:
        wrong = "one plan is either rehearsed or fitted to a grid of runs"
        raise one_of_two(wrong, "--rehearse --scaling", "leave --rehearse out")
    from specctl.recipes.stages import runs_of
    from specctl.train.job import check_rows
    from specctl.train.planning.hardware import PER_NODE

    _see_device(run.device, gpu, gpus)
    cluster = _cluster(gpu, gpus, nodes)
    if offline:
        go_offline()
    out = run.folder(loaded.target.name, loaded.name)
    if scaling:
        from specctl.cli.commands.plan_scaling import plan_scaling
        from specctl.train.planning.scaling import grid
        from specctl.train.runs.kept import kept_in

        console.kept = partial(kept_in, out)
        plan_scaling(console, grid(loaded, out), loaded.target, out, run)
        return
    loaded = following_init(loaded, console.warn)
    if cluster is not None:
        for each in runs_of(loaded):
            check_rows(each.train.rows, each.train.groups(cluster.processes))
    check_out(out)
    check_run(loaded, out, None if rehearse else console.warn)
    pace = None
    if cluster is None and not rehearse:
        loaded, pace = Deriving(loaded, out, run.recipe, run.time).of_plan(console)
    if not is_derived(loaded.origin):
        check_made_for(loaded, run.recipe, console.warn)
    result = show_plans(console, loaded, out, rehearse, cluster, pace)
    words = [*run.words(), *(["--offline"] if offline else [])]
    if gpus > 1 and nodes in (None, 1) and gpus <= PER_NODE:
        words += ["--gpus", str(gpus)]
    console.done(result, next=[command_line("train-draft", *words)])


def _see_device(device: str, gpu: str | None, gpus: int) -> None:
    """Plan, calibrate and rehearse on that device of this machine."""
    if device != "auto" and gpu is not None:
        wrong = "a plan is for a device of this machine or for GPUs of a named kind"
        raise one_of_two(wrong, f"--device {device} --gpu {gpu}", "leave --device out")
    use_device(device, gpus)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # neither measured nor planned for


def _cluster(gpu: str | None, gpus: int, nodes: int | None) -> Cluster | None:
    """The hardware that the flags name; None for one process here."""
    from specctl.train.planning.hardware import Cluster

    if gpu is not None:
        return Cluster.of(gpu, gpus, nodes)
    if nodes is not None or (gpus > 1 and Cluster.here().gpu is None):
        raise SpecctlError(
            "the kind of the GPUs is not given, and there are none here",
            where="the command line",
            found=f"--gpus {gpus}",
            expected="--gpu with their kind",
            do=f"--gpu h100 --gpus {gpus}",
        )
    return Cluster.here(gpus) if gpus > 1 else None


def show_plans(
    console: Console,
    recipe: Recipe,
    out: Path,
    is_rehearsed: bool = False,
    cluster: Cluster | None = None,
    pace: Pace | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """The plan of a run, or of each stage of a pipeline; returns them for --json, or raises once
    they are shown if they do not fit here. `pace`: where it has been measured already; `data`: what
    the data is called, where it is a copy that was made for the plan."""
    from specctl.recipes.stages import stages_of
    from specctl.train.assemble import served_family
    from specctl.train.planning.plan import plan
    from specctl.train.planning.rehearsal import small_data, small_train
    from specctl.train.planning.weighing import Weighing
    from specctl.train.runs.stages import plans, stages

    served_family(recipe.drafter, recipe.train.joint, recipe.serve)
    there = None if recipe.stages else continued(recipe.data, recipe.train.steps, out)
    if there is not None:
        console.out(there)
    runs = [(recipe, out)]
    console.say("planning: a step is traced for its memory, then its time is found")
    if is_rehearsed:
        _refuse_rehearsal(len(recipe.stages))
        console.say("rehearsing: a small run in a process of its own, a minute or two")
        parts = {"data": small_data(recipe.data), "train": small_train(recipe.train)}
        small = recipe.model_copy(update=parts)
        made = [(recipe, plan(recipe, rehearsal=rehearse(recipe.name, small.to_json())))]
    else:
        if recipe.stages:
            runs = [(stage.recipe, stage.folder) for stage in stages(stages_of(recipe), out)]
        runs = [(r.model_copy(update={"data": _with_held(r.data)}), folder) for r, folder in runs]
        processes = 1 if cluster is None else cluster.processes
        measured = calibration(console, processes) if pace is None else lambda *_: pace
        made = plans(runs, cluster, measured)
    if data is not None:
        origin = {**recipe.origin, "data.source": "--follow"}
        part = recipe.data.model_copy(update={"source": data})
        recipe = recipe.model_copy(update={"data": part}).with_origin(origin)
        made = _reading(made, data)
    answer: dict[str, Any] = {"recipe": recipe.to_json(), "origin": recipe.origin}
    first = made[0][1].weighing
    pipeline = Weighing(recipe, first.shape, first.cluster) if recipe.stages else None
    return shown(console, answer, made, [folder for _, folder in runs], pipeline)


def _reading(made: Sequence[tuple[Recipe, RunPlan]], data: str) -> list[tuple[Recipe, RunPlan]]:
    """The plans, whose only source is called so."""
    return [
        (recipe, replace(plan, sources=tuple(replace(one, name=data) for one in plan.sources)))
        for recipe, plan in made
    ]


def _with_held(data: DataPart) -> DataPart:
    """The data with as many prompts as they hold, where these are fewer than the recipe wants."""
    from specctl.train.planning.data_facts import held_prompts

    return data.model_copy(update={"prompts": held_prompts(data)})


def shown(
    console: Console,
    about: Mapping[str, Any],
    made: Sequence[tuple[Recipe, RunPlan]],
    folders: Sequence[Path],
    pipeline: Weighing | None = None,
) -> dict[str, Any]:
    """One plan, or those of several runs in these folders and what they come to, in addition to
    what the answer says `about` them. ResourceError (exit 6), with all that was shown, if memory or
    disk of this machine cannot hold it, or any stage of the `pipeline`."""
    from specctl.train.planning.capacity import refuse_lacks

    out = folders[0] if pipeline is None else folders[0].parent
    answer, lacks = {**about, **_shown(console, made)}, _lacks(made, folders, pipeline)
    answer |= {"fits": not lacks, "lacks": [lack.to_json() for lack in lacks]}
    console.result = answer
    refuse_lacks(lacks, "what was planned", out)
    return answer


def _lacks(
    made: Sequence[tuple[Recipe, RunPlan]], folders: Sequence[Path], pipeline: Weighing | None
) -> list[Lack]:
    """What this machine has too little of: memory for any stage, disk for all of them."""
    from specctl.train.planning.capacity import lacking_disk, lacking_memory

    lacks = lacking_disk([(f, plan.disk) for f, (_, plan) in zip(folders, made, strict=True)])
    if not made[0][1].cluster.is_here:
        lacks = []  # of a disk elsewhere
    largest = max((plan for _, plan in made), key=lambda plan: plan.memory_bytes)
    return [*lacking_memory(largest.weighing, pipeline=pipeline), *lacks]


def _shown(console: Console, made: Sequence[tuple[Recipe, RunPlan]]) -> dict[str, Any]:
    for _, plan in made:
        show_plan(console, plan)
    if len(made) == 1:
        return {"plan": made[0][1].to_json()}
    named = _named(made)
    low, high = (sum(plan.seconds_range[i] for plan in named.values()) for i in (0, 1))
    disk = sum(plan.disk_bytes for plan in named.values())
    console.out(
        f"all {len(made)} stages: {duration(low)} to {duration(high)}, {size_text(disk)} on disk"
    )
    return {
        "plans": {name: plan.to_json() for name, plan in named.items()},
        "total": {
            "steps": sum(plan.steps for plan in named.values()),
            "seconds_range": [low, high],
            "disk_bytes": disk,
            "memory_bytes": max(plan.memory_bytes for plan in named.values()),
        },
    }


def without_dry_run() -> str:
    """The command that was given, as the one that does it."""
    left_out = ("--dry-run", "--json", "--jsonl")
    return shlex.join(["specctl", *(word for word in sys.argv[1:] if word not in left_out)])


def _named(made: Sequence[tuple[Recipe, RunPlan]]) -> dict[str, RunPlan]:
    """Plans by the name of their recipe; of one recipe several times, numbered."""
    names = [part.name for part, _ in made]
    if len({*names}) < len(names):
        names = [f"{name}-{number}" for number, name in enumerate(names, 1)]
    return dict(zip(names, (plan for _, plan in made), strict=True))


def show_plan(console: Console, plan: RunPlan) -> None:
    """What a run will take, before anything is spent."""
    (low, high), recipe = plan.seconds_range, plan.weighing.recipe
    rows = [
        ("recipe", f"{recipe.name} ({recipe.digest[:12]})"),
        ("target", recipe.target.name + _where_text(recipe.data)),
        ("family", recipe.drafter.family),
        ("target parameters", f"{plan.target_parameters:,}"),
        ("drafter parameters", f"{plan.parameters:,} ({plan.trainable:,} trained)"),
        *((("THE TARGET CHANGES", _change_text(plan)),) if plan.added else ()),
        *_data_rows(plan),
        *((("images", f"{plan.images:,}, shown to the target"),) if plan.images else ()),
        ("learns", _learned_text(recipe.data, recipe.origin["data.regenerate"])),
        ("steps", f"{plan.steps:,}"),
        ("hardware", plan.cluster.text()),
        *_memory_rows(plan),
        ("disk", _parts_text(plan.disk_bytes, plan.disk)),
        *_elsewhere_rows(recipe.data, plan),
        ("time", f"{duration(low)} to {duration(high)} ({plan.basis})"),
        *((f"  {part.name}", _part_text(part)) for part in plan.parts),
        *_hours_rows(plan),
        *(("then", text) for text in plan.remarks),
    ]
    console.table(("what", "how much"), rows)


def _elsewhere_rows(data: DataPart, plan: RunPlan) -> list[tuple[str, str]]:
    """The size of features that are kept apart from the run, and the room for them."""
    if not plan.features_elsewhere:
        return []
    at = Path(os.path.abspath(str(data.features_at)))
    free = Disk().free(next(place for place in (at, *at.parents) if place.exists()))
    size = f"{size_text(plan.features_elsewhere)} in {at} ({size_text(free)} free)"
    return [("features", f"{size}; rows that are there already are not written again")]


def _learned_text(data: DataPart, said_by: str) -> str:
    """Whose words are learned, which decides more than anything else what a drafter drafts.
    `said_by`: what has set data.regenerate."""
    if data.on_policy == 1.0:
        return "what the drafter itself writes"
    if not data.regenerate:
        words = f"the words of the data as they are (data.regenerate=false, by {said_by})"
    elif data.endpoint is not None:
        words = f"{data.prompts:,} answers of the target, written by {data.endpoint}"
    else:
        words = f"{data.prompts:,} answers of the target"
    more = [f"{data.text_tokens:,} tokens of the data's own words"] if data.text_tokens else []
    more += ["the prompts"] if data.train_on_prompt else []
    return " + ".join([words, *more])


def _where_text(data: DataPart) -> str:
    places = {"endpoint": ", its layers in a server", "files": ", its states in files"}
    return places.get(data.target_source, "")


def _data_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Where the data come from; of several sources, the share of each in the bytes of all."""
    shown = [(one, one.what + ("" if one.bytes is None else f", {size_text(one.bytes)}"))
             for one in plan.sources]  # fmt: skip
    if len(shown) == 1:
        return [("data", f"{one.name}: {what}") for one, what in shown]
    shares = ("share not known" if one.share is None else f"{one.share:.0%}" for one, _ in shown)
    rows = [
        (f"  {one.name}", f"{what}, {share}")
        for (one, what), share in zip(shown, shares, strict=True)
    ]
    return [("data", f"{len(rows)} sources, all read"), *rows]


def _memory_rows(plan: RunPlan) -> list[tuple[str, str]]:
    held, place = plan.held, "memory"
    if plan.cluster.gpu is not None:
        place = "memory of a host"
        on_gpu = _parts_text(held.device_bytes, held.device)
        on_gpu += f"; of {size_text(plan.cluster.gpu.memory)}, fullest when {held.moment}"
        return [("memory of a GPU", on_gpu), (place, _parts_text(held.host_bytes, held.host))]
    rows = [(place, _parts_text(held.host_bytes, held.host))]
    if held.writing:
        written = _parts_text(sum(held.writing.values()), held.writing)
        rows.append(("  while answers are written", written))
    return rows


def _hours_rows(plan: RunPlan) -> list[tuple[str, str]]:
    if plan.cluster.gpu is None:
        return []
    low, high = plan.gpu_hours
    return [("GPU-hours", f"{low:,.1f} to {high:,.1f}")]


def _change_text(plan: RunPlan) -> str:
    return f"{plan.added:,} added numbers are merged into it; the drafter is for OUT/target alone"


def _part_text(part: Part) -> str:
    low, high = part.seconds_range
    if high == 0:
        return part.amount
    return f"{part.amount}: {duration(low)} to {duration(high)}"


def _parts_text(total: int, parts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items() if count)
    return f"{size_text(total)} ({shown})"


# -- calibration --------------------------------------------------------------------------------


def calibration(console: Console, processes: int = 1) -> Calibrate:
    """What measures a few pieces of a run here, in some seconds; where it cannot, that is said and
    the time estimated."""
    from specctl.train.planning.calibration import calibrate
    from specctl.train.planning.stand_in import process_seconds

    start = process_seconds()

    def measured(recipe: Recipe, shape: TargetShape) -> Pace | None:
        console.say(
            f"calibrating {recipe.name} here: a few steps and rounds of the run, up to a minute"
        )
        try:
            return calibrate(recipe, shape, processes, start, reporter=console)
        except SpecctlError as error:
            console.warn(f"not calibrated: {error.what}")
            return None

    return measured


# -- rehearsal ----------------------------------------------------------------------------------


def _refuse_rehearsal(num_stages: int) -> None:
    if num_stages:
        raise SpecctlError(
            "a pipeline cannot be rehearsed: its later stages start from the earlier ones",
            found=f"{num_stages} stages",
            expected="a recipe of one stage",
            do="leave --rehearse out, or plan one stage as a recipe of its own",
        )


def rehearse(name: str, small: Mapping[str, Any]) -> Rehearsal:
    """Run the `small` recipe of that name and say what it took. Nothing of it is left behind."""
    import yaml

    from specctl.train.planning.rehearsal import read_rehearsal

    with tempfile.TemporaryDirectory(prefix="specctl-rehearsal-") as folder:
        given, out = Path(folder) / "recipe.yaml", Path(folder) / "run"
        given.write_text(yaml.safe_dump(dict(small)))
        began = time.time()
        command = [
            sys.executable,
            "-m",
            "specctl.cli.commands.plan",
            str(given),
            str(out),
            str(began),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise SpecctlError(
                "the rehearsal failed, and so would the run",
                found=last[:300],
                do=f"leave --rehearse out for an estimate, or try: specctl train-draft --recipe "
                f"{name} --set train.steps=5",
            )
        return read_rehearsal(out / "rehearsal.json")


def rehearsal_process() -> None:
    """In the process of its own: RECIPE.yaml, OUT, seconds since the epoch when it was started."""
    from specctl.api.train import train_and_package
    from specctl.core.storage.files import write_json
    from specctl.recipes.load import load_recipe
    from specctl.train.planning.rehearsal import Stopwatch, summary

    given, out, began = sys.argv[1:]
    recipe, watch = load_recipe(given), Stopwatch()
    train_and_package(watch, recipe, Path(out), command=sys.argv)
    gpu = peak_memory().get("gpu", 0)
    found = summary(recipe.data, Path(out), watch, time.time() - float(began), gpu)
    write_json(Path(out) / "rehearsal.json", asdict(found))


if __name__ == "__main__":
    rehearsal_process()
