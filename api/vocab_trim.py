"""vocab_trim(): cut a drafter's vocabulary to the tokens that pay, and package what is left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from specctl.api.arguments.attention_only import attention_only
from specctl.api.arguments.drafting import DrafterLike, LoadedDraft, load_draft
from specctl.api.arguments.outputs import check_folder
from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.api.measured.measurement import Measurement
from specctl.api.train import packaged
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.messages.sizes import size_text
from specctl.core.messages.table import Table, Tabled
from specctl.export.package.find import Kind, load_found, locate
from specctl.export.package.manifest import MANIFEST, Manifest, read_manifest
from specctl.recipes.built_in import as_path_word
from specctl.recipes.drafter_names import drafter_names
from specctl.recipes.load import load_recipe
from specctl.recipes.published import path_named
from specctl.recipes.schema import Recipe, VocabPart
from specctl.runtime.generate import generate
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.policies import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt, heldout_prompts
from specctl.train.data.records.records import Sample, without_images
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.self_source import uses_self
from specctl.train.data.sources.sources import check_source, read_samples, unwritten
from specctl.train.vocab.candidates import Material, TrimSettings
from specctl.train.vocab.chains import write_answers
from specctl.train.vocab.coverage import total_counts
from specctl.train.vocab.report import TrimReport
from specctl.train.vocab.selectors import Evidence, Selector
from specctl.train.vocab.selectors import selector as selector_named
from specctl.train.vocab.trim import save_report, trim

SHARES = (1, 4, 3)  # of the prompts: tau is measured, sizes are predicted, tokens are counted on


@dataclass(frozen=True, slots=True)
class TrimJob:
    """A drafter and how it is to be trimmed."""

    target: Target
    draft: LoadedDraft
    settings: TrimSettings
    selector: Selector
    data: tuple[str, ...] = ()
    prompts: Path | None = None
    num_prompts: int = 12
    command: Sequence[str] = ()


@dataclass(frozen=True, slots=True, repr=False)
class VocabTrimResult(Tabled):
    """What trimming did: OUT/package, OUT/trim.json and the report in them."""

    out: Path
    report: TrimReport
    manifest: Manifest
    warnings: tuple[str, ...] = ()

    @property
    def package(self) -> Path:
        return self.out / "package"

    def __str__(self) -> str:
        return "\n".join(self.report.lines())

    def table(self) -> Table:
        """Before and after."""
        before, after = self.report.before.measured, self.report.after.measured
        moved = [side.moved.draft_bytes for side in (self.report.before, self.report.after)]
        rows = [
            ("ids", self.report.size_before, self.report.size),
            ("tau", f"{before.tau:.3f}", f"{after.tau:.3f}"),
            ("alpha", f"{before.alpha:.3f}", f"{after.alpha:.3f}"),
            ("tokens/s", f"{before.tokens_per_second:.1f}", f"{after.tokens_per_second:.1f}"),
            ("weights of a draft call", *map(size_text, moved)),
        ]
        notes = [f"coverage {self.report.coverage:.2%}; {self.package}"]
        notes += [f"warning: {text}" for text in self.warnings]
        return Table(("vocabulary", "before", "after"), rows, notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "package": str(self.package),
            "report": self.report.to_json(),
            "sha256": self.manifest.digest,
        }


@raises_user_errors
def vocab_trim(
    drafter: DrafterLike,
    out: str | Path,
    *,
    target: TargetLike = None,
    size: int | str | None = None,
    selector: str | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    prompts: str | Path | None = None,
    min_coverage: float | None = None,
    search: str | None = None,
    trials: int | None = None,
    recipe: str | None = None,
    num_prompts: int = 12,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    allow: Sequence[str] = (),
    progress: Progress = None,
    command: Sequence[str] = (),
) -> VocabTrimResult:
    """Trim the vocabulary of a drafter with an LM head; OUT/package is the trimmed one.

    `size`: ids to keep, as a number, "8k" or "auto" (what pays most here, the default). `selector`:
    what is counted, "vocab-trim" (what the target writes), "fr-spec" (raw text), "drafted" or
    "accepted"; `data`, one or several files, is counted instead of the run's data beside the
    drafter. `prompts` is a file of yours, else the held-out prompts. `recipe`: whose vocab section
    is used where these are None.
    """
    reporter, out = as_reporter(progress), Path(out)
    settings, chosen = trim_settings(
        size=size,
        selector=selector,
        data=data,
        min_coverage=min_coverage,
        search=search,
        trials=trials,
        recipe=recipe,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )
    check_folder(out)
    model = target_or_own(target, drafter, wanted=attention_only([drafter]))
    wanted = settings.size
    if wanted != "auto" and size is not None and not 2 <= wanted <= model.spec.vocab_size:
        raise _bad_size(str(size), f"2 to {model.spec.vocab_size:,} tokens, or auto")
    draft = _loaded(drafter, model, [*allow, "padding"])  # it is cut to fit
    words = command or ("specctl", "vocab-trim", "--draft", draft.name, "--out", str(out))
    path = None if prompts is None else Path(prompts)
    job = TrimJob(model, draft, settings, chosen, _names(data), path, num_prompts, words)
    return trim_and_package(reporter, job, out)


def _loaded(drafter: DrafterLike, target: Target, allow: Sequence[str]) -> LoadedDraft:
    """The drafter, which keeps the packing of a GGUF file. One of another tokenizer is refused."""
    if isinstance(drafter, (str, Path)) and len(drafter_names(name := as_path_word(drafter))) == 1:
        found = locate(name)
        if found.kind is Kind.GGUF:
            return replace(load_draft(load_found(found, target, allow), target), name=name)
    return load_draft(drafter, target, allow=allow)


def trim_settings(
    *,
    size: int | str | None,
    selector: str | None,
    data: str | Path | Sequence[str | Path] | None,
    min_coverage: float | None,
    search: str | None,
    trials: int | None,
    recipe: str | None,
    max_new_tokens: int,
    temperature: float,
) -> tuple[TrimSettings, Selector]:
    """The given settings over the recipe's vocab section over the defaults, checked before anything
    is loaded."""
    part = _vocab_part(recipe, selector, min_coverage, search, trials)
    wanted = parse_size(str(size)) if size is not None else part.size or "auto"
    chosen = selector_named(part.selector)
    if part.search == "tpe" and wanted != "auto":
        raise RecipeError(
            "--search tpe chooses the size itself",
            where="--size",
            found=str(wanted),
            expected="--size auto",
            do="leave --size out, or --search exhaustive",
        )
    settings = TrimSettings(
        wanted, part.min_coverage, max_new_tokens, temperature,
        search=part.search, trials=part.trials,
    )  # fmt: skip
    if uses_self(_names(data)):
        raise unwritten("--data")
    check_source(_names(data), "auto")
    return settings, chosen


def _names(data: str | Path | Sequence[str | Path] | None) -> tuple[str, ...]:
    """The names of the data that are counted."""
    given = () if data is None else (data,) if isinstance(data, (str, Path)) else data
    return tuple(str(one) for one in given)


def _vocab_part(
    recipe: str | None,
    selector: str | None,
    min_coverage: float | None,
    search: str | None,
    trials: int | None,
) -> VocabPart:
    """Flags over the recipe's vocab section over the defaults."""
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


def trim_and_package(reporter: Reporter, job: TrimJob, out: Path) -> VocabTrimResult:
    """Trim, write OUT/package and OUT/trim.json."""
    drafter, policy = job.draft.drafter, job.draft.policy
    if drafter is None or policy is None or drafter.module is None:
        raise SpecctlError(
            f"{job.draft.name} has no LM head to trim",
            where="--draft",
            found="no drafter" if drafter is None else drafter.family,
            expected="a trained drafter",
            do="specctl train-draft --recipe distill, then trim its package",
        )
    reporter.say(f"counting tokens ({job.selector.name})")
    material = gathered(job)
    done = trim(drafter, policy, job.target, material, job.settings, console=reporter)
    warned = done.report.warnings(job.settings.min_coverage)
    for text in warned:
        reporter.warn(text)
    manifest = _package(job, done.drafter, done.policy, material.prompts, out / "package")
    save_report(done.report, out)
    return VocabTrimResult(out, done.report, manifest, tuple(warned))


def gathered(job: TrimJob) -> Material:
    """Prompts split three ways, the target's answers to one part, and the selector's counts."""
    size, settings = job.target.spec.vocab_size, job.settings
    pool = heldout_prompts(job.target, sum(SHARES) * job.num_prompts, path=job.prompts)
    measured, predicted, counted = split(pool)
    answers = write_answers(job.target, predicted, settings.new_tokens, settings.temperature)
    heldout = total_counts(((a.tokens, a.domain) for a in answers), size)
    counts = total_counts(job.selector.count(_evidence(job, counted)), size)
    return Material(job.selector.name, counts, heldout, answers, measured)


def split(
    pool: Sequence[HeldoutPrompt],
) -> tuple[list[HeldoutPrompt], list[HeldoutPrompt], list[HeldoutPrompt]]:
    """In the proportions of SHARES, each at least one; of fewer than three prompts, all for all."""
    if len(pool) < len(SHARES):
        return list(pool), list(pool), list(pool)
    first = max(1, len(pool) * SHARES[0] // sum(SHARES))
    second = max(1, len(pool) * SHARES[1] // sum(SHARES))
    return list(pool[:first]), list(pool[first : first + second]), list(pool[first + second :])


def _evidence(job: TrimJob, counted: list[HeldoutPrompt]) -> Any:
    """What the selector may count."""
    run, data = Path(job.draft.name).resolve().parent, None
    if not job.data and (run / "data" / "manifest.json").is_file():
        data = TokenData.open(run / "data")
    if job.data and job.selector.name != "fr-spec":
        counted = [p for name in job.data for p in heldout_prompts(job.target, 10_000, path=name)]
    samples = partial(_samples, job.data or ("corpus",))
    return Evidence(job.target, counted, data, samples, job.draft.drafter, job.draft.policy)


def _samples(source: Sequence[str]) -> Iterable[Sample]:
    found = read_samples(source, "auto", "train", 0, Defects())
    return map(without_images, found)


def _package(
    job: TrimJob, drafter: Drafter, policy: Policy, prompts: Sequence[HeldoutPrompt], folder: Path
) -> Manifest:
    """Write the trimmed drafter, with tau measured once more as it will be served."""
    settings = job.settings
    made = generate(
        job.target,
        [p.ids for p in prompts],
        drafter=drafter,
        sampling=Sampling(max_new_tokens=settings.new_tokens),
        policy=policy,
        rule=job.draft.rule,
    )
    measured = Measurement(
        tau=made.stats.tau,
        accepted_per_position=made.stats.accepted_per_position,
        num_prompts=len(prompts),
        new_tokens=settings.new_tokens,
        prompts=job.prompts,
    )
    assert job.draft.drafter is not None
    serve = dict(job.draft.drafter.serve)
    if policy != job.draft.policy:
        serve["length"] = policy.depth
    return packaged(
        drafter,
        job.target,
        folder,
        serve=serve,
        recipe_digest=_recipe_digest(job.draft.name),
        acceptance=measured.record(job.target),
        command=job.command,
    )


def _recipe_digest(draft: str) -> str:
    """The recipe of the package that is trimmed; empty for a foreign model."""
    folder = path_named(draft)
    return read_manifest(folder).recipe_digest if (folder / MANIFEST).is_file() else ""
