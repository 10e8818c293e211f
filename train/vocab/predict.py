"""What every size of a draft vocabulary promises, before any of them is tried.

S(k) = tau(k) / (c_verify + g (c_body + c_head k / V)), all costs in plain target steps: the balance
of coverage and draft latency (arXiv 2603.05210) in exact form. tau(k) comes from the drafter's own
distributions along text the target wrote (`train.acceptance`), not from coverage: a token that the
drafter would have missed anyway costs nothing when it is cut, and most rare tokens are of that
kind. One integer and a table: the search over sizes is exhaustive. Letters: N sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies import Policy
from specctl.runtime.policies.chain import Chain
from specctl.train.vocab.acceptance import Ranked, size_curves
from specctl.train.vocab.chains import ScoredChain as TextChain
from specctl.train.vocab.head_cost import HeadCost

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
    chains: Iterable[TextChain],
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
