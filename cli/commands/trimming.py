"""Trimming a loaded drafter from the command line: what is counted, measured and written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.options.loading import LoadedDraft, packaged_serve
from specctl.cli.options.measurement import Measurement
from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.export.package.manifest import Manifest
    from specctl.runtime.policies import Policy
    from specctl.runtime.target.target import Target
    from specctl.train.data.heldout import HeldoutPrompt
    from specctl.train.data.records import Sample
    from specctl.train.vocab.candidates import Material, TrimSettings
    from specctl.train.vocab.report import TrimReport
    from specctl.train.vocab.selectors import Selector

SHARES = (1, 4, 3)  # of the prompts: tau is measured, sizes are predicted, tokens are counted on


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
    for text in done.report.warnings(job.settings.min_coverage):
        console.warn(text)
    manifest = _package(job, done.drafter, done.policy, material.prompts, out / "package")
    save_report(done.report, out)
    return done.report, manifest


def gathered(job: TrimJob) -> Material:
    """Prompts split three ways, the target's answers to one part, and the selector's counts."""
    from specctl.train.data.heldout import heldout_prompts
    from specctl.train.vocab.candidates import Material
    from specctl.train.vocab.chains import write_answers
    from specctl.train.vocab.coverage import total_counts

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
    job: TrimJob, drafter: Drafter, policy: Policy, prompts: Sequence[HeldoutPrompt], folder: Path
) -> Manifest:
    """Write the trimmed drafter, with tau measured once more as it will be served."""
    from specctl.cli.options.training import packaged
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling.sampling import Sampling

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
    serve = packaged_serve(job.draft.name)
    if policy != job.draft.policy:
        serve["length"] = policy.depth
    return packaged(
        drafter,
        job.target,
        folder,
        serve=serve,
        recipe_digest=_recipe_digest(job.draft.name),
        acceptance=measured.record(job.target),
        command=["specctl", *sys.argv[1:]],
    )


def _recipe_digest(draft: str) -> str:
    """The recipe of the package that is trimmed; empty for a foreign model."""
    from specctl.export.package.manifest import MANIFEST, read_manifest

    folder = Path(draft)
    return read_manifest(folder).recipe_digest if (folder / MANIFEST).is_file() else ""
