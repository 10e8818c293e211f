"""Trim a drafter's vocabulary: keep the output rows that the target's own words need.

Nothing is trained and nothing is lost: the draft law q becomes the softmax over the kept rows, zero
elsewhere, and verification uses exactly that q, so that the output law stays the target's
(VocabTrim, arXiv 2506.22694; FR-Spec, arXiv 2502.14856). What it costs is acceptance on the cut
tokens; what it saves is the draft head's bytes. Counting what the target itself wrote works best.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from specctl.drafters.parts.base import Drafter, Outcome, RoundSeconds
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import SpecctlError
from specctl.runtime.cost import measure_costs
from specctl.runtime.engine import Engine
from specctl.runtime.generate import summarize
from specctl.runtime.policies import Policy
from specctl.runtime.policies.length import CostTable, LengthChooser
from specctl.runtime.report import Reporter, SilentReporter
from specctl.runtime.sampling import Sampling
from specctl.runtime.session import Request
from specctl.runtime.stats import memory_bound_speedup
from specctl.runtime.target import Target
from specctl.train.coverage import (
    Counted,
    HeadCost,
    TokenCounts,
    always_kept,
    choose_size,
    count_tokens,
    coverage_curve,
    cumulative,
    fit_cost,
    predict,
    ranking,
    size_grid,
    vocab_map,
)
from specctl.train.heldout import Prompt
from specctl.train.rows import TokenData
from specctl.train.store import write_json
from specctl.train.trim_report import CurvePoint, Measured, Trial, TrimReport

PARALLEL_FAMILIES = frozenset({"medusa"})  # one draft call gives every position
Measure = Callable[[Drafter], Measured]


# -- what is counted --------------------------------------------------------------------------


def target_tokens(
    target: Target, prompts: Sequence[Prompt], new_tokens: int = 128, batch: int = 16
) -> Iterator[Counted]:
    """What the target writes after the prompts, half of it greedily, by domain."""
    requests = [
        Request(p.ids, Sampling(temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens))
        for i, p in enumerate(prompts)
    ]
    completions = Engine(target, num_slots=min(batch, len(requests))).run(requests)
    for prompt, completion in zip(prompts, completions, strict=True):
        yield completion.tokens, prompt.domain


def data_tokens(data: TokenData) -> Iterator[Counted]:
    """What a run's drafter learns to predict; written by the target if the run regenerated."""
    return data.answers()


class _Recorder(LengthChooser):
    """Keeps every drafted token of a run. One writer: the engine."""

    def __init__(self, depth: int) -> None:
        super().__init__(CostTable({}, {}, "", "", 1))
        self.depth = depth
        self.drafted: list[Tensor] = []

    def length(self, batch: int) -> int:
        del batch
        return self.depth

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        del seconds
        self.drafted.append(outcome.tree.token_BN[outcome.tree.valid_BN])


def draft_tokens(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Prompt],
    new_tokens: int = 128,
) -> Iterator[Counted]:
    """What the drafter proposes, accepted or not, by domain."""
    for i, prompt in enumerate(prompts):
        recorder = _Recorder(policy.depth)
        sampling = Sampling(temperature=0.8 * (i % 2), seed=i, max_new_tokens=new_tokens)
        Engine(target, drafter, policy, chooser=recorder).run([Request(prompt.ids, sampling)])
        if recorder.drafted:
            yield torch.cat(recorder.drafted).cpu(), prompt.domain


def vocab_from_data(
    data: TokenData, target: Target, size: int | Literal["auto"], min_coverage: float
) -> VocabMap:
    """A map made before training, when no acceptance can be measured yet: the `size` best ids, or
    with "auto" the fewest that reach `min_coverage`."""
    counts, heldout = count_tokens(data_tokens(data), target.spec.vocab_size)
    always = always_kept(target)
    rank = ranking(counts, always)
    if size == "auto":
        enough = (coverage_curve(rank, heldout) >= min_coverage).nonzero()
        fewest = int(enough[0]) + 1 if enough.numel() else rank.numel()
        size = min(rank.numel(), max(-(-fewest // 8) * 8, len(always), 2))
    return vocab_map(rank, size, always, target.spec.vocab_size)


# -- what is measured -------------------------------------------------------------------------


def measure_drafter(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    prompts: Sequence[Prompt],
    new_tokens: int = 64,
    temperature: float = 0.0,
) -> Measured:
    """tau, alpha and tokens per second of real decoding at batch 1."""
    sampling = [
        Sampling(temperature=temperature, seed=i, max_new_tokens=new_tokens)
        for i in range(len(prompts))
    ]
    requests = [Request(p.ids, s) for p, s in zip(prompts, sampling, strict=True)]
    engine = Engine(target, drafter, policy)
    started = time.perf_counter()
    completions = engine.run(requests)
    stats = summarize(completions, engine, time.perf_counter() - started, "")
    return Measured(stats.tau, stats.alpha, stats.tokens_per_second, stats.tokens)


def draft_calls(drafter: Drafter, policy: Policy) -> int:
    """g: sequential draft calls of a round."""
    return 1 if drafter.family in PARALLEL_FAMILIES else max(policy.depth, 1)


def measure_head_cost(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    rank: Tensor,
    prompts: Sequence[Prompt],
    rounds: int = 24,
) -> HeadCost:
    """Times drafting with all ids, a third and a twelfth of them, and fits body and head."""
    num_ids, tables = rank.numel(), {}
    for size in sorted({max(2, num_ids // 12), max(2, num_ids // 3), num_ids}):
        ids_K = rank[:size].sort().values.to(target.device)
        small = drafter.trimmed(VocabMap(ids_K, target.spec.vocab_size))
        ids = [p.ids for p in prompts]
        tables[size] = measure_costs(
            target, small, policy, ids, lengths=(policy.depth,), rounds=rounds
        )
    return fit_cost(
        plain=min(t.round_seconds(0) for t in tables.values()),
        verify=min(t.verify[policy.depth] for t in tables.values()),
        rounds=[(size, table.draft[policy.depth]) for size, table in tables.items()],
        calls=draft_calls(drafter, policy),
        vocab_size=target.spec.vocab_size,
    )


def moved_bytes(drafter: Drafter) -> int:
    """Bytes of weights that one draft call reads: all but the input embedding, of which only a row
    is read (unless it also serves as the LM head)."""
    weights = {n: t for n, t in drafter.tensors().items() if t.is_floating_point()}
    has_head = any("head" in name for name in weights)
    return sum(
        t.numel() * t.element_size()
        for name, t in weights.items()
        if not (has_head and "embed" in name)
    )


def target_bytes(target: Target) -> int:
    """Bytes of weights that one target step reads; the embedding counts as the LM head it feeds."""
    weight = target.borrowed().embedding_VD
    total = sum(p.numel() * p.element_size() for p in target.lm.module.parameters())
    is_tied = target.borrowed().head_VD.data_ptr() == weight.data_ptr()
    return total if is_tied else total - weight.numel() * weight.element_size()


# -- trimming ---------------------------------------------------------------------------------


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
    c_before, c_after = moved_bytes(drafter) / full, moved_bytes(best) / full
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
