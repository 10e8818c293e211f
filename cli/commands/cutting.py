"""What `specctl prune` does: cut, package, report, heal; once, or halfway first."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.options.training import (
    finish,
    load_initial,
    packaged_acceptance,
    train_and_package,
)
from specctl.core.errors import FileError

if TYPE_CHECKING:
    from specctl.core.spec import ModelSpec
    from specctl.drafters.small_lm import SmallLm
    from specctl.models.llama import LlamaShape
    from specctl.recipes.schema import Recipe
    from specctl.runtime.target.target import Target
    from specctl.train.prune.cut import Wanted
    from specctl.train.prune.run import CutDrafter, CutReport

REPORT = "prune.json"
SCORE_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class PruneJob:
    """A cut to be made: the recipe that heals it, what is wanted of a target's shape, the folder,
    the steps. `request` is what decides the cut."""

    recipe: Recipe
    wanted: Callable[[LlamaShape | ModelSpec], Wanted]
    request: Mapping[str, Any]
    out: Path
    steps: int
    two_step: bool = False

    def data_recipe(self) -> Recipe:
        """The recipe of the text on which scores are measured: that of the healing, else little."""
        if self.steps:
            return self.recipe
        data = self.recipe.data
        few = {"prompts": min(data.prompts, SCORE_PROMPTS), "text_tokens": 0}
        return self.recipe.model_copy(update={"data": data.model_copy(update=few)})


def cut_and_heal(console: Console, job: PruneJob) -> None:
    """Cut once, or halfway first; train after each cut; say what came of it."""
    from specctl.train.prune.run import heal_recipe

    half = job.out / "half"
    if job.two_step:
        drafter = _made(console, job, half, half=True, source=None)
        first = heal_recipe(job.recipe, drafter, str(half / "cut"), max(1, job.steps // 2))
        train_and_package(console, first, half)
        if not (job.out / "data").exists():
            shutil.copytree(half / "data", job.out / "data")
    source = half / "package" if job.two_step else None
    drafter = _made(console, job, job.out, half=False, source=source)
    if job.steps == 0:
        _finish_unhealed(console, job)
        return
    steps = job.steps - job.steps // 2 if job.two_step else job.steps
    recipe = heal_recipe(job.recipe, drafter, str(job.out / "cut"), max(1, steps))
    result = train_and_package(console, recipe, job.out)
    finish(console, recipe, result, more={"prune": _report_of(job.out)})


def _made(
    console: Console, job: PruneJob, folder: Path, half: bool, source: Path | None
) -> SmallLm:
    """The cut of this stage in FOLDER/cut: made, or the one that is already there."""
    from specctl.drafters.small_lm import SmallLm
    from specctl.train.saving.lock import locked

    target = recipe_target(console, job.recipe)
    with locked(folder, console):
        if not (folder / REPORT).exists():
            _refuse_other_run(folder)
            _make(console, job, target, folder, half, source)
    if _report_of(folder)["request"] != _as_json(job.request):
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


def recipe_target(console: Console, recipe: Recipe) -> Target:
    from specctl.cli.options.target_choice import TargetChoice

    part = recipe.target
    choice = TargetChoice(part.name, part.revision, part.dtype, inflate=part.inflate)
    return choice.load(console)


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
    console: Console, job: PruneJob, target: Target, folder: Path, half: bool, source: Path | None
) -> None:
    """Score, cut, package and report one stage."""
    from specctl.drafters.small_lm import SmallLm
    from specctl.train.data.prepare import prepare
    from specctl.train.prune.cut import check_cut, prunable
    from specctl.train.prune.run import cut_drafter, halfway, whole_target

    shape = prunable(target).module.shape
    wanted = job.wanted(shape)
    check_cut(wanted, shape)  # before the target writes its answers
    if half:
        wanted = halfway(wanted, shape)
    origin = whole_target(target) if source is None else load_initial(str(source), target)
    assert isinstance(origin, SmallLm)
    console.say(f"scoring the layers of {target.name} ({wanted.importance})")
    data = prepare(job.data_recipe(), target, folder, console)
    made = cut_drafter(origin, wanted, job.recipe, target, data)
    _save(job, target, folder / "cut", made)
    _show(console, made.report)
    body = {
        "request": _as_json(job.request),
        "importance": wanted.importance,
        **made.report.to_json(),
    }
    (folder / REPORT).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _save(job: PruneJob, target: Target, folder: Path, made: CutDrafter) -> None:
    from specctl.export.package.check import check_package
    from specctl.export.package.folder import save_package
    from specctl.export.package.origin import redacted

    command = redacted(["specctl", *sys.argv[1:]])
    again = [*command, *([] if "--target" in command else ["--target", target.name])]
    measured = made.report.measured.to_json()
    save_package(
        made.drafter,
        target,
        folder,
        serve=job.recipe.to_json()["serve"],
        recipe_digest=job.recipe.digest,
        acceptance=packaged_acceptance(measured, job.recipe, target, again),
        command=command,
    )
    check_package(folder, target, reference=made.drafter)


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


def _finish_unhealed(console: Console, job: PruneJob) -> None:
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
