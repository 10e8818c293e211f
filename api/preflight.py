"""What a run would refuse once it has begun, refused before: by its dry run and plan as well."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.api.arguments.outputs import check_folder
from specctl.core.errors import FileError, NetworkError, RecipeError, SpecctlError, unknown
from specctl.core.messages.printable import counted
from specctl.recipes.stages import PREFIX, stages_of

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


# What systems leave in a folder that is empty for people.
HARMLESS = frozenset({".DS_Store", ".gitignore", ".gitkeep", "lost+found", "derived.json"})
BEFORE = ("memory", "recipe")  # what is checked before a run begins, and may be waived
HALF = "half"  # the first run of `prune --two-step`, which is there before that of the folder


def check_run(recipe: Recipe, out: Path, warn: Callable[[str], None] | None = None) -> None:
    """The folder, the data and the drafters that every stage of a run still needs. With
    `warn`, data that are not there yet are only warned of: a price may be wanted before they
    are."""
    from specctl.train.data.sources.self_source import check_self
    from specctl.train.data.sources.sources import check_source
    from specctl.train.runs.finished import remaining

    check_folder(out)
    stages = stages_of(recipe)
    for stage in remaining(stages, out) if stages else [recipe]:
        check_self(stage.data)
        try:
            check_source(stage.data.source, stage.data.format, stage.data.split)
        except FileError as error:
            if warn is None:
                raise
            warn(f"{error.what}, so its size is guessed ({error.found}); the run will need it")
        _check_suite(stage.train.tau_suite, warn)
        for name in (stage.drafter.init, stage.train.reference):
            if name is not None:
                _check_drafter(name)


def _check_suite(word: str | None, warn: Callable[[str], None] | None) -> None:
    """Refuse a suite that tau is to be measured on and that cannot be read; with `warn`, that of
    files or a hub that are not there is only said."""
    from specctl.train.data.prompts.suite_prompts import read_run_suite

    if word is None:
        return
    try:
        read_run_suite(word)
    except (FileError, NetworkError) as error:
        if warn is None:
            raise
        warn(f"{error.what} ({error.found}); the run will need it")


def check_out(out: Path) -> None:
    """Refuse a folder in which something lies and no run has begun: what a run writes would be
    mixed with it."""
    from specctl.train.saving.lock import NAME
    from specctl.train.saving.run_file import RECORD, recorded

    check_folder(out)
    if not out.is_dir() or any((out / part / NAME).is_file() for part in ("", HALF)):
        return
    foreign = sorted({path.name for path in out.iterdir()} - HARMLESS)
    if foreign and recorded(out / RECORD) is None:
        raise FileError(
            f"{out} holds files that no run has written",
            where="--out",
            found=", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else ""),
            expected="a new or empty folder, or one of a run",
            do="choose another --out, or move them away yourself",
        )


def check_made_for(
    recipe: Recipe,
    given: str,
    warn: Callable[[str], None],
    families: Collection[str] = (),
    is_chosen: bool = True,
) -> None:
    """A demonstration is no training of a real target. Where nobody chose the recipe `given` and
    one of these families was made for the target, that is named and refused; else it is warned
    of."""
    from specctl.recipes.made_for import DEMONSTRATION, REAL, is_same, made_for, target_of
    from specctl.train.planning.target_shape import target_shape

    name = recipe.target.name
    if name == DEMONSTRATION or target_of(given) != DEMONSTRATION:
        return
    if recipe.target.inflate is not None or is_same(name, DEMONSTRATION):
        return
    shape = target_shape(recipe.target)
    count, ids = shape.parameters, shape.spec.vocab_size
    what = f"recipe {recipe.name} was made for the target {DEMONSTRATION}, not for {name}"
    steps, rows = counted(recipe.train.steps, "step"), counted(recipe.train.rows, "row")
    steps = f"{steps} of {rows} of {recipe.train.seq_len}"
    if count < REAL:
        size = recipe.vocab.size
        is_part = isinstance(size, int) and size < ids
        drafted = f", {size:,} of {ids:,} ids" if is_part else ""
        warn(f"{what}: a demonstration ({steps}{drafted}); --data and --set change it")
        return
    fitting = made_for(name, families)
    do = "a recipe of your own: specctl recipes show llama3-8b-eagle3"
    if fitting:
        do = "--recipe " + " or ".join(fitting[:3])
    if is_chosen or not fitting:
        warn(f"{what}: {steps} are a demonstration; take {do}")
        return
    raise RecipeError(
        what,
        where="--recipe",
        found=f"{steps}, for {count / 1e9:,.1f}B parameters",
        expected="settings for a target of this size",
        do=f"{do}   (--allow recipe: train as it is)",
    )


def check_fits(recipe: Recipe, out: Path, processes: int) -> None:
    """Refuse what the memory of this machine or its GPU cannot hold, before a weight is read."""
    from specctl.train.assemble import attention_only, check_states
    from specctl.train.data.rows.context import check_context
    from specctl.train.planning.capacity import lacking_memory, refuse_lacks
    from specctl.train.planning.hardware import Cluster
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.planning.weighing import Weighing
    from specctl.train.runs.finished import remaining

    cluster, stages = Cluster.here(processes), stages_of(recipe)
    for stage in remaining(stages, out) if stages else [recipe]:
        shape, name = target_shape(stage.target), stage.target.name
        check_states(shape.config, attention_only(stage.drafter, stage.serve), name)
        check_context(name, stage.data, stage.train.seq_len, shape.spec)
        weighing, pipeline = (Weighing(each, shape, cluster) for each in (stage, recipe))
        lacks = lacking_memory(weighing, False, pipeline)
        refuse_lacks(lacks, f"{stage.name} for {name}", out)


def _check_drafter(name: str) -> None:
    """Refuse a drafter that is nowhere here, or a package that was changed; the hub is not
    asked."""
    from specctl.export.package.find import Kind, locate
    from specctl.export.package.manifest import check_files
    from specctl.recipes.targets import aliases, is_on_hub

    if name == "target" or name in aliases() or name.startswith(PREFIX) or is_on_hub(name):
        return
    found = locate(name)
    if found.kind is Kind.PACKAGE and found.folder is not None:
        check_files(found.folder)


def check_allowed(names: Collection[str]) -> None:
    """--allow names parts of a run that may have changed, or its restart; any other word allows
    nothing."""
    from specctl.train.saving.fingerprint import PARTS, RESTART

    known = (*PARTS, RESTART, *BEFORE)
    for name in names:
        if name not in known:
            raise unknown("part of a run", name, known, "--allow", kind=SpecctlError)
