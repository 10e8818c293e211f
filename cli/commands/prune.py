"""`specctl prune`: a drafter cut out of the target itself, healed by distillation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.preflight import check_run
from specctl.cli.app.console import Console
from specctl.cli.commands.cutting import PruneJob, cut_and_heal
from specctl.cli.commands.plan import shown, without_dry_run
from specctl.cli.commands.shapes import SearchFlags, search_shapes
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import DryRun, RecipeFlags
from specctl.cli.options.target_choice import go_offline
from specctl.core.errors import RecipeError

if TYPE_CHECKING:
    from specctl.core.spec import ModelSpec
    from specctl.models.llama import LlamaShape
    from specctl.recipes.schema import Recipe
    from specctl.train.prune.cut import Wanted

IMPORTANCES = ("bi", "alpha", "activation")
PRUNE, NO_SEARCH = RecipeFlags(recipe="prune"), SearchFlags()


@dataclass(frozen=True, slots=True)
class CutFlags:
    """What is to be left of the target, and how that is chosen."""

    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Layers to keep; else the recipe's.")
    ] = None
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="SPEC",
            help="Channels and MLP neurons to keep: 192, 0.5 (of the target's), 192,mlp=0.5.",
        ),
    ] = None
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="SPEC", help="Query heads to keep, or QUERY/KV as in 8/2."),
    ] = None
    importance: Annotated[
        str,
        typer.Option(
            "--importance",
            help="What a layer matters: bi (block influence), alpha (acceptance lost without it), "
            "activation (size of what it adds).",
        ),
    ] = "bi"
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Cut one span of neighbouring layers.")
    ] = False
    heal_steps: Annotated[
        int | None,
        typer.Option(
            "--heal-steps", min=0, help="Steps of distillation after the cut; else the recipe's."
        ),
    ] = None
    two_step: Annotated[
        bool,
        typer.Option("--two-step", help="Cut half, heal, cut the rest, heal: for large cuts."),
    ] = False


def prune(
    console: Console,
    run: RecipeFlags = PRUNE,
    cut: CutFlags = CutFlags(),
    search: SearchFlags = NO_SEARCH,
    dry_run: DryRun = False,
    offline: Offline = False,
) -> None:
    """Cut a drafter out of the target itself, and heal it by distillation.

    Layers, heads, MLP neurons and channels that matter least on text the target wrote are removed;
    training then starts from what is left. OUT/cut is the drafter before healing, OUT/package the
    result, OUT/prune.json what was cut and why. The same command continues an interrupted run.
    With --search nothing is cut: shapes are ranked by predicted tokens/s on this device.

    Examples:

      specctl prune --target tiny --layers 2 --out runs/prune
      specctl prune --target qwen3-8b --layers 4 --importance alpha --heal-steps 2000 --dry-run
      specctl prune --target tiny --layers 4 --width 0.75,mlp=0.5 --heads 2 --heal-steps 0
      specctl prune --target tiny --search --depths 1,2,4 --widths 128,256 --heal-steps 60
    """
    recipe = run.load()
    _check(cut, recipe)
    search.refuse_ignored()
    if offline:
        go_offline()
    out = run.folder(recipe)
    check_run(recipe, out)
    if search.search:
        if dry_run:
            raise _search_unplanned()
        search_shapes(console, recipe, out, search, cut.heal_steps)
        return
    steps = recipe.train.steps if cut.heal_steps is None else cut.heal_steps
    wanted = partial(wanted_of, cut, recipe)
    job = PruneJob(recipe, wanted, _request(cut, recipe), out, steps, cut.two_step)
    if dry_run:
        _show_plans(console, job)
    else:
        cut_and_heal(console, job)


def _show_plans(console: Console, job: PruneJob) -> None:
    """What the cut and its healing will take; nothing is loaded."""
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.prune.plan import prune_plans

    recipe = job.data_recipe()
    wanted = job.wanted(target_shape(recipe.target).spec)
    plans = prune_plans(recipe, wanted, job.steps, job.two_step)
    console.done(shown(console, recipe, plans), next=[without_dry_run()])


def _search_unplanned() -> RecipeError:
    return RecipeError(
        "a search is not planned beforehand: it heals every shape",
        where="--dry-run",
        found="--search --dry-run",
        expected="one of the two",
        do="leave out --dry-run; or plan one shape: specctl prune --layers 2 --dry-run",
    )


def _request(flags: CutFlags, recipe: Recipe) -> dict[str, object]:
    """What decides a cut."""
    tree = recipe.to_json()
    asked = {k: v for k, v in asdict(flags).items() if k != "heal_steps"}
    options = recipe.drafter.options
    return {"target": tree["target"], "data": tree["data"], "options": options, **asked}


def _check(flags: CutFlags, recipe: Recipe) -> None:
    if flags.importance not in IMPORTANCES:
        raise RecipeError(
            f"unknown importance {flags.importance!r}",
            where="--importance",
            found=flags.importance,
            expected="one of " + ", ".join(IMPORTANCES),
            do="--importance bi",
        )
    if recipe.drafter.family != "small-lm":
        raise RecipeError(
            f"a drafter of family {recipe.drafter.family} cannot be cut from the target",
            where=f"{recipe.name}:drafter.family",
            found=recipe.drafter.family,
            expected="small-lm",
            do="leave out --recipe",
        )
    if flags.two_step and flags.heal_steps == 0:
        raise RecipeError(
            "two steps without distillation in between are one",
            where="--two-step",
            found="--heal-steps 0",
            expected="steps of healing",
            do="leave out --two-step",
        )


def wanted_of(flags: CutFlags, recipe: Recipe, shape: LlamaShape | ModelSpec) -> Wanted:
    """The flags, then the recipe's options, as numbers."""
    from specctl.train.prune.cut import Wanted

    options = recipe.drafter.options
    channels, neurons = parse_width(flags.width, shape.hidden_size, shape.intermediate_size)
    heads, kv_heads = parse_heads(flags.heads, shape.num_heads, shape.num_kv_heads)
    named = None if flags.layers is not None else options.get("from_layers")
    layers = flags.layers if flags.layers is not None else options.get("layers")
    return Wanted(
        layers=layers,
        from_layers=None if named is None else tuple(named),
        channels=channels or options.get("width"),
        neurons=neurons or options.get("intermediate"),
        heads=heads or options.get("heads"),
        kv_heads=kv_heads or options.get("kv_heads"),
        importance=flags.importance,  # type: ignore[arg-type]
        contiguous=flags.contiguous,
    )


def parse_width(spec: str | None, width: int, inner: int) -> tuple[int | None, int | None]:
    """Channels and neurons of --width; fractions are of the target's."""
    found: dict[str, int] = {}
    for part in () if spec is None else spec.split(","):
        name, _, value = part.rpartition("=")
        if name not in ("", "mlp") or name in found:
            raise _bad_spec("--width", str(spec), "192, 0.5, mlp=320 or 192,mlp=320")
        found[name] = _size(value, inner if name else width, "--width", str(spec))
    return found.get(""), found.get("mlp")


def parse_heads(spec: str | None, heads: int, kv_heads: int) -> tuple[int | None, int | None]:
    """Query and key/value heads of --heads. A bare number takes whole groups if it can, else heads
    evenly out of every group."""
    if spec is None:
        return None, None
    query, _, groups = spec.partition("/")
    num_heads = _size(query, heads, "--heads", spec)
    if groups:
        return num_heads, _size(groups, kv_heads, "--heads", spec)
    from specctl.train.prune.cut import groups_left

    return num_heads, groups_left(num_heads, heads, kv_heads)


def _size(text: str, whole: int, where: str, spec: str) -> int:
    try:
        number = float(text) * whole if "." in text else float(int(text))
    except ValueError:
        number = 0.0
    if not 1 <= number <= whole:
        raise _bad_spec(where, spec, f"1 to {whole:,}, or a fraction such as 0.5")
    return round(number)


def _bad_spec(where: str, spec: str, expected: str) -> RecipeError:
    return RecipeError(
        f"{where} is not understood",
        where=where,
        found=spec,
        expected=expected,
        do="specctl prune --help",
    )
