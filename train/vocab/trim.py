"""Trim a drafter's vocabulary: keep the output rows that the target's own words need.

Nothing is trained and nothing is lost: the draft distribution q becomes the softmax over the kept
rows, zero elsewhere, and verification uses exactly that q, so that the output distribution stays
the target's (VocabTrim, arXiv 2506.22694; FR-Spec, arXiv 2502.14856). What it costs is acceptance
on the cut tokens; what it saves is the draft head's bytes. A selector ranks the ids; the size is
predicted to pay, then confirmed by measured tau on prompts that nothing was chosen by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.core.storage.files import write_json
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.policies import Policy
from specctl.runtime.target.target import Target
from specctl.train.vocab.candidates import (
    Material,
    Measure,
    TrimChoice,
    TrimSettings,
    TrimTrial,
    VocabCandidates,
)
from specctl.train.vocab.coverage import always_kept, coverage_curve, cumulative, ranking, size_grid
from specctl.train.vocab.measure import (
    HeadCost,
    MeasuredDrafter,
    draft_calls,
    measure_drafter,
    measure_head_cost,
    moved_bytes,
    target_bytes,
)
from specctl.train.vocab.report import ALL, CurvePoint, Moved, Side, TrimReport, domain_rows


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The drafter with fewer output rows (as it was where none pays), how it should draft, and what
    that did."""

    drafter: Drafter
    policy: Policy
    report: TrimReport


def trim(
    drafter: Drafter,
    policy: Policy,
    target: Target,
    material: Material,
    settings: TrimSettings,
    *,
    measure: Measure | None = None,
    cost: HeadCost | None = None,
    console: Reporter | None = None,
) -> Trimmed:
    """Predict, choose, confirm, report."""
    console = console if console is not None else SilentReporter()
    if not material.prompts:
        raise SpecctlError("trimming needs held-out prompts to measure tau", do="give some prompts")

    def default(tried: Drafter, how: Policy) -> MeasuredDrafter:
        given = (settings.new_tokens, settings.temperature)
        return measure_drafter(target, tried, how, material.prompts, *given)

    measure = measure if measure is not None else default
    before = measure(drafter, policy)
    if cost is None:
        console.say("vocab-trim: timing the draft head")
        rank = ranking(material.counts, always_kept(target), drafter.vocab)
        cost = measure_head_cost(
            target, drafter, policy, rank, material.prompts, every_length=settings.search == "tpe"
        )
    job = VocabCandidates(drafter, policy, target, material, settings, before, cost)
    trials: list[tuple[TrimTrial, Drafter]] = []
    choices = job.choices(console)
    with console.task("measuring tau of trimmed drafters", len(choices), "sizes") as advance:
        for choice in choices:
            trials.append(job.tried(choice, measure))
            advance(1, f"{choice.size:,} ids: tau {trials[-1][0].measured.tau:.2f}")
    trials.sort(key=lambda pair: (-pair[0].speedup, pair[0].predicted.size))
    trial, best = trials[0]
    report = _report(job, [t for t, _ in trials], best)
    return Trimmed(best, job.policy_of(trial.choice), report)


def _report(job: VocabCandidates, trials: Sequence[TrimTrial], best: Drafter) -> TrimReport:
    choice, material, settings = trials[0].choice, job.material, job.settings
    rank, heldout = job.rank(choice), material.heldout
    everywhere = coverage_curve(rank, heldout)
    by_domain = {n: cumulative(rank, c) for n, c in sorted(heldout.by_domain.items())}
    covered = {n: float(c[choice.size - 1]) for n, c in by_domain.items()}
    seen_V = (material.counts.total_V + heldout.total_V) > 0
    before = _side(job, job.drafter, job.before, TrimChoice(job.full, job.policy.depth))
    after = _side(job, best, trials[0].measured, choice)
    total = float(everywhere[choice.size - 1])
    return TrimReport(
        family=job.drafter.family,
        selector=material.selector,
        search=settings.search if settings.size == "auto" else "none",
        predictor=job.predictor,
        temperature=settings.temperature,
        choice=choice,
        size_before=job.full,
        target_size=job.target.spec.vocab_size,
        digest=None if best.vocab is None else best.vocab.digest(),
        tokens_ranked=material.counts.num_tokens,
        tokens_heldout=heldout.num_tokens,
        special=len(job.always),
        unseen=int((~seen_V[rank[: choice.size]]).sum()),
        coverage=total,
        coverage_by_domain=covered,
        curve=_curve(job, everywhere, list(by_domain.values()), choice),
        before=before,
        after=after,
        trials=tuple(trials),
        min_coverage=settings.min_coverage if settings.size == "auto" else None,
        domains=domain_rows(before, after, {**covered, ALL: total}),
    )


def _side(
    job: VocabCandidates, drafter: Drafter, measured: MeasuredDrafter, choice: TrimChoice
) -> Side:
    size = moved_bytes(drafter, job.target)
    ratio = size / target_bytes(job.target)
    moved = Moved(draft_calls(drafter, job.policy_of(choice)), ratio, size)
    return Side(measured, job.cost_of(choice), choice.size, moved)


def _curve(
    job: VocabCandidates, everywhere: Tensor, by_domain: Sequence[Tensor], choice: TrimChoice
) -> tuple[CurvePoint, ...]:
    """The grid of sizes and the chosen one."""
    grid = sorted({*size_grid(job.full, job.least), choice.size})
    promised = job.promises(choice, grid)
    points = []
    for k in grid:
        worst = min(float(c[k - 1]) for c in by_domain)
        p = promised.at(k)
        points.append(CurvePoint(k, float(everywhere[k - 1]), worst, p.alpha, p.tau, p.speedup))
    return tuple(points)


def save_report(report: TrimReport, folder: Path) -> Path:
    """FOLDER/trim.json, and the curves as trim.png where matplotlib is installed."""
    write_json(folder / "trim.json", report.to_json())
    with contextlib.suppress(SpecctlError):  # the picture is optional, its figures are in the JSON
        report.save_png(folder / "trim.png")
    return folder / "trim.json"
