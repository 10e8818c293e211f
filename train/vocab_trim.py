"""Trim a drafter's vocabulary: keep the output rows that the target's own words need.

Nothing is trained and nothing is lost: the draft law q becomes the softmax over the kept rows, zero
elsewhere, and verification uses exactly that q, so that the output law stays the target's
(VocabTrim, arXiv 2506.22694; FR-Spec, arXiv 2502.14856). What it costs is acceptance on the cut
tokens; what it saves is the draft head's bytes. Counting what the target itself wrote works best.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from specctl.drafters.parts.base import Drafter
from specctl.recipes.errors import SpecctlError
from specctl.runtime.policies import Policy
from specctl.runtime.report import Reporter, SilentReporter
from specctl.runtime.stats import memory_bound_speedup
from specctl.runtime.target import Target
from specctl.train.counting import (
    data_tokens,
    draft_tokens,
    target_tokens,
    text_tokens,
    vocab_from_data,
)
from specctl.train.coverage import (
    HeadCost,
    TokenCounts,
    always_kept,
    choose_size,
    count_tokens,
    coverage_curve,
    cumulative,
    predict,
    ranking,
    size_grid,
    vocab_map,
)
from specctl.train.heldout import Prompt
from specctl.train.store import write_json
from specctl.train.trim_measure import (
    draft_calls,
    measure_drafter,
    measure_head_cost,
    moved_bytes,
    target_bytes,
)
from specctl.train.trim_report import CurvePoint, Measured, Trial, TrimReport

__all__ = [
    "Measured", "TokenCounts", "TrimReport", "choose_size", "count_tokens", "coverage_curve",
    "data_tokens", "draft_tokens", "save_report", "target_tokens", "text_tokens", "trim",
    "vocab_from_data",
]  # fmt: skip

Measure = Callable[[Drafter], Measured]


def trim(
    drafter: Drafter,
    size: int | Literal["auto"],
    *,
    target: Target,
    counts: TokenCounts,
    heldout: TokenCounts,
    policy: Policy,
    prompts: Sequence[Prompt],
    source: str = "target",
    min_coverage: float = 0.95,
    new_tokens: int = 64,
    confirm: int = 3,
    measure: Measure | None = None,
    cost: HeadCost | None = None,
    console: Reporter | None = None,
) -> tuple[Drafter, TrimReport]:
    """The drafter with fewer output rows, and what that did.

    "auto" takes the size with the best predicted speed-up that covers `min_coverage`, after trying
    the `confirm` most promising sizes on the prompts; the drafter comes back as it was when none of
    them beats the full vocabulary.
    """
    console = console if console is not None else SilentReporter()
    if not prompts:
        raise SpecctlError("trimming needs held-out prompts to measure tau", do="give some prompts")
    always = always_kept(target)
    rank = ranking(counts, always, drafter.vocab)
    curve = coverage_curve(rank, heldout)
    least = max(len(always), 2)

    def default(tried: Drafter) -> Measured:
        return measure_drafter(target, tried, policy, prompts, new_tokens)

    measure = measure if measure is not None else default
    before = measure(drafter)
    if cost is None:
        console.say("vocab-trim: timing the draft head")
        cost = measure_head_cost(target, drafter, policy, rank, prompts)
    alpha = min(max(before.alpha, 0.01), 0.99)
    if size == "auto":
        sizes = _promising(
            curve, alpha, policy.depth, cost, min_coverage, least, before.tau, confirm
        )
    else:
        sizes = [size]
    found: list[tuple[Trial, Drafter]] = []
    with console.task("measuring tau of trimmed drafters", len(sizes), "sizes") as advance:
        for k in sizes:
            kept = vocab_map(rank, k, always, target.spec.vocab_size).to(target.device)
            small = drafter if k == rank.numel() else drafter.trimmed(kept)
            measured = before if k == rank.numel() else measure(small)
            promised = predict(k, curve, alpha, policy.depth, cost, before.tau)
            found.append((Trial(promised, measured, cost.speedup(measured.tau, k)), small))
            advance(1, f"{k:,} ids: tau {measured.tau:.2f}")
    found.sort(key=lambda pair: (-pair[0].speedup, pair[0].predicted.size))
    trial, best = found[0]
    report = _report(
        drafter, best, trial, [t for t, _ in found], target, counts, heldout, rank, before, cost,
        policy, source, min_coverage if size == "auto" else None,
    )  # fmt: skip
    return best, report


def _promising(
    curve: Tensor,
    alpha: float,
    length: int,
    cost: HeadCost,
    min_coverage: float,
    least: int,
    tau_full: float,
    confirm: int,
) -> list[int]:
    """The best size of all, the best of the grid (neighbours of the best would measure the same),
    and the full vocabulary, against which trimming must win."""
    best = choose_size(
        curve, alpha, length, cost, min_coverage=min_coverage, least=least, tau_full=tau_full
    )
    coarse = choose_size(
        curve,
        alpha,
        length,
        cost,
        min_coverage=min_coverage,
        least=least,
        tau_full=tau_full,
        sizes=size_grid(curve.numel(), least),
    )
    sizes = [best[0].size]
    for candidate in coarse:
        if len(sizes) < confirm and all(abs(candidate.size - k) > 0.1 * k for k in sizes):
            sizes.append(candidate.size)
    return [*sizes, *({curve.numel()} - {*sizes})]


def _report(
    drafter: Drafter,
    best: Drafter,
    trial: Trial,
    trials: Sequence[Trial],
    target: Target,
    counts: TokenCounts,
    heldout: TokenCounts,
    rank: Tensor,
    before: Measured,
    cost: HeadCost,
    policy: Policy,
    source: str,
    min_coverage: float | None,
) -> TrimReport:
    size = trial.predicted.size
    by_domain = {name: cumulative(rank, n) for name, n in sorted(heldout.by_domain.items())}
    everywhere = coverage_curve(rank, heldout)
    grid = sorted({*size_grid(rank.numel(), 2), size})
    curve = tuple(
        CurvePoint(k, float(everywhere[k - 1]), min(float(c[k - 1]) for c in by_domain.values()))
        for k in grid
    )
    calls, full = draft_calls(drafter, policy), target_bytes(target)
    c_before, c_after = moved_bytes(drafter, target) / full, moved_bytes(best, target) / full
    seen_V = (counts.total_V + heldout.total_V) > 0
    return TrimReport(
        family=drafter.family,
        source=source,
        size=size,
        size_before=rank.numel(),
        target_size=target.spec.vocab_size,
        digest=None if best.vocab is None else best.vocab.digest(),
        tokens_ranked=counts.num_tokens,
        tokens_heldout=heldout.num_tokens,
        special=len(always_kept(target)),
        unseen=int((~seen_V[rank[:size]]).sum()),
        coverage=float(everywhere[size - 1]),
        coverage_by_domain={name: float(c[size - 1]) for name, c in by_domain.items()},
        curve=curve,
        length=policy.depth,
        calls=calls,
        byte_ratio_before=c_before,
        byte_ratio=c_after,
        mbsu_before=memory_bound_speedup(before.tau, calls, c_before),
        mbsu=memory_bound_speedup(trial.measured.tau, calls, c_after),
        before=before,
        after=trial.measured,
        cost=cost,
        trials=tuple(trials),
        min_coverage=min_coverage,
    )  # fmt: skip


def save_report(report: TrimReport, folder: Path) -> Path:
    """FOLDER/trim.json, and the curve as trim.png where matplotlib is installed."""
    write_json(folder / "trim.json", report.to_json())
    with contextlib.suppress(SpecctlError):  # the picture is optional, its figures are in the JSON
        report.save_png(folder / "trim.png")
    return folder / "trim.json"
