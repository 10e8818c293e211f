"""How much of a draft is accepted, by shape: measured where a drafter was healed, else by a fit.

    logit alpha(L, w) = e + f log L + g log w + h log L log w

What a layer adds to acceptance depends on the width: of channels that are cut, every layer loses
its share, and the narrower the draft, the less further depth makes up for it. Hence the last term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specctl.core.drafter import Drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.stats import add_counts, expected_tau
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.prune.search.fits import Fit, least_squares
from specctl.train.prune.search.latency import LENGTHS
from specctl.train.prune.search.shape import DraftShape

BATCH = 24  # prompts decoded at a time: acceptance does not depend on it
_FAR = 1e-3  # alpha is kept this far from 0 and 1


@dataclass(frozen=True, slots=True)
class Reached:
    """`share_at[i]`: share of rounds that accept more than i drafted tokens. `error`: the standard
    error of tau at full length, over prompts; None where nothing was measured."""

    share_at: tuple[float, ...]
    error: float | None = None

    def tau(self, length: int) -> float:
        return 1.0 + sum(self.share_at[:length])

    @property
    def alpha(self) -> float:
        """The constant acceptance that gives the same tau at full length."""
        return alpha_of(self.tau(len(self.share_at)), len(self.share_at))

    @property
    def alpha_error(self) -> float | None:
        if self.error is None:
            return None
        length, tau = len(self.share_at), self.tau(len(self.share_at))
        sides = (alpha_of(tau + side * self.error, length) for side in (1, -1))
        return (next(sides) - next(sides)) / 2


def constant(alpha: float, length: int = max(LENGTHS)) -> Reached:
    """Every position accepts with the same chance."""
    return Reached(tuple(alpha ** (i + 1) for i in range(length)))


def measure_reached(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    length: int = max(LENGTHS),
) -> Reached:
    """Greedy chains of one length through the engine; their first k tokens tell tau of a chain of
    k. The error is that of a ratio, tokens to rounds, whose prompts were drawn."""
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    policy = make_policy({"policy": "chain", "length": length})
    engine = Engine(target, drafter, policy, num_slots=min(BATCH, len(prompts)))
    rows = [done.stats for done in engine.run([Request(tuple(p), sampling) for p in prompts])]
    rounds = sum(row.rounds for row in rows)
    tau = sum(row.tokens for row in rows) / rounds
    rest, many = sum((row.tokens - tau * row.rounds) ** 2 for row in rows), len(rows)
    error = math.sqrt(rest * many / (many - 1)) / rounds if many > 1 else None
    return Reached(tuple(n / rounds for n in add_counts(row.accepted_at for row in rows)), error)


@dataclass(frozen=True, slots=True)
class Acceptances:
    """What is accepted of each shape's drafts: as measured, or by the fit of the logit of alpha."""

    fit: Fit
    measured: Mapping[DraftShape, Reached]

    def reached(self, shape: DraftShape) -> Reached:
        known = self.measured.get(shape)
        return self._fitted(shape) if known is None else known

    def left_out(self, shape: DraftShape) -> Reached:
        """A measured shape as the others predict it; by the whole fit where they do not."""
        logit = float(self.fit.left_out_N[list(self.measured).index(shape)])
        return constant(_share(logit)) if logit == logit else self._fitted(shape)

    def _fitted(self, shape: DraftShape) -> Reached:
        return constant(_share(self.fit.at(_acceptance_row(shape))))


def fit_acceptance(measured: Mapping[DraftShape, Reached]) -> Acceptances:
    """The acceptance model of healed drafters (or of a table of the user's own)."""
    rows = [_acceptance_row(shape) for shape in measured]
    kept = [min(1.0 - _FAR, max(_FAR, found.alpha)) for found in measured.values()]
    return Acceptances(least_squares(rows, [math.log(a / (1 - a)) for a in kept]), dict(measured))


def _acceptance_row(shape: DraftShape) -> list[float]:
    depth, width = math.log(shape.layers), math.log(shape.width)
    return [1.0, depth, width, depth * width]


def _share(logit: float) -> float:
    return 0.5 * (1.0 + math.tanh(logit / 2))  # never overflows


def alpha_of(tau: float, length: int) -> float:
    """The constant acceptance whose chain of this length gives this tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tau(middle, length) < tau else (low, middle)
    return low
