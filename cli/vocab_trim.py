"""`specctl vocab-trim`: cut a drafter's vocabulary to the tokens that pay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Allow, Out
from specctl.cli.loading import DraftChoice, LoadedDraft, packaged_serve
from specctl.cli.outputs import check_folder
from specctl.cli.target_choice import TargetChoice
from specctl.recipes.errors import RecipeError, SpecctlError

if TYPE_CHECKING:
    from specctl.drafters.parts.base import Drafter
    from specctl.export.manifest import Manifest
    from specctl.recipes.schema import VocabPart
    from specctl.runtime.policies import Policy
    from specctl.runtime.target import Target
    from specctl.train.data.heldout import Prompt
    from specctl.train.data.sources import Sample
    from specctl.train.vocab.report import TrimReport
    from specctl.train.vocab.selectors import Selector
    from specctl.train.vocab.settings import Material, TrimSettings

SHARES = (1, 4, 3)  # of the prompts: tau is measured, sizes are predicted, tokens are counted on


def vocab_trim(
    console: Console,
    target: TargetChoice,
    draft: Annotated[str, typer.Option("--draft", "-d", help="Package (or model folder) to trim.")],
    out: Out,
    size: Annotated[
        str | None,
        typer.Option(help="Tokens to keep: a number, 8k, or auto (what pays most here, default)."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            help="What is counted: vocab-trim (what the target writes, default), fr-spec (raw "
            "text), drafted or accepted (what the drafter proposes; what of it is accepted)."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="What is counted instead of the run's data beside DRAFT: prompts, or for fr-spec "
            "raw text (default: this machine's Python sources).",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Your prompts, text or JSONL with a domain field; else the held-out prompts.",
        ),
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Least share of tokens kept, with --size auto (0.95)."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="With --size auto: exhaustive (every size, default), or tpe (size, draft length "
            "and domain weights together; needs optuna)."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Choices that --search tpe looks at (60).")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Recipe whose vocab section is used, e.g. fr-spec."),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts on which tau is measured.")
    ] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="At which sizes are predicted and measured.")
    ] = 0.0,
    allow: Allow = None,
) -> None:
    """Trim the vocabulary of any drafter with an LM head. Verification stays lossless.

    Shows coverage, acceptance, tau, MBSU and speed-up by domain before and after, and which
    prompts lost; OUT gets the trimmed package, trim.json and (with matplotlib) trim.png beside it.

    Examples:

      specctl vocab-trim --draft runs/quickstart/package --size auto --out runs/trimmed
      specctl vocab-trim --draft runs/distill/package --recipe fr-spec --size 2k --out runs/fr-spec
      specctl vocab-trim --draft runs/distill/package --search tpe --trials 80 --out runs/searched
    """
    part = _vocab_part(recipe, selector, min_coverage, search, trials)
    wanted = parse_size(size) if size is not None else part.size or "auto"
    chosen = _selector(part.selector)
    if part.search == "tpe" and wanted != "auto":
        raise RecipeError(
            "--search tpe chooses the size itself",
            where="--size",
            found=str(wanted),
            expected="--size auto",
            do="leave --size out, or --search exhaustive",
        )
    check_folder(out)
    from specctl.train.data.sources import check_source
    from specctl.train.vocab.settings import TrimSettings

    settings = TrimSettings(
        wanted, part.min_coverage, max_new_tokens, temperature,
        search=part.search, trials=part.trials,
    )  # fmt: skip
    if data is not None:
        check_source(str(data), "auto")
    model = target.load(console)
    if size is not None and wanted != "auto" and not 2 <= wanted <= model.spec.vocab_size:
        raise _bad_size(size, f"2 to {model.spec.vocab_size:,} tokens, or auto")
    loaded = DraftChoice(draft, allow=[*(allow or ()), "padding"]).load(model)  # it is cut to fit
    job = TrimJob(model, loaded, settings, chosen, data, prompts, num_prompts)
    report, manifest = trim_and_package(console, job, out)
    console.done(
        {
            "out": str(out),
            "package": str(out / "package"),
            "report": report.to_json(),
            "sha256": manifest.digest,
        },
        next=[
            f"specctl bench --target {target.name} --draft {draft} --draft {out / 'package'}",
            f"specctl verify {out / 'package'} --target {target.name} --level lossless",
        ],
    )


def _vocab_part(
    recipe: str | None,
    selector: str | None,
    min_coverage: float | None,
    search: str | None,
    trials: int | None,
) -> VocabPart:
    """Flags over the recipe's vocab section over the defaults."""
    from specctl.recipes.load import load_recipe
    from specctl.recipes.schema import Recipe

    base = Recipe().vocab if recipe is None else load_recipe(recipe).vocab
    if search not in (None, "exhaustive", "tpe"):
        raise RecipeError(
            f"unknown search {search!r}",
            where="--search",
            found=str(search),
            expected="exhaustive or tpe",
            do="--search exhaustive",
        )
    given = {
        "selector": selector, "min_coverage": min_coverage, "search": search, "trials": trials,
    }  # fmt: skip
    return base.model_copy(update={k: v for k, v in given.items() if v is not None})


def _selector(name: str) -> Selector:
    from specctl.train.vocab.selectors import selector

    return selector(name)


@dataclass(frozen=True, slots=True)
class TrimJob:
    """A drafter and how it is to be trimmed."""

    target: Target
    draft: LoadedDraft
    settings: TrimSettings
    selector: Selector
    data: Path | None = None
    prompts: Path | None = None
    num_prompts: int = 12


def trim_and_package(console: Console, job: TrimJob, out: Path) -> tuple[TrimReport, Manifest]:
    """Trim, show the report, write OUT/package and OUT/trim.json."""
    from specctl.train.vocab.trim import save_report, trim

    drafter, policy = job.draft.drafter, job.draft.policy
    assert drafter is not None, "DraftChoice loads a drafter for any name but none"
    assert policy is not None, "a drafter comes with a policy"
    if drafter.module is None:
        raise SpecctlError(
            f"{job.draft.name} has no LM head to trim",
            where="--draft",
            found=drafter.family,
            expected="a trained drafter",
            do="specctl train-draft --recipe distill, then trim its package",
        )
    console.say(f"counting tokens ({job.selector.name})")
    material = gathered(job)
    done = trim(drafter, policy, job.target, material, job.settings, console=console)
    for line in done.report.lines():
        console.out(line)
    console.out(done.report.plot())
    manifest = _package(job, done.drafter, done.policy, material.prompts, out / "package")
    save_report(done.report, out)
    return done.report, manifest


def gathered(job: TrimJob) -> Material:
    """Prompts split three ways, the target's answers to one part, and the selector's counts."""
    from specctl.train.data.heldout import heldout_prompts
    from specctl.train.vocab.chains import write_answers
    from specctl.train.vocab.coverage import total_counts
    from specctl.train.vocab.settings import Material

    size, settings = job.target.spec.vocab_size, job.settings
    pool = heldout_prompts(job.target, sum(SHARES) * job.num_prompts, path=job.prompts)
    measured, predicted, counted = split(pool)
    answers = write_answers(job.target, predicted, settings.new_tokens, settings.temperature)
    heldout = total_counts(((a.tokens, a.domain) for a in answers), size)
    counts = total_counts(job.selector.count(_evidence(job, counted)), size)
    return Material(job.selector.name, counts, heldout, answers, measured)


def split(pool: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """In the proportions of SHARES, each at least one; of fewer than three prompts, all for all."""
    if len(pool) < len(SHARES):
        return list(pool), list(pool), list(pool)
    first = max(1, len(pool) * SHARES[0] // sum(SHARES))
    second = max(1, len(pool) * SHARES[1] // sum(SHARES))
    return list(pool[:first]), list(pool[first : first + second]), list(pool[first + second :])


def _evidence(job: TrimJob, counted: list[Prompt]) -> Any:
    """What the selector may count."""
    from specctl.train.data.heldout import heldout_prompts
    from specctl.train.data.rows import TokenData
    from specctl.train.vocab.selectors import Evidence

    run, data = Path(job.draft.name).resolve().parent, None
    if job.data is None and (run / "data" / "manifest.json").is_file():
        data = TokenData.open(run / "data")
    if job.data is not None and job.selector.name != "fr-spec":
        counted = heldout_prompts(job.target, 10_000, path=job.data)
    samples = partial(_samples, str(job.data) if job.data is not None else "corpus")
    return Evidence(job.target, counted, data, samples, job.draft.drafter, job.draft.policy)


def _samples(source: str) -> Iterable[Sample]:
    from specctl.train.data.sources import Defects, read_samples

    return read_samples(source, "auto", "train", 0, Defects())


def _package(
    job: TrimJob, drafter: Drafter, policy: Policy, prompts: Sequence[Prompt], folder: Path
) -> Manifest:
    """Write the trimmed drafter, with tau measured once more as it will be served."""
    from specctl.cli.training import packaged
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling import Sampling

    settings = job.settings
    made = generate(
        job.target,
        [p.ids for p in prompts],
        drafter=drafter,
        sampling=Sampling(max_new_tokens=settings.new_tokens),
        policy=policy,
        rule=job.draft.rule,
    )
    acceptance = {
        "tau": made.stats.tau,
        "alpha": list(made.stats.accepted_per_position),
        "command": f"specctl vocab-trim --draft {job.draft.name} --size {settings.size}",
        "data": "held-out prompts",
        "temperature": 0.0,
        "prompts": len(prompts),
        "new_tokens": settings.new_tokens,
    }
    serve = packaged_serve(job.draft.name)
    if policy != job.draft.policy:
        serve["length"] = policy.depth
    return packaged(
        drafter,
        job.target,
        folder,
        serve=serve,
        recipe_digest=_recipe_digest(job.draft.name),
        acceptance=acceptance,
        command=["specctl", *sys.argv[1:]],
    )


def _recipe_digest(draft: str) -> str:
    """The recipe of the package that is trimmed; empty for a foreign model."""
    from specctl.export.manifest import MANIFEST, read_manifest

    folder = Path(draft)
    return read_manifest(folder).recipe_digest if (folder / MANIFEST).is_file() else ""


def parse_size(text: str) -> int | Literal["auto"]:
    """`auto`, `2048`, `2k` (2,000 as in "32k")."""
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"(\d+)(k?)", text.replace(",", "").lower())
    if match is None or int(match[1]) == 0:
        raise _bad_size(text, "a number of tokens such as 2048 or 32k, or auto")
    return int(match[1]) * (1000 if match[2] else 1)


def _bad_size(text: str, expected: str) -> RecipeError:
    return RecipeError(
        f"the size {text!r} is no size of a vocabulary",
        where="--size",
        found=text,
        expected=expected,
        do="--size auto",
    )
