"""Trim a drafter's vocabulary: keep the output rows that the target's own words need.

Nothing is trained and nothing is lost: the draft law q becomes the softmax over the kept rows, zero
elsewhere, and verification uses exactly that q, so that the output law stays the target's
(VocabTrim, arXiv 2506.22694; FR-Spec, arXiv 2502.14856). What it costs is acceptance on the cut
tokens; what it saves is the draft head's bytes. A selector ranks the ids; the size is predicted to
pay, then confirmed by measured tau on prompts that nothing was chosen by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from specctl.drafters.parts.base import Drafter
from specctl.recipes.errors import SpecctlError
from specctl.runtime.policies import Policy
from specctl.runtime.report import Reporter, SilentReporter
from specctl.runtime.target import Target
from specctl.train.data.heldout import Prompt
from specctl.train.saving.store import write_json
from specctl.train.vocab.acceptance import Ranked
from specctl.train.vocab.chains import Answer, Chain, can_capture, capture_chains
from specctl.train.vocab.coverage import (
    TokenCounts,
    always_kept,
    coverage_curve,
    cumulative,
    ranking,
    size_grid,
    vocab_map,
)
from specctl.train.vocab.domains import ALL, Moved, Side, domain_rows
from specctl.train.vocab.head_cost import HeadCost, draft_calls, measure_head_cost
from specctl.train.vocab.measure import Measured, measure_drafter, moved_bytes, target_bytes
from specctl.train.vocab.predict import (
    Predictions,
    candidate_sizes,
    is_walked_exactly,
    predict_from_chains,
    predict_from_coverage,
)
from specctl.train.vocab.report import CurvePoint, Trial, TrimReport
from specctl.train.vocab.search import Choice, Scored, SearchSpace, search_tpe

Measure = Callable[[Drafter, Policy], Measured]
MOST_ELEMENTS = 2**27  # float32 draft logits kept while several knobs are searched: 512 MiB


@dataclass(frozen=True, slots=True)
class TrimSettings:
    """How to trim. "auto" takes the size with the best speed-up that covers `min_coverage`, after
    measuring the `confirm` most promising. `search` tpe also chooses draft length and domain
    weights, from `trials` predictions."""

    size: int | Literal["auto"] = "auto"
    min_coverage: float = 0.95
    new_tokens: int = 64
    temperature: float = 0.0
    confirm: int = 3
    search: Literal["exhaustive", "tpe"] = "exhaustive"
    trials: int = 60
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Material:
    """What trimming goes by: counts that rank the ids and the selector that made them; answers of
    the target on which sizes are predicted and coverage is measured; prompts on which tau is."""

    selector: str
    counts: TokenCounts
    heldout: TokenCounts
    answers: Sequence[Answer]
    prompts: Sequence[Prompt]


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

    def default(tried: Drafter, how: Policy) -> Measured:
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
    job = _Job(drafter, policy, target, material, settings, before, cost)
    trials: list[tuple[Trial, Drafter]] = []
    choices = job.choices(console)
    with console.task("measuring tau of trimmed drafters", len(choices), "sizes") as advance:
        for choice in choices:
            trials.append(job.tried(choice, measure))
            advance(1, f"{choice.size:,} ids: tau {trials[-1][0].measured.tau:.2f}")
    trials.sort(key=lambda pair: (-pair[0].speedup, pair[0].predicted.size))
    trial, best = trials[0]
    report = job.report([t for t, _ in trials], best)
    return Trimmed(best, job.policy_of(trial.choice), report)


@dataclass(frozen=True)
class _Job:
    """One trimming under way."""

    drafter: Drafter
    policy: Policy
    target: Target
    material: Material
    settings: TrimSettings
    before: Measured
    cost: HeadCost

    @cached_property
    def always(self) -> tuple[int, ...]:
        return always_kept(self.target)

    @cached_property
    def full(self) -> int:
        """How many ids the drafter speaks now."""
        return (
            self.target.spec.vocab_size if self.drafter.vocab is None else self.drafter.vocab.size
        )

    @property
    def least(self) -> int:
        return max(len(self.always), 2)

    def rank(self, choice: Choice | None = None) -> Tensor:
        weights = choice.weights if choice is not None and choice.weights else None
        return ranking(self.material.counts, self.always, self.drafter.vocab, weights)

    # -- prediction -----------------------------------------------------------------------------

    @cached_property
    def is_led(self) -> bool:
        return bool(self.material.answers) and can_capture(self.drafter, self.target)

    @cached_property
    def kept_chains(self) -> list[Chain]:
        """Chains of as many answers as memory is meant for."""
        found: list[Chain] = []
        elements = 0
        for chain in self.chains():
            elements += chain.draft_RLK.numel()
            if found and elements > MOST_ELEMENTS:
                break
            found.append(chain)
        return found

    def chains(self) -> Iterable[Chain]:
        answers = self.material.answers
        return capture_chains(self.target, self.drafter, answers, self.policy.depth)

    def is_plain(self, choice: Choice) -> bool:
        """Whether only the size was chosen."""
        return not choice.weights and choice.length == self.policy.depth

    def cost_of(self, choice: Choice) -> HeadCost:
        same = choice.length == self.policy.depth
        return self.cost if same else self.cost.at_length(choice.length)

    def policy_of(self, choice: Choice) -> Policy:
        if choice.length == self.policy.depth:
            return self.policy
        changed: Policy = replace(self.policy, length=choice.length)  # type: ignore[type-var]
        return changed

    def predictions(
        self, choice: Choice, sizes: Sequence[int], chains: Iterable[Chain]
    ) -> Predictions:
        """What these sizes promise under the choice's ranking and draft length."""
        rank, cost = self.rank(choice), self.cost_of(choice)
        coverage = coverage_curve(rank, self.material.heldout)
        if not self.is_led:
            alpha = min(max(self.before.alpha, 0.01), 0.99)
            return predict_from_coverage(
                sizes, coverage, alpha, choice.length, cost, self.before.tau
            )
        vocab = self.drafter.vocab
        vocab = None if vocab is None else vocab.to(torch.device("cpu"))
        ranked = Ranked.of(rank, vocab, self.target.spec.vocab_size)
        return predict_from_chains(
            chains,
            ranked,
            sizes,
            coverage,
            cost,
            temperature=self.settings.temperature,
            tau_full=None if is_walked_exactly(self.policy) else self.before.tau,
            length=choice.length,
        )[0]

    @cached_property
    def all_sizes(self) -> Predictions:
        """Every size under plain counts and the policy's own draft length."""
        also = size_grid(self.full, self.least)
        given = [self.settings.size] if self.settings.size != "auto" else []
        for size in given:
            vocab_map(self.rank(), size, self.always, self.target.spec.vocab_size)  # may refuse
        sizes = candidate_sizes(self.full, self.least, [*also, *given])
        chains = self.chains() if self.settings.search != "tpe" else self.kept_chains
        return self.predictions(Choice(self.full, self.policy.depth), sizes, chains)

    # -- choosing -------------------------------------------------------------------------------

    def choices(self, console: Reporter) -> list[Choice]:
        """What is to be measured: the promising ones, and the whole vocabulary to be beaten."""
        depth, size = self.policy.depth, self.settings.size
        if size != "auto":
            return [Choice(size, depth)]
        plain = [Choice(k, depth) for k in self._promising()]
        if self.settings.search != "tpe":
            return plain
        found = [s.choice for s in self._searched(plain, console)]
        return [*_apart(found, self.settings.confirm), *plain[:1], Choice(self.full, depth)]

    def _promising(self) -> list[int]:
        """The best size of all, the best of the grid (neighbours of the best would measure the
        same), and the full vocabulary."""
        least = self.settings.min_coverage
        best = self.all_sizes.ranked(least)[0].size
        grid = self.all_sizes.ranked(least, size_grid(self.full, self.least))
        sizes = [best]
        for candidate in grid:
            far = all(abs(candidate.size - k) > 0.1 * k for k in sizes)
            if len(sizes) < self.settings.confirm and far:
                sizes.append(candidate.size)
        return [*sizes, *({self.full} - {*sizes})]

    def _searched(self, plain: Sequence[Choice], console: Reporter) -> list[Scored]:
        settings, domains = self.settings, tuple(sorted(self.material.counts.by_domain))
        if not self.is_led or not is_walked_exactly(self.policy):
            raise SpecctlError(
                "only plain chains of a stepwise drafter can be searched with tpe",
                where="--search",
                found=f"{self.drafter.family} drafting by {type(self.policy).__name__}",
                expected="policy chain",
                do="--search exhaustive",
            )
        space = SearchSpace(self.least, self.full, self.policy.depth, domains)
        with console.task("searching", settings.trials, "choices") as advance:
            return search_tpe(
                self.scored,
                space,
                min_coverage=settings.min_coverage,
                trials=settings.trials,
                seed=settings.seed,
                first=plain,
                tick=lambda scored: advance(1, f"S {scored.speedup:.2f}"),
            )

    def scored(self, choice: Choice) -> Scored:
        found = self.predictions(choice, [choice.size], self.kept_chains).at(choice.size)
        return Scored(choice, found.coverage, found.speedup)

    def tried(self, choice: Choice, measure: Measure) -> tuple[Trial, Drafter]:
        """The drafter of a choice, measured."""
        small, how = self.drafter, self.policy_of(choice)
        if choice.size < self.full:
            kept = vocab_map(
                self.rank(choice), choice.size, self.always, self.target.spec.vocab_size
            )
            small = self.drafter.trimmed(kept.to(self.target.device))
        same = small is self.drafter and how is self.policy
        measured = self.before if same else measure(small, how)
        where = self.all_sizes
        if not self.is_plain(choice):
            where = self.predictions(choice, [choice.size], self.kept_chains)
        speedup = self.cost_of(choice).speedup(measured.tau, choice.size)
        return Trial(where.at(choice.size), measured, speedup, choice), small

    # -- reporting ------------------------------------------------------------------------------

    def side(self, drafter: Drafter, measured: Measured, choice: Choice) -> Side:
        ratio = moved_bytes(drafter, self.target) / target_bytes(self.target)
        moved = Moved(draft_calls(drafter, self.policy_of(choice)), ratio)
        return Side(measured, self.cost_of(choice), choice.size, moved)

    def report(self, trials: Sequence[Trial], best: Drafter) -> TrimReport:
        choice, material, settings = trials[0].choice, self.material, self.settings
        rank, heldout = self.rank(choice), material.heldout
        everywhere = coverage_curve(rank, heldout)
        by_domain = {n: cumulative(rank, c) for n, c in sorted(heldout.by_domain.items())}
        covered = {n: float(c[choice.size - 1]) for n, c in by_domain.items()}
        seen_V = (material.counts.total_V + heldout.total_V) > 0
        before = self.side(self.drafter, self.before, Choice(self.full, self.policy.depth))
        after = self.side(best, trials[0].measured, choice)
        total = float(everywhere[choice.size - 1])
        return TrimReport(
            family=self.drafter.family,
            selector=material.selector,
            search=settings.search if settings.size == "auto" else "none",
            predictor=self.predictor,
            temperature=settings.temperature,
            choice=choice,
            size_before=self.full,
            target_size=self.target.spec.vocab_size,
            digest=None if best.vocab is None else best.vocab.digest(),
            tokens_ranked=material.counts.num_tokens,
            tokens_heldout=heldout.num_tokens,
            special=len(self.always),
            unseen=int((~seen_V[rank[: choice.size]]).sum()),
            coverage=total,
            coverage_by_domain=covered,
            curve=self.curve(everywhere, by_domain.values(), choice),
            before=before,
            after=after,
            trials=tuple(trials),
            min_coverage=settings.min_coverage if settings.size == "auto" else None,
            domains=domain_rows(before, after, {**covered, ALL: total}),
        )

    @property
    def predictor(self) -> str:
        if not self.is_led:
            return "coverage"
        kind = "" if is_walked_exactly(self.policy) else " as a chain, scaled to the measured tau"
        return f"the drafter's laws along {len(self.material.answers)} answers{kind}"

    def curve(
        self, everywhere: Tensor, by_domain: Iterable[Tensor], choice: Choice
    ) -> tuple[CurvePoint, ...]:
        """The grid of sizes and the chosen one."""
        domains = list(by_domain)
        grid = sorted({*size_grid(self.full, self.least), choice.size})
        where = self.all_sizes
        if not self.is_plain(choice):
            where = self.predictions(choice, grid, self.kept_chains)
        points = []
        for k in grid:
            worst = min(float(c[k - 1]) for c in domains)
            p = where.at(k)
            points.append(CurvePoint(k, float(everywhere[k - 1]), worst, p.alpha, p.tau, p.speedup))
        return tuple(points)


def _apart(choices: Sequence[Choice], count: int) -> list[Choice]:
    """The first few that differ in size by a tenth or in draft length."""
    found: list[Choice] = []
    for choice in choices:
        near = [
            c for c in found
            if c.length == choice.length and abs(c.size - choice.size) <= 0.1 * c.size
        ]  # fmt: skip
        if not near and len(found) < count:
            found.append(choice)
    return found


def save_report(report: TrimReport, folder: Path) -> Path:
    """FOLDER/trim.json, and the curves as trim.png where matplotlib is installed."""
    write_json(folder / "trim.json", report.to_json())
    with contextlib.suppress(SpecctlError):  # the picture is optional, its figures are in the JSON
        report.save_png(folder / "trim.png")
    return folder / "trim.json"
