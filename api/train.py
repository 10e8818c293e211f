"""train() and distill(): run a recipe, package the best, as the commands of these names do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from specctl.api.arguments.initial_shape import following_init
from specctl.api.arguments.progress import Progress, as_reporter, warnings_of
from specctl.api.arguments.recipe import RecipeLike, recipe_of, refuse_dependent, run_folder
from specctl.api.arguments.targets import TargetLike, in_memory
from specctl.api.failures import raises_user_errors
from specctl.api.measured.measurement import Measurement, run_words
from specctl.api.preflight import check_allowed, check_out, check_run
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.messages.table import Table, Tabled
from specctl.export.formats import export, formats
from specctl.export.package.check import check_package
from specctl.export.package.compat import ALLOWABLE
from specctl.export.package.find import Kind, load_found, locate
from specctl.export.package.folder import save_package
from specctl.export.package.load import read_package
from specctl.export.package.manifest import Manifest, read_manifest
from specctl.recipes.schema import DataPart, ExportPart, Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.metrics.metrics import read_log
from specctl.train.run import RunResult
from specctl.train.runs.stages import train_recipe

GATE_PROMPTS = 4


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult(Tabled):
    """A finished run: its recipe, what it left behind, what was warned of."""

    recipe: Recipe
    run: RunResult
    warnings: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.run.out

    @property
    def package(self) -> Path:
        """The drafter with the best measured tau, for `drafter=` of the other functions."""
        return self.run.package or self.run.out / "package"

    @property
    def tau(self) -> float | None:
        return self.run.tau

    @property
    def target(self) -> Path | str:
        """What the drafter is for: the recipe's target, or what the run made of it."""
        return self.recipe.target.name if self.run.target is None else self.run.target

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.package)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(read_log(self.run.out / "metrics.jsonl"))

    def on_suite(self) -> str:
        """What was measured on a public suite, in words; nothing without one."""
        suite = self.run.suite
        return "" if suite is None else f", {suite['tau']:.2f} on {suite['name']}"

    def table(self) -> Table:
        """What the last line of the command says."""
        tau = "not measured" if self.tau is None else f"{self.tau:.2f}"
        rows = [
            ("package", str(self.package)),
            ("tau", f"{tau} (held-out, k={self.recipe.serve.length}){self.on_suite()}"),
            ("steps", self.run.steps),
            ("seconds", f"{self.run.seconds:.1f}"),
            ("parameters", self.manifest.parameters),
            ("sha256", self.manifest.digest[:12]),
        ]
        return Table(("run", str(self.out)), rows, [f"warning: {text}" for text in self.warnings])

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest
        changed = {} if self.run.target is None else {"target": str(self.run.target)}
        others = other_formats(self.recipe.drafter.family, self.recipe.export)
        return {
            "out": str(self.out),
            "package": str(self.package),
            "checkpoint": str(self.run.best_checkpoint or self.out),
            "sha256": manifest.digest,
            "tau": self.tau,
            **({} if self.run.suite is None else {"suite": dict(self.run.suite)}),
            "steps": self.run.steps,
            "seconds": round(self.run.seconds, 1),
            "parameters": manifest.parameters,
            **changed,
            "exports": {name: str(self.out / name) for name in others},
        }


@raises_user_errors
def train(
    target: TargetLike = None,
    recipe: RecipeLike = "distill",
    *,
    out: str | Path | None = None,
    resume: bool = True,
    allow: Sequence[str] = (),
    progress: Progress = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> TrainResult:
    """Train a drafter for a target from a recipe (a name, a YAML file, a mapping or a Recipe), in
    the folder `out` (runs/TARGET-RECIPE), or continue the run that is there.

    `settings` change keys of the recipe: a section as a mapping, `train={"steps": 200}`; a key that
    stands in one section only, `learning_rate=1e-3`, or an option of the family, `layers=2`;
    `data="chats.jsonl"` is data.source, or a list of sources. `allow` names what may differ from
    the run that is continued. SIGINT and SIGTERM save the state and raise Interrupted; the same
    call continues. `command` is what the run's files say made it.
    """
    reporter = as_reporter(progress)
    check_allowed(allow)
    model = in_memory(target)
    made = following_init(recipe_of(recipe, model or target, settings), reporter.warn)
    if model is not None and model.device.type != PartialState().device.type:
        raise IncompatibleError(
            "the target is on another device than training",
            where="target",
            found=str(model.device),
            expected=str(PartialState().device),
            do="give the target's name, or load it on that device",
        )
    folder = run_folder(made.target.name, made.name) if out is None else Path(out)
    check_out(folder)
    check_run(made, folder)
    reporter.say(f"{made.name}: {made.drafter.family} for {made.target.name}, in {folder}")
    words = command or ("specctl", "train-draft", "--recipe", str(folder), "--out", str(folder))
    run = train_and_package(
        reporter, made, folder, command=words, resume=resume, allow=allow, target=model
    )
    return TrainResult(made, run, warnings_of(reporter))


@raises_user_errors
def distill(
    target: TargetLike = None,
    recipe: RecipeLike = "distill",
    *,
    out: str | Path | None = None,
    resume: bool = True,
    allow: Sequence[str] = (),
    progress: Progress = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> TrainResult:
    """Train a small language model of its own on the target's distribution: `train` with a recipe
    of such a family."""
    target = in_memory(target) or target
    made = recipe_of(recipe, target, settings)
    refuse_dependent(made.name, made.drafter.family)
    return train(
        target, made, out=out, resume=resume, allow=allow, progress=progress, command=command
    )


def packaged(drafter: Drafter, target: Target, folder: Path, **about: Any) -> Manifest:
    """Write a package, then read it back and decode with it: what was trained is what is served,
    or GateError."""
    manifest = save_package(drafter, target, folder, **about)
    count = GATE_PROMPTS if target.can_run else 0
    prompts = [prompt.ids for prompt in heldout_prompts(target, GATE_PROMPTS)][:count]
    check_package(folder, target, reference=drafter, prompts=prompts)
    return manifest


def train_and_package(
    reporter: Reporter,
    recipe: Recipe,
    out: Path,
    *,
    command: Sequence[str],
    resume: bool = True,
    allow: Sequence[str] = (),
    target: Target | None = None,
) -> RunResult:
    """Train, and write OUT/package from the checkpoint with the best measured tau; then OUT/FORMAT
    for each further format of the recipe."""
    others = other_formats(recipe.drafter.family, recipe.export)

    new_tokens = recipe.train.tau_tokens

    def package(
        drafter: Drafter, target: Target, folder: Path, acceptance: Mapping[str, Any] | None
    ) -> Manifest:
        manifest = packaged(
            drafter,
            target,
            folder,
            serve=recipe.to_json()["serve"],
            recipe_digest=recipe.digest,
            acceptance=packaged_acceptance(
                acceptance, recipe.data, new_tokens, target, run_words(recipe, target, out)
            ),
            command=command,
        )
        same = ", same acceptance as in training" if target.can_run else ""
        reporter.say(f"package: read back, every tensor equal{same}")
        for form in others:
            export(folder, form, out / form, target)
            reporter.say(f"{out / form}: the drafter as {form}, loaded back and compared")
        return manifest

    return train_recipe(
        recipe,
        out,
        resume=resume,
        reporter=reporter,
        command=command,
        allow=allow,
        package=package,
        load=load_initial,
        target=target,
    )


def load_initial(name: str, target: Target) -> Drafter:
    """The drafter that drafter.init names; of a package, in the very numbers that were saved. It
    may have been made for another target of the same tokenizer: training makes it this one's."""
    found = locate(name)
    if found.kind is Kind.PACKAGE and found.folder is not None:
        allow = sorted({*ALLOWABLE} - {"tokenizer"})
        return read_package(found.folder, target, allow, widened=True)
    return load_found(found, target, ("padding",), widened=True)


def other_formats(family: str, part: ExportPart) -> list[str]:
    """The formats of the recipe beside the package; one that cannot hold the family, or that needs
    what is not installed here, is refused before anything is trained."""
    wanted: list[str] = [name for name in part.formats if name != "specctl"]
    for name in wanted:
        if not formats()[name].holds(family):
            fits = [n for n, form in formats().working().items() if form.holds(family)]
            raise RecipeError(
                f"format {name} cannot hold a drafter of family {family}",
                where="export.formats",
                found=name,
                expected="one of " + ", ".join(fits),
                do="--set export.formats=[specctl]",
            )
        formats()[name].ready(None)
    return wanted


def packaged_acceptance(
    measured: Mapping[str, Any] | None,
    data: DataPart,
    new_tokens: int,
    target: Target,
    words: Sequence[str],
) -> dict[str, Any] | None:
    """What the training loop measured on prompts of the data, `new_tokens` behind each, as a
    package records it; `words` run it again."""
    if measured is None:
        return None
    found = Measurement(
        tau=measured["tau"],
        accepted_per_position=measured["accepted_per_position"],
        num_prompts=measured["prompts"],
        new_tokens=new_tokens,
        batch=measured["prompts"],
        is_estimate=measured.get("is_estimate", False),
    )
    return found.record_of_run(data.source, target, words)
