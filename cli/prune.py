"""`specctl prune`: a drafter cut out of the target itself, healed by distillation."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.console import Console
from specctl.cli.training import RecipeFlags, finish, load_initial, train_and_package
from specctl.recipes.errors import FileError, RecipeError

if TYPE_CHECKING:
    from specctl.drafters.parts.llama import LlamaShape
    from specctl.drafters.small_lm import SmallLm
    from specctl.recipes.schema import Recipe
    from specctl.runtime.target import Target
    from specctl.train.prune import Wanted
    from specctl.train.prune_run import Cut, CutReport

IMPORTANCES = ("bi", "alpha", "activation")
PRUNE = RecipeFlags(recipe="prune")
REPORT = "prune.json"
SCORE_PROMPTS = 128


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
) -> None:
    """Cut a drafter out of the target itself, and heal it by distillation.

    Layers, heads, MLP neurons and channels that matter least on text the target wrote are removed;
    training then starts from what is left. OUT/cut is the drafter before healing, OUT/package the
    result, OUT/prune.json what was cut and why. The same command continues an interrupted run.

    Examples:

      specctl prune --target tiny --layers 2 --out runs/prune
      specctl prune --target qwen3-8b --layers 4 --importance alpha --heal-steps 2000
      specctl prune --target tiny --layers 4 --width 0.75,mlp=0.5 --heads 2 --heal-steps 0
    """
    recipe, out = run.load(), run.folder(run.load())
    _check(cut, recipe)
    steps = recipe.train.steps if cut.heal_steps is None else cut.heal_steps
    _cut_and_heal(console, Job(recipe, cut, out, steps))


@dataclass(frozen=True, slots=True)
class Job:
    """A cut to be made: the recipe that heals it, the flags, the folder, the steps."""

    recipe: Recipe
    flags: CutFlags
    out: Path
    steps: int

    def data_recipe(self) -> Recipe:
        """The recipe of the text on which scores are measured: that of the healing, else little."""
        if self.steps:
            return self.recipe
        data = self.recipe.data
        few = {"prompts": min(data.prompts, SCORE_PROMPTS), "text_tokens": 0}
        return self.recipe.model_copy(update={"data": data.model_copy(update=few)})

    def request(self) -> dict[str, Any]:
        """What decides the cut."""
        tree = self.recipe.to_json()
        flags = {k: v for k, v in asdict(self.flags).items() if k != "heal_steps"}
        options = self.recipe.drafter.options
        return {"target": tree["target"], "data": tree["data"], "options": options, **flags}


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


def _cut_and_heal(console: Console, job: Job) -> None:
    """Cut once, or halfway first; train after each cut; say what came of it."""
    from specctl.train.prune_run import heal_recipe

    half = job.out / "half"
    if job.flags.two_step:
        drafter = _made(console, job, half, half=True, source=None)
        first = heal_recipe(job.recipe, drafter, str(half / "cut"), max(1, job.steps // 2))
        train_and_package(console, first, half)
        if not (job.out / "data").exists():
            shutil.copytree(half / "data", job.out / "data")
    source = half / "package" if job.flags.two_step else None
    drafter = _made(console, job, job.out, half=False, source=source)
    if job.steps == 0:
        _finish_unhealed(console, job)
        return
    steps = job.steps - job.steps // 2 if job.flags.two_step else job.steps
    recipe = heal_recipe(job.recipe, drafter, str(job.out / "cut"), max(1, steps))
    result = train_and_package(console, recipe, job.out)
    finish(console, recipe, result, more={"prune": _report_of(job.out)})


def _made(console: Console, job: Job, folder: Path, half: bool, source: Path | None) -> SmallLm:
    """The cut of this stage in FOLDER/cut: made, or the one that is already there."""
    from specctl.drafters.small_lm import SmallLm
    from specctl.train.lock import locked

    folder.mkdir(parents=True, exist_ok=True)
    target = _target(console, job.recipe)
    with locked(folder, console):
        if not (folder / REPORT).exists():
            _make(console, job, target, folder, half, source)
    if _report_of(folder)["request"] != _as_json(job.request()):
        raise FileError(
            "the folder holds another cut",
            where=str(folder / REPORT),
            found="a cut that was asked for with other flags",
            expected="the same flags, or an empty folder",
            do="choose another --out",
        )
    drafter = load_initial(str(folder / "cut"), target)
    assert isinstance(drafter, SmallLm)
    return drafter


def _target(console: Console, recipe: Recipe) -> Target:
    from specctl.cli.loading import TargetChoice

    part = recipe.target
    choice = TargetChoice(part.name, part.revision, part.dtype, inflate=part.inflate)
    return choice.load(console)


def _make(
    console: Console, job: Job, target: Target, folder: Path, half: bool, source: Path | None
) -> None:
    """Score, cut, package and report one stage."""
    from specctl.drafters.small_lm import SmallLm
    from specctl.train.data import prepare
    from specctl.train.prune import prunable
    from specctl.train.prune_run import cut_drafter, halfway, whole_target

    shape = prunable(target).module.shape
    wanted = wanted_of(job, shape)
    if half:
        wanted = halfway(wanted, shape)
    origin = whole_target(target) if source is None else load_initial(str(source), target)
    assert isinstance(origin, SmallLm)
    console.say(f"scoring the layers of {target.name} ({wanted.importance})")
    data = prepare(job.data_recipe(), target, folder, console)
    made = cut_drafter(origin, wanted, job.recipe, target, data)
    _save(job, target, folder / "cut", made)
    _show(console, made.report)
    body = {"request": job.request(), "importance": wanted.importance, **made.report.to_json()}
    (folder / REPORT).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _save(job: Job, target: Target, folder: Path, made: Cut) -> None:
    from specctl.export.check import check_package
    from specctl.export.folder import save_package

    measured = made.report.measured
    save_package(
        made.drafter,
        target,
        folder,
        serve=job.recipe.to_json()["serve"],
        recipe_digest=job.recipe.digest,
        acceptance={
            "tau": measured.tau,
            "alpha": list(measured.accepted_per_position),
            "command": f"specctl prune --target {target.name}",
            "data": "held-out prompts",
            "temperature": measured.temperature,
            "prompts": measured.prompts,
            "new_tokens": job.recipe.train.tau_tokens,
        },
        command=["specctl", *sys.argv[1:]],
    )
    check_package(folder, target, reference=made.drafter)


def wanted_of(job: Job, shape: LlamaShape) -> Wanted:
    """The flags, then the recipe's options, as numbers."""
    from specctl.train.prune import Wanted

    flags, options = job.flags, job.recipe.drafter.options
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
    group = heads // kv_heads
    return num_heads, num_heads // group if num_heads % group == 0 else kv_heads


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


def _show(console: Console, report: CutReport) -> None:
    old, new = report.before, report.after
    kept = ", ".join(map(str, report.keep.layers))
    rows = [
        ("layers", str(old.num_layers), f"{new.num_layers} ({kept})"),
        ("width", f"{old.hidden_size:,}", f"{new.hidden_size:,}"),
        ("heads / key-value heads", _heads(old), _heads(new)),
        ("MLP neurons", f"{old.intermediate_size:,}", f"{new.intermediate_size:,}"),
        ("parameters", f"{report.parameters_before:,}", f"{report.parameters:,}"),
        ("alpha before healing", "1", f"{report.alpha:.3f}"),
        ("tau before healing", "", f"{report.measured.tau:.2f}"),
    ]
    console.table(("what", "before", "after"), rows)


def _heads(shape: LlamaShape) -> str:
    return f"{shape.num_heads} / {shape.num_kv_heads}"


def _report_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return body


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _finish_unhealed(console: Console, job: Job) -> None:
    report = _report_of(job.out)
    package, target = job.out / "cut", job.recipe.target.name
    if job.recipe.vocab.size is not None:
        console.say("the vocabulary is whole: it is trimmed while healing, or by vocab-trim")
    console.out(
        f"cut {package} | alpha {report['alpha']:.3f} | tau {report['tau']:.2f}, not healed"
    )
    answer = {"out": str(job.out), "package": str(package), "steps": 0, "prune": report}
    following = [
        f"specctl vocab-trim --draft {package} --target {target} --out {job.out}-trimmed",
        f'specctl generate --target {target} --draft {package} --compare "..."',
    ]
    console.done(answer | {"tau": report["tau"]}, next=following)
