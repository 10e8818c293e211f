"""`specctl quickstart`: from nothing to a measured, lossless speed-up on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Sets
from specctl.cli.progress import duration

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.runtime.generate import Generated
    from specctl.runtime.target import Target

FULL_MINUTES = 10.0  # the budget for which the recipe's own sizes are meant, on two CPU cores
LEAST = {"data.prompts": 32, "train.steps": 40}


def quickstart(
    console: Console,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Run folder; an interrupted run continues there.")
    ] = Path("runs/quickstart"),
    target: Annotated[
        str, typer.Option("--target", "-t", help="tiny (embedded), or another target.")
    ] = "tiny",
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="A recipe's name or a YAML file.")
    ] = "quickstart",
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Rough time budget; scales data and steps.")
    ] = FULL_MINUTES,
    set_: Sets = None,
) -> None:
    """Train a drafter for the embedded target, trim it, prove it lossless, and measure it.

    About ten minutes on two CPU cores, no download. Stopped half-way, the same command continues.

    Examples:

      specctl quickstart
      specctl quickstart --minutes 3 --out runs/small
    """
    started = time.monotonic()
    loaded = scaled(recipe, target, minutes, tuple(set_ or ()))
    from specctl.cli.loading import TargetChoice

    console.heading(f"1/5 target {target}")
    model = TargetChoice(target, loaded.target.revision, loaded.target.dtype).load(console)
    spec = model.spec
    console.say(
        f"{spec.model_type}, {spec.num_layers} layers, width {spec.hidden_size}, "
        f"vocabulary {spec.vocab_size:,}"
    )
    console.heading("2/5 data written by the target, drafter trained on it")
    run = _train(console, loaded, out)
    console.heading("3/5 vocabulary trimmed")
    package = _trim(console, model, out)
    console.heading("4/5 lossless?")
    proof = _prove(console, model, package)
    console.heading("5/5 plain against speculative")
    report = _compare(console, model, package, proof)
    seconds = time.monotonic() - started
    console.say(f"\ndone in {duration(seconds)}; everything is in {out}")
    result = {"out": str(out), "package": str(package), "seconds": round(seconds, 1)}
    result |= {"tau_trained": run, **report}
    (out / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")
    chosen = f"--target {target} --draft {package}"
    console.done(
        result,
        next=[
            f'specctl generate {chosen} --stats "def main("',
            f"specctl bench {chosen} --draft prompt-lookup --inflate 300m",
            "specctl train-draft --target tiny --recipe eagle3   (the same with an EAGLE-3 head)",
        ],
    )


def scaled(recipe: str, target: str, minutes: float, sets: tuple[str, ...]) -> Recipe:
    """The recipe with data and steps in proportion to the budget (never less than a minimum)."""
    from specctl.recipes.load import load_recipe

    base = load_recipe(recipe, target=target)
    share = min(1.0, minutes / FULL_MINUTES)
    flags: dict[str, Any] = {
        "data.prompts": max(LEAST["data.prompts"], round(base.data.prompts * share)),
        "train.steps": max(LEAST["train.steps"], round(base.train.steps * share)),
        "data.text_tokens": round(base.data.text_tokens * share),
    }
    flags["train.save_every"] = max(10, round(base.train.save_every * share))
    flags["train.tau_every"] = max(10, round(base.train.tau_every * share))
    # Trimming is a step of its own here, so that its effect can be seen.
    flags["vocab.size"] = None
    if share == 1.0:
        flags = {"vocab.size": None}
    return load_recipe(recipe, sets, target=target, flags=flags)


def _train(console: Console, recipe: Recipe, out: Path) -> float | None:
    from specctl.cli.training import train_and_package

    result = train_and_package(console, recipe, out)
    console.say(f"trained {result.steps:,} steps in {duration(result.seconds)}, tau {result.tau}")
    return result.tau


def _trim(console: Console, model: Target, out: Path) -> Path:
    """OUT/trimmed/package; made once, kept when the run it came from is the same."""
    from specctl.cli.loading import DraftChoice
    from specctl.cli.vocab_trim import TrimJob, trim_and_package
    from specctl.export.manifest import check_files

    source, folder = out / "package", out / "trimmed"
    mark = folder / "of.json"
    digest = check_files(source).digest
    if mark.is_file() and json.loads(mark.read_text()).get("digest") == digest:
        console.say("trimmed before; kept")
        return folder / "package"
    draft = DraftChoice(str(source)).load(model)
    job = TrimJob(model, draft, "auto", "target", None, 0.95, 12, 48)
    trim_and_package(console, job, folder)
    mark.write_text(json.dumps({"digest": digest}))
    return folder / "package"


def _prove(console: Console, model: Target, package: Path) -> bool:
    from specctl.cli.loading import DraftChoice
    from specctl.recipes.errors import GateError
    from specctl.runtime.prove import verify

    draft = DraftChoice(str(package)).load(model)
    assert draft.drafter is not None, "a package holds a drafter"
    proof = verify(model, draft.drafter, policy=draft.policy, rule=draft.rule, reporter=console)
    for line in proof.lines():
        if not line.startswith("warning:"):
            console.say(line)
    if not proof.passed:
        raise GateError(
            "the drafter is not lossless",
            where=str(package),
            found="a failed check above",
            expected="every check passed",
            do=f"report it with the output of `specctl verify {package} --json`",
        )
    return proof.passed


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts decoded plainly and with the drafter."""

    setting: str
    plain: Generated
    fast: Generated

    @property
    def speedup(self) -> float:
        return self.fast.stats.tokens_per_second / max(self.plain.stats.tokens_per_second, 1e-9)

    @property
    def identical(self) -> bool | None:
        if self.setting != "greedy":
            return None
        pairs = zip(self.plain.outputs, self.fast.outputs, strict=True)
        return all(a.token_ids == b.token_ids for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "plain": self.plain.stats.to_json(),
            "speculative": self.fast.stats.to_json(),
            "speedup": round(self.speedup, 3),
            "identical": self.identical,
        }


def _compare(console: Console, model: Target, package: Path, proof: bool) -> dict[str, Any]:
    """Held-out prompts, greedy and at T = 0.8, plain and speculative."""
    from specctl.cli.loading import DraftChoice
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling import Sampling
    from specctl.train.heldout import heldout_prompts

    draft = DraftChoice(str(package)).load(model)
    prompts = [p.ids for p in heldout_prompts(model, 12)]
    pairs = []
    with console.task("compare", 4, "runs") as advance:
        for setting, heat in (("greedy", 0.0), ("T=0.8", 0.8)):
            sampling = Sampling(temperature=heat, max_new_tokens=64)
            generate(model, prompts[:1], sampling=sampling)
            plain = generate(model, prompts, sampling=sampling)
            advance(1, f"{setting} plain")
            fast = generate(
                model,
                prompts,
                drafter=draft.drafter,
                sampling=sampling,
                policy=draft.policy,
                rule=draft.rule,
            )
            advance(1, f"{setting} speculative")
            pairs.append(Pair(setting, plain, fast))
    _show(console, pairs)
    console.out(f"lossless check {'passed' if proof else 'FAILED'}")
    return {"lossless": proof, "comparisons": [pair.to_json() for pair in pairs]}


def _show(console: Console, pairs: list[Pair]) -> None:
    columns = (
        "sampling", "tau", "accepted per position", "plain tokens/s", "specctl tokens/s",
        "speed-up", "identical", "repetition",
    )  # fmt: skip
    rows = [
        (
            pair.setting,
            f"{pair.fast.stats.tau:.2f}",
            " ".join(f"{share:.2f}" for share in pair.fast.stats.accepted_per_position),
            f"{pair.plain.stats.tokens_per_second:.0f}",
            f"{pair.fast.stats.tokens_per_second:.0f}",
            f"{pair.speedup:.2f}",
            pair.identical,
            f"{pair.fast.stats.repetition_rate:.2f}",
        )
        for pair in pairs
    ]
    console.table(columns, rows)
