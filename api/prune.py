"""prune(): cut a drafter out of the target, package, report, heal; once, or halfway first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from specctl.api.arguments.progress import Progress, as_reporter, warnings_of
from specctl.api.arguments.recipe import RecipeLike, recipe_of, run_folder, set_words
from specctl.api.arguments.targets import TargetLike, in_memory, inflated_note
from specctl.api.failures import raises_user_errors
from specctl.api.preflight import check_out, check_run
from specctl.api.train import TrainResult, load_initial, packaged_acceptance, train_and_package
from specctl.core.errors import FileError, RecipeError
from specctl.core.messages.table import Table, Tabled
from specctl.core.spec import ModelSpec
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.package.check import check_package
from specctl.export.package.folder import save_package
from specctl.export.package.origin import redacted
from specctl.models.llama.llama import LlamaShape
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target, load_part
from specctl.train.assemble import decoder, measuring_prompts, served_family
from specctl.train.data.prepare import prepare
from specctl.train.metrics.metrics import MeasuredAcceptance
from specctl.train.prune.cut import Wanted, check_cut, groups_left, prunable
from specctl.train.prune.run import (
    CutDrafter,
    CutReport,
    cut_drafter,
    halfway,
    whole_target,
)
from specctl.train.run import RunResult
from specctl.train.saving.lock import locked

REPORT = "prune.json"
SCORE_PROMPTS = 128
OnCut = Callable[[CutReport], object]
IMPORTANCES = ("bi", "alpha", "activation")


@dataclass(frozen=True, slots=True)
class Cut:
    """What is to be left of the target, and how that is chosen (None: the recipe's): layers;
    channels and MLP neurons as in "192", "0.5" or "192,mlp=0.5"; heads as in "8" or "8/2"; steps of
    distillation afterwards."""

    layers: int | None = None
    width: str | None = None
    heads: str | None = None
    importance: str = "bi"
    contiguous: bool = False
    heal_steps: int | None = None
    two_step: bool = False

    def check(self, name: str, family: str) -> None:
        """Refuse what cannot be by the recipe of that name, before anything is loaded."""
        if self.importance not in IMPORTANCES:
            raise RecipeError(
                f"unknown importance {self.importance!r}",
                where="--importance",
                found=self.importance,
                expected="one of " + ", ".join(IMPORTANCES),
                do="--importance bi",
            )
        if family != "small-lm":
            raise RecipeError(
                f"a drafter of family {family} cannot be cut from the target",
                where=f"{name}:drafter.family",
                found=family,
                expected="small-lm",
                do="leave out --recipe",
            )
        if self.two_step and self.heal_steps == 0:
            raise RecipeError(
                "two steps without distillation in between are one",
                where="--two-step",
                found="--heal-steps 0",
                expected="steps of healing",
                do="leave out --two-step",
            )

    def wanted(self, options: Mapping[str, Any], shape: LlamaShape | ModelSpec) -> Wanted:
        """What is requested, then the recipe's options, as numbers."""
        channels, neurons = parse_width(self.width, shape.hidden_size, shape.intermediate_size)
        heads, kv_heads = parse_heads(self.heads, shape.num_heads, shape.num_kv_heads)
        named = None if self.layers is not None else options.get("from_layers")
        layers = self.layers if self.layers is not None else options.get("layers")
        return Wanted(
            layers=layers,
            from_layers=None if named is None else tuple(named),
            channels=channels or options.get("width"),
            neurons=neurons or options.get("intermediate"),
            heads=heads or options.get("heads"),
            kv_heads=kv_heads or options.get("kv_heads"),
            importance=self.importance,  # type: ignore[arg-type]
            contiguous=self.contiguous,
        )


@dataclass(frozen=True, slots=True)
class PruneJob:
    """A cut to be made: the recipe that heals it, what is to be left, the folder."""

    recipe: Recipe
    cut: Cut
    out: Path
    command: Sequence[str] = ()

    @property
    def steps(self) -> int:
        """Of healing."""
        steps = self.cut.heal_steps
        return self.recipe.train.steps if steps is None else steps

    def request(self) -> dict[str, Any]:
        """What decides the cut, as prune.json keeps it."""
        tree = self.recipe.to_json()
        cut = {k: v for k, v in asdict(self.cut).items() if k != "heal_steps"}
        options = self.recipe.drafter.options
        found = {"target": tree["target"], "data": tree["data"], "options": options, **cut}
        return dict(json.loads(json.dumps(found)))

    def data_recipe(self) -> Recipe:
        """The recipe of the text on which scores are measured: that of the healing, else little."""
        if self.steps:
            return self.recipe
        data = self.recipe.data
        few = {"prompts": min(data.prompts, SCORE_PROMPTS), "text_tokens": 0}
        return self.recipe.model_copy(update={"data": data.model_copy(update=few)})

    def healing(self, drafter: SmallLm, folder: str, steps: int) -> Recipe:
        """The recipe that trains the cut drafter on, starting from its package in `folder`."""
        recipe = self.recipe
        options = {k: v for k, v in asdict(drafter.options).items() if k != "from_layers"}
        part = recipe.drafter.model_copy(update={"options": options, "init": folder})
        train = recipe.train.model_copy(
            update={"steps": steps, "tau_every": min(recipe.train.tau_every, steps)}
        )
        changed = recipe.model_copy(update={"drafter": part, "train": train})
        ours = dict.fromkeys(
            ("drafter.init", *(f"drafter.options.{name}" for name in options)), "prune"
        )
        return changed.with_origin({**changed.origin, **ours})


@dataclass(frozen=True, slots=True, repr=False)
class PruneResult(Tabled):
    """What was cut and what came of it: `report` is what OUT/prune.json holds, `run` the healing
    (None without any)."""

    out: Path
    report: Mapping[str, Any]
    run: TrainResult | None
    warnings: tuple[str, ...] = ()

    @property
    def package(self) -> Path:
        """The healed drafter, or the cut one."""
        return self.out / "cut" if self.run is None else self.run.package

    @property
    def tau(self) -> float | None:
        return float(self.report["tau"]) if self.run is None else self.run.tau

    def table(self) -> Table:
        """The shape before and after, and how it drafts."""
        healed = () if self.run is None else self.run.table().rows
        table = cut_table(self.report)
        rows = [*table.rows, *((name, "", value) for name, value in healed)]
        return Table(table.columns, rows, [f"warning: {text}" for text in self.warnings])

    def to_json(self) -> dict[str, Any]:
        if self.run is not None:
            return {**self.run.to_json(), "prune": self.report}
        answer = {"out": str(self.out), "package": str(self.package), "steps": 0}
        return {**answer, "prune": self.report, "tau": self.tau}


def cut_table(report: Mapping[str, Any]) -> Table:
    """What a cut left, from its report."""
    old, new = report["before"], report["after"]
    kept = ", ".join(map(str, report["layers"]))
    heads = [f"{shape['num_heads']} / {shape['num_kv_heads']}" for shape in (old, new)]
    rows = [
        ("layers", str(old["num_layers"]), f"{new['num_layers']} ({kept})"),
        ("width", f"{old['hidden_size']:,}", f"{new['hidden_size']:,}"),
        ("heads / key-value heads", *heads),
        ("MLP neurons", f"{old['intermediate_size']:,}", f"{new['intermediate_size']:,}"),
        ("parameters", f"{report['parameters_before']:,}", f"{report['parameters']:,}"),
        ("alpha before healing", "1", f"{report['alpha']:.3f}"),
        ("tau before healing", "", f"{report['tau']:.2f}"),
    ]
    return Table(("what", "before", "after"), rows)


@raises_user_errors
def prune(
    target: TargetLike = None,
    recipe: RecipeLike = "prune",
    *,
    out: str | Path | None = None,
    cut: Cut | None = None,
    progress: Progress = None,
    command: Sequence[str] = (),
    on_cut: OnCut | None = None,
    **settings: Any,
) -> PruneResult:
    """Cut a drafter out of the target itself, and heal it by distillation, in the folder `out`
    (runs/TARGET-RECIPE): OUT/cut is the drafter before healing, OUT/package the result. The same
    call continues an interrupted run.

    `settings` are those of a Cut (`layers=2`, `width="0.5"`, `heads="8/2"`, `importance`,
    `contiguous`, `heal_steps`, `two_step`), and keys of the recipe as in `train`. `on_cut` is
    called with the report of each cut that is made.
    """
    reporter = as_reporter(progress)
    own = {name: settings.pop(name) for name in asdict(Cut()) if name in settings}
    texts = {k: str(v) for k, v in own.items() if k in ("width", "heads") and v is not None}
    given = in_memory(target)
    made = recipe_of(recipe, given or target, settings)
    job_cut = cut or Cut(**own | texts)
    job_cut.check(made.name, made.drafter.family)
    folder = run_folder(made.target.name, made.name) if out is None else Path(out)
    check_out(folder)
    check_run(made, folder)
    name = str(recipe) if isinstance(recipe, (str, Path)) else made.name
    sets = set_words(made.to_json(), made.origin)
    job = PruneJob(made, job_cut, folder, command or _words(name, sets, job_cut, folder))
    model = given or load_part(made.target, device=str(PartialState().device), is_widened=True)
    if model.inflated:
        reporter.warn(inflated_note(model))
    run = _cut_and_heal(reporter, job, model, on_cut or (lambda report: None))
    warned = warnings_of(reporter)
    healed = None if run is None else TrainResult(run[0], run[1], warned)
    return PruneResult(folder, _report_of(folder), healed, warned)


def _words(recipe: str, sets: Sequence[str], cut: Cut, out: Path) -> list[str]:
    """The command line that does the same."""
    words = ["specctl", "prune", "--recipe", recipe, *sets, "--out", str(out)]
    for key, value in asdict(cut).items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, str(value)]
    return words


def _cut_and_heal(
    reporter: Reporter, job: PruneJob, target: Target, on_cut: OnCut
) -> tuple[Recipe, RunResult] | None:
    """Cut once, or halfway first; train after each cut."""
    half, two_step = job.out / "half", job.cut.two_step
    given: dict[str, Any] = {"command": job.command, "target": target}
    if two_step:
        drafter = _made(reporter, job, target, half, None, on_cut)
        first = job.healing(drafter, str(half / "cut"), max(1, job.steps // 2))
        train_and_package(reporter, first, half, **given)
        if not (job.out / "data").exists():
            shutil.copytree(half / "data", job.out / "data")
    source = half / "package" if two_step else None
    drafter = _made(reporter, job, target, job.out, source, on_cut)
    if job.steps == 0:
        return None
    steps = job.steps - job.steps // 2 if two_step else job.steps
    recipe = job.healing(drafter, str(job.out / "cut"), max(1, steps))
    return recipe, train_and_package(reporter, recipe, job.out, **given)


def _made(
    reporter: Reporter,
    job: PruneJob,
    target: Target,
    folder: Path,
    source: Path | None,
    on_cut: OnCut,
) -> SmallLm:
    """The cut of this stage in FOLDER/cut: made, or the one that is already there."""
    with locked(folder, reporter):
        if not (folder / REPORT).exists():
            _refuse_other_run(folder)
            on_cut(_make(reporter, job, target, folder, source))
    if _report_of(folder)["request"] != job.request():
        raise FileError(
            "the folder holds another cut",
            where=str(folder / REPORT),
            found="a cut with other flags",
            expected="the same flags, or an empty folder",
            do="choose another --out",
        )
    drafter = load_initial(str(folder / "cut"), target)
    assert isinstance(drafter, SmallLm)
    return drafter


def _refuse_other_run(folder: Path) -> None:
    """Checkpoints without a cut are another command's; its rows must not be made anew."""
    if (folder / "checkpoints").exists():
        raise FileError(
            "the folder holds a run that was not cut from the target",
            where=str(folder),
            found="checkpoints, and no " + REPORT,
            expected="an empty folder, or one of specctl prune",
            do="choose another --out",
        )


def _make(
    reporter: Reporter, job: PruneJob, target: Target, folder: Path, source: Path | None
) -> CutReport:
    """Score, cut, package and report one stage; halfway in a folder of its own."""
    shape = prunable(target).module.shape
    wanted = job.cut.wanted(job.recipe.drafter.options, shape)
    check_cut(wanted, shape)  # before the target writes its answers
    if folder != job.out:
        wanted = halfway(wanted, shape)
    origin = whole_target(target) if source is None else load_initial(str(source), target)
    assert isinstance(origin, SmallLm)
    reporter.say(f"scoring the layers of {target.name} ({wanted.importance})")
    data = prepare(job.data_recipe(), target, folder, reporter)
    recipe = job.recipe
    served_family(recipe.drafter, recipe.train.joint, recipe.serve)

    def measure(drafter: SmallLm) -> MeasuredAcceptance:
        prompts = measuring_prompts(recipe.data, recipe.train.tau_prompts, target, data)
        return decoder(recipe.serve, recipe.train, target, drafter, prompts)()

    made = cut_drafter(origin, wanted, recipe.drafter, target, data, measure)
    _save(job, target, folder / "cut", made)
    body = {
        "request": job.request(),
        "importance": wanted.importance,
        **made.report.to_json(),
    }
    (folder / REPORT).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return made.report


def _save(job: PruneJob, target: Target, folder: Path, made: CutDrafter) -> None:
    command = redacted(job.command)
    again = [*command, *([] if "--target" in command else ["--target", target.name])]
    measured = made.report.measured.to_json()
    save_package(
        made.drafter,
        target,
        folder,
        serve=job.recipe.to_json()["serve"],
        recipe_digest=job.recipe.digest,
        acceptance=packaged_acceptance(
            measured, job.recipe.data, job.recipe.train.tau_tokens, target, again
        ),
        command=command,
    )
    check_package(folder, target, reference=made.drafter)


def _report_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return body


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
