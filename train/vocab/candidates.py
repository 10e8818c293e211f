"""Which vocabularies are worth measuring: every size's promise, the best of them, their drafters.

A size's promise is the speed-up that its coverage (or the drafter's own distributions along answers
of the target) and the cost of the draft head predict. With `search` tpe the draft length and the
weights of the domains are chosen together with the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.policies import Policy
from specctl.runtime.target.target import Target
from specctl.train.vocab.acceptance import Ranked
from specctl.train.vocab.chains import ScoredChain, can_capture, capture_chains
from specctl.train.vocab.coverage import (
    always_kept,
    coverage_curve,
    ranking,
    size_grid,
    vocab_map,
)
from specctl.train.vocab.head_cost import HeadCost
from specctl.train.vocab.measure import MeasuredDrafter
from specctl.train.vocab.predict import (
    Predictions,
    candidate_sizes,
    is_walked_exactly,
    predict_from_chains,
    predict_from_coverage,
)
from specctl.train.vocab.report import TrimTrial
from specctl.train.vocab.search import Scored, SearchSpace, TrimChoice, search_tpe
from specctl.train.vocab.settings import Material, TrimSettings

Measure = Callable[[Drafter, Policy], MeasuredDrafter]
MOST_ELEMENTS = 2**27  # float32 draft logits kept while several knobs are searched: 512 MiB


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
