"""Which shape of a draft model is fastest here (Decoding Speculative Decoding, arXiv 2402.01528).

A round of k drafted tokens takes k t_d + t_v seconds and gives tau(k) tokens, so the paper ranks
drafts by tau / (k t_d + t_v). A shape that was healed is ranked by what was measured of it, as
there; one that was never built by two fits, of t_d (`latency`) and of alpha (`acceptance`). On a
device that is bound by launches depth dominates t_d, and few wide layers win over many narrow ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from specctl.train.prune.search.acceptance import Acceptances, Reached
from specctl.train.prune.search.latency import Latency
from specctl.train.prune.search.shape import DraftShape


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape and what is predicted of it; `length` is its best draft length. `alpha_error`: the
    standard error of an alpha that was measured, None of one that was not."""

    shape: DraftShape
    body_parameters: int
    step_seconds: float
    alpha: float
    alpha_error: float | None
    length: int
    tau: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        own = {"layers": self.shape.layers, "width": self.shape.width}
        names = (
            "body_parameters", "step_seconds", "alpha", "alpha_error", "length", "tau",
            "tokens_per_second",
        )  # fmt: skip
        return own | {name: getattr(self, name) for name in names}


def rank(
    shapes: Sequence[DraftShape],
    latency: Latency,
    acceptances: Acceptances,
    max_parameters: int | None = None,
) -> list[Candidate]:
    """Candidates by predicted tokens per second, the best first."""
    found = [
        _candidate(shape, latency, latency.step(shape), acceptances.reached(shape))
        for shape in shapes
    ]
    fitting = [c for c in found if max_parameters is None or c.body_parameters <= max_parameters]
    return sorted(fitting, key=lambda c: -c.tokens_per_second)


def unseen(latency: Latency, acceptances: Acceptances) -> dict[DraftShape, Candidate]:
    """Every shape that was measured, as it would have been predicted by all the others."""
    known = [shape for shape in acceptances.measured if shape in latency.measured]
    return {
        shape: _candidate(shape, latency, latency.left_out(shape), acceptances.left_out(shape))
        for shape in known
    }


def _candidate(shape: DraftShape, latency: Latency, step: float, reached: Reached) -> Candidate:
    lengths = range(1, len(reached.share_at) + 1)
    rate, length = max(
        (reached.tau(k) / (k * step + fixed), k)
        for k, fixed in latency.verify.items()
        if k in lengths
    )
    parameters, tau = shape.body_parameters(latency.target), reached.tau(length)
    own = (reached.alpha, reached.alpha_error)
    return Candidate(shape, parameters, step, *own, length, tau, rate)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of shapes that two rankings order alike and otherwise; ties are pairs of which the
    second cannot tell which is faster."""

    alike: int
    otherwise: int
    ties: int

    @property
    def kendall_tau(self) -> float | None:
        """1 the same order, 0 none, -1 reversed, over the pairs that are no ties."""
        decided = self.alike + self.otherwise
        return (self.alike - self.otherwise) / decided if decided else None


def agreement(
    predicted: Mapping[DraftShape, float],
    measured: Mapping[DraftShape, float],
    noise: Mapping[tuple[DraftShape, DraftShape], float] | None = None,
) -> Agreement:
    """Both rankings, pair by pair; `noise`: differences of a pair in the second that mean nothing,
    by its shapes in ascending order."""
    alike = otherwise = ties = 0
    for a, b in combinations(sorted(predicted), 2):
        found = measured[a] - measured[b]
        if abs(found) <= (0.0 if noise is None else noise[a, b]):
            ties += 1
        elif found * (predicted[a] - predicted[b]) > 0:
            alike += 1
        else:
            otherwise += 1
    return Agreement(alike, otherwise, ties)
