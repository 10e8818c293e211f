"""Which vocabularies are worth measuring: every size's promise, the best of them, their drafters.

S(k) = tau(k) / (c_verify + g (c_body + c_head k / V)), all costs in plain target steps: the balance
of coverage and draft latency (arXiv 2603.05210) in exact form. tau(k) comes from the drafter's own
distributions along text the target wrote (`train.vocab.acceptance`), not from coverage: a token
that the drafter would have missed anyway costs nothing when it is cut, and most rare tokens are of
that kind. One integer and a table: the search over sizes is exhaustive. With `search` tpe the draft
length and the weights of the domains are chosen together with the size; that space is a product,
and Optuna's Tree-structured Parzen Estimator samples it. A choice that covers too little counts
less than any that covers enough, and tells the sampler how much it lacks. Letters: N sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.core.messages.installed import library
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies import Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.acceptance import Ranked, size_curves
from specctl.train.vocab.chains import ScoredChain, TargetAnswer, can_capture, capture_chains
from specctl.train.vocab.coverage import (
    TokenCounts,
    always_kept,
    coverage_curve,
    ranking,
    size_grid,
    vocab_map,
)
from specctl.train.vocab.measure import HeadCost, MeasuredDrafter


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
    answers: Sequence[TargetAnswer]
    prompts: Sequence[HeldoutPrompt]


MOST_SIZES = 2048


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a size promises: coverage, acceptance of tested drafts, tokens per round, speed-up over
    plain decoding."""

    size: int
    coverage: float
    alpha: float
    tau: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Predictions:
    """Every candidate size, ascending (float64 [N] each)."""

    sizes: tuple[int, ...]
    coverage_N: Tensor
    alpha_N: Tensor
    tau_N: Tensor
    speedup_N: Tensor

    def at(self, size: int) -> Predicted:
        n = self.sizes.index(size)
        figures = (self.coverage_N, self.alpha_N, self.tau_N, self.speedup_N)
        return Predicted(size, *(float(values[n]) for values in figures))

    def ranked(self, min_coverage: float, among: Iterable[int] | None = None) -> list[Predicted]:
        """Sizes that cover enough, the best speed-up first (the smaller size of equals); the
        largest size is always a candidate."""
        wanted = {*self.sizes} if among is None else {*among}
        coverage = self.coverage_N.tolist()
        speedup = dict(zip(self.sizes, self.speedup_N.tolist(), strict=True))
        enough = [
            k
            for k, c in zip(self.sizes, coverage, strict=True)
            if (k in wanted and c >= min_coverage) or k == self.sizes[-1]
        ]
        return [self.at(k) for k in sorted(enough, key=lambda k: (-speedup[k], k))]


def candidate_sizes(num_ids: int, least: int, also: Iterable[int] = ()) -> list[int]:
    """Every size from `least` on; evenly spaced ones where there are more than MOST_SIZES."""
    step = -(-num_ids // MOST_SIZES)
    return sorted({*range(least, num_ids + 1, step), *also, num_ids})


def is_walked_exactly(policy: Policy) -> bool:
    """Plain chains are predicted as they are; other policies in proportion to their chain."""
    return isinstance(policy, Chain) and policy.stopper is None


def predict_from_chains(
    chains: Iterable[ScoredChain],
    ranked: Ranked,
    sizes: Sequence[int],
    coverage: Tensor,
    cost: HeadCost,
    *,
    temperature: float = 0.0,
    tau_full: float | None = None,
    length: int | None = None,
) -> tuple[Predictions, Mapping[str, Predictions]]:
    """Predictions over all text and by domain. `coverage` is the whole coverage curve; `tau_full`
    scales tau so that the largest size has it (trees and early stops)."""
    by_domain = size_curves(chains, ranked, sizes, temperature, length)
    total = reduce(add, by_domain.values())
    scale = 1.0 if tau_full is None else tau_full / float(total.tau_N[-1])
    coverage_N = coverage[torch.tensor(sizes) - 1]

    def finish(tau_N: Tensor, alpha_N: Tensor) -> Predictions:
        tau_N = (scale * tau_N).clamp(min=1.0)
        return Predictions(tuple(sizes), coverage_N, alpha_N, tau_N, cost.speedups(tau_N, sizes))

    found = {name: finish(c.tau_N, c.alpha_N) for name, c in sorted(by_domain.items())}
    return finish(total.tau_N, total.alpha_N), found


def predict_from_coverage(
    sizes: Sequence[int],
    coverage: Tensor,
    alpha: float,
    length: int,
    cost: HeadCost,
    tau_full: float | None = None,
) -> Predictions:
    """For drafters that cannot be led along a text: acceptance falls in proportion to coverage,
    which overstates the loss. `tau_full` scales tau so that the largest size has it."""
    coverage_N = coverage[torch.tensor(sizes) - 1]
    alpha_N = alpha * coverage_N / coverage_N[-1]
    tau_N = torch.tensor([expected_tau(a, length) for a in alpha_N.tolist()], dtype=torch.float64)
    if tau_full is not None:
        tau_N = tau_N * tau_full / tau_N[-1]
    return Predictions(tuple(sizes), coverage_N, alpha_N, tau_N, cost.speedups(tau_N, sizes))


WEIGHTS = (0.1, 10.0)


@dataclass(frozen=True, slots=True)
class TrimChoice:
    """A way to trim: ids kept, tokens drafted a round, and the weight of each domain's counts
    (empty: plain counts)."""

    size: int
    length: int
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """A choice with what it promises."""

    choice: TrimChoice
    coverage: float
    speedup: float


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Sizes from `least` to `most`, draft lengths 1 to `length`, a weight per domain where there
    are several."""

    least: int
    most: int
    length: int
    domains: tuple[str, ...]

    def suggest(self, trial: Any) -> TrimChoice:
        size = trial.suggest_int("size", self.least, self.most, log=True)
        length = trial.suggest_int("length", 1, self.length)
        names = self.domains if len(self.domains) > 1 else ()
        return TrimChoice(
            size, length, {n: trial.suggest_float(f"w:{n}", *WEIGHTS, log=True) for n in names}
        )

    def parameters(self, choice: TrimChoice) -> dict[str, Any]:
        """The same choice in the sampler's words."""
        names = self.domains if len(self.domains) > 1 else ()
        weights = {f"w:{n}": choice.weights.get(n, 1.0) for n in names}
        return {"size": choice.size, "length": choice.length, **weights}


def search_tpe(
    score: Callable[[TrimChoice], Scored],
    space: SearchSpace,
    *,
    min_coverage: float,
    trials: int,
    seed: int = 0,
    first: Sequence[TrimChoice] = (),
    tick: Callable[[Scored], None] = lambda scored: None,
) -> list[Scored]:
    """What was looked at, the best first; choices that cover too little come last. `first` are
    looked at before the sampler is asked. The same seed gives the same search."""
    optuna = library("optuna", "a search over several knobs", "tune", instead="--search exhaustive")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: list[Scored] = []

    def objective(trial: Any) -> float:
        scored = score(space.suggest(trial))
        found.append(scored)
        tick(scored)
        enough = scored.coverage >= min_coverage or scored.choice.size == space.most
        return scored.speedup if enough else scored.coverage - min_coverage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for choice in first:
        study.enqueue_trial(space.parameters(choice))
    study.optimize(objective, n_trials=max(trials, len(first)))

    def worth(scored: Scored) -> tuple[bool, float, int]:
        lacking = scored.coverage < min_coverage and scored.choice.size < space.most
        return lacking, -scored.speedup, scored.choice.size

    return sorted(found, key=worth)


Measure = Callable[[Drafter, Policy], MeasuredDrafter]
MOST_ELEMENTS = 2**27  # float32 draft logits kept while several knobs are searched: 512 MiB


@dataclass(frozen=True, slots=True)
class TrimTrial:
    """A choice that was tried: what was promised, what was measured. `speedup` takes the measured
    tau and the fitted cost, which is steadier than one timed run."""

    predicted: Predicted
    measured: MeasuredDrafter
    speedup: float
    choice: TrimChoice

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.predicted.size,
            "length": self.choice.length,
            "weights": {name: round(w, 3) for name, w in self.choice.weights.items()},
            "coverage": round(self.predicted.coverage, 5),
            "predicted": {
                "alpha": round(self.predicted.alpha, 4),
                "tau": round(self.predicted.tau, 4),
                "speedup": round(self.predicted.speedup, 4),
            },
            "measured": self.measured.to_json() | {"speedup": round(self.speedup, 4)},
        }


@dataclass(frozen=True)
class VocabCandidates:
    """The choices of one trimming: what each promises, which to measure, the drafter of each."""

    drafter: Drafter
    policy: Policy
    target: Target
    material: Material
    settings: TrimSettings
    before: MeasuredDrafter
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

    def rank(self, choice: TrimChoice | None = None) -> Tensor:
        weights = choice.weights if choice is not None and choice.weights else None
        return ranking(self.material.counts, self.always, self.drafter.vocab, weights)

    # -- prediction -----------------------------------------------------------------------------

    @cached_property
    def is_led(self) -> bool:
        return bool(self.material.answers) and can_capture(self.drafter, self.target)

    @cached_property
    def kept_chains(self) -> list[ScoredChain]:
        """Chains of as many answers as memory is meant for."""
        found: list[ScoredChain] = []
        elements = 0
        for chain in self.chains():
            elements += chain.draft_RLK.numel()
            if found and elements > MOST_ELEMENTS:
                break
            found.append(chain)
        return found

    def chains(self) -> Iterable[ScoredChain]:
        answers = self.material.answers
        return capture_chains(self.target, self.drafter, answers, self.policy.depth)

    def cost_of(self, choice: TrimChoice) -> HeadCost:
        same = choice.length == self.policy.depth
        return self.cost if same else self.cost.at_length(choice.length)

    def policy_of(self, choice: TrimChoice) -> Policy:
        if choice.length == self.policy.depth:
            return self.policy
        changed: Policy = replace(self.policy, length=choice.length)  # type: ignore[type-var]
        return changed

    def predictions(
        self, choice: TrimChoice, sizes: Sequence[int], chains: Iterable[ScoredChain]
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
        return self.predictions(TrimChoice(self.full, self.policy.depth), sizes, chains)

    def promises(self, choice: TrimChoice, sizes: Sequence[int]) -> Predictions:
        """What at least these sizes promise with the rest of the choice."""
        if not choice.weights and choice.length == self.policy.depth:
            return self.all_sizes
        return self.predictions(choice, sizes, self.kept_chains)

    @property
    def predictor(self) -> str:
        """What the promises stand on, in words."""
        if not self.is_led:
            return "coverage"
        kind = "" if is_walked_exactly(self.policy) else " as a chain, scaled to the measured tau"
        return f"the drafter's distributions along {len(self.material.answers)} answers{kind}"

    # -- choosing -------------------------------------------------------------------------------

    def choices(self, console: Reporter) -> list[TrimChoice]:
        """What is to be measured: the promising ones, and the whole vocabulary to be beaten."""
        depth, size = self.policy.depth, self.settings.size
        if size != "auto":
            return [TrimChoice(size, depth)]
        plain = [TrimChoice(k, depth) for k in self._promising()]
        if self.settings.search != "tpe":
            return plain
        found = [s.choice for s in self._searched(plain, console)]
        return [*_apart(found, self.settings.confirm), *plain[:1], TrimChoice(self.full, depth)]

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

    def _searched(self, plain: Sequence[TrimChoice], console: Reporter) -> list[Scored]:
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

    def scored(self, choice: TrimChoice) -> Scored:
        found = self.predictions(choice, [choice.size], self.kept_chains).at(choice.size)
        return Scored(choice, found.coverage, found.speedup)

    def tried(self, choice: TrimChoice, measure: Measure) -> tuple[TrimTrial, Drafter]:
        """The drafter of a choice, measured."""
        small, how = self.drafter, self.policy_of(choice)
        if choice.size < self.full:
            kept = vocab_map(
                self.rank(choice), choice.size, self.always, self.target.spec.vocab_size
            )
            small = self.drafter.trimmed(kept.to(self.target.device))
        same = small is self.drafter and how is self.policy
        measured = self.before if same else measure(small, how)
        promised = self.promises(choice, [choice.size]).at(choice.size)
        speedup = self.cost_of(choice).speedup(measured.tau, choice.size)
        return TrimTrial(promised, measured, speedup, choice), small


def _apart(choices: Sequence[TrimChoice], count: int) -> list[TrimChoice]:
    """The first few that differ in size by a tenth or in draft length."""
    found: list[TrimChoice] = []
    for choice in choices:
        near = [
            c for c in found
            if c.length == choice.length and abs(c.size - choice.size) <= 0.1 * c.size
        ]  # fmt: skip
        if not near and len(found) < count:
            found.append(choice)
    return found
