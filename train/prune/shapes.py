"""Which shape of a draft model is fastest here (Decoding Speculative Decoding, arXiv 2402.01528).

A round of k drafted tokens takes k t_d + t_v seconds and gives tau(k) tokens, so the paper ranks
drafts by tau / (k t_d + t_v). A shape that was healed is ranked by what was measured of it, as
there; one that was never built by two fits over depth L and width w. On a device that is bound by
launches depth dominates t_d, and few wide layers win over many narrow ones.

    t_d(L, w) = a + b L + c L P(w) + d R w     P(w): parameters of a layer, R: rows of the head

is measured in the real engine. Verification does not depend on the shape and is measured once, at
every length; of each shape only the slope of drafting between the shortest and the longest length
is needed.

    logit alpha(L, w) = e + f log L + g log w + h log L log w

What a layer adds to acceptance depends on the width: of channels that are cut, every layer loses
its share, and the narrower the draft, the less further depth makes up for it. Hence the last term.

R2 flatters a fit of few points by several columns; a point left out is its true test (PRESS).
Without refitting: y - r / (1 - h), where r is the residual and h the point's leverage.
Letters: N points, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.models.llama.llama import LlamaModel, LlamaShape
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.measure.stats import add_counts, expected_tau
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True, order=True)
class DraftShape:
    """Depth and width of a candidate; heads and MLP keep the target's proportions."""

    layers: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"

    def options(self, target: LlamaShape) -> dict[str, Any]:
        """Options of a small-lm: whole key/value groups, the target's head width."""
        share = self.width / target.hidden_size
        groups = max(1, round(target.num_kv_heads * share))
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": groups * (target.num_heads // target.num_kv_heads),
            "kv_heads": groups,
            "head_dim": target.head_dim,
            "intermediate": max(8, round(target.intermediate_size * share)),
        }

    def layer_parameters(self, target: LlamaShape) -> int:
        own = self.options(target)
        heads = 2 * (own["heads"] + own["kv_heads"]) * own["head_dim"]
        return self.width * int(heads + 3 * own["intermediate"])

    def body_parameters(self, target: LlamaShape) -> int:
        """Parameters of the layers, which is what shapes are compared at."""
        return self.layers * self.layer_parameters(target)


_OWN = 1.0 - 1e-6  # a point of this leverage is needed to determine the fit at all


@dataclass(frozen=True, slots=True)
class Fit:
    """One coefficient per column. `left_out_N`: each value as the other points predict it, nan
    where they do not determine it. `r2` and `left_out_r2` (None where a value is nan) are the
    shares of variance that the fit, and the predictions of points left out, explain."""

    coefficient_C: Tensor
    r2: float
    left_out_N: Tensor
    left_out_r2: float | None

    def at(self, row: Sequence[float]) -> float:
        return float(torch.tensor(row, dtype=torch.float64) @ self.coefficient_C)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """The fit of `values` by the columns of `rows`, which are scaled to one size first."""
    x_NC, y_N = (torch.tensor(v, dtype=torch.float64) for v in (rows, values))
    if len(y_N) < x_NC.shape[1]:
        raise SpecctlError(
            "too few measurements for a fit",
            found=f"{len(y_N)} shapes",
            expected=f"at least {x_NC.shape[1]}, of different depths and widths",
            do="give more --depths or --widths",
        )
    scale_C = x_NC.norm(dim=0).clamp(min=1e-30)
    scaled_NC = x_NC / scale_C
    inverse_CN = torch.linalg.pinv(scaled_NC)
    solution_C = inverse_CN @ y_N
    rest_N = y_N - scaled_NC @ solution_C
    leverage_N = (scaled_NC * inverse_CN.T).sum(1)
    left_out_N = torch.where(leverage_N < _OWN, y_N - rest_N / (1.0 - leverage_N), torch.nan)
    explained = None if left_out_N.isnan().any() else _explained(left_out_N - y_N, y_N)
    return Fit(solution_C / scale_C, _explained(rest_N, y_N), left_out_N, explained)


def _explained(rest_N: Tensor, y_N: Tensor) -> float:
    """The share of variance that is not in the rest."""
    spread = float((y_N - y_N.mean()).square().sum())
    return 1.0 - float(rest_N.square().sum()) / spread if spread > 0 else 1.0


LENGTHS = (1, 2, 3, 5, 8)  # draft lengths that are measured, and among which the best is chosen
_FLOOR = 0.01  # no step is predicted below this share of the fastest one measured


@dataclass(frozen=True, slots=True)
class Latency:
    """t_d by shape: measured where it was, else by the fit. `verify[k]`: what a round of k takes
    beside its steps; k = 0 is plain decoding."""

    fit: Fit
    measured: Mapping[DraftShape, float]
    verify: Mapping[int, float]
    target: LlamaShape
    head_rows: int

    def step(self, shape: DraftShape) -> float:
        known = self.measured.get(shape)
        return self._fitted(shape) if known is None else known

    def left_out(self, shape: DraftShape) -> float:
        """t_d of a measured shape as the others predict it; by the whole fit where they do not."""
        value = float(self.fit.left_out_N[list(self.measured).index(shape)])
        return self._above(value) if value == value else self._fitted(shape)

    def _fitted(self, shape: DraftShape) -> float:
        return self._above(self.fit.at(latency_row(shape, self.target, self.head_rows)))

    def _above(self, seconds: float) -> float:
        return max(seconds, _FLOOR * min(self.measured.values()))


def latency_row(shape: DraftShape, target: LlamaShape, head_rows: int) -> list[float]:
    layers = float(shape.layers)
    head = float(head_rows * shape.width)
    return [1.0, layers, layers * shape.layer_parameters(target), head]


def fit_latency(
    steps: Mapping[DraftShape, float],
    verify: Mapping[int, float],
    target: LlamaShape,
    head_rows: int,
) -> Latency:
    rows = [latency_row(shape, target, head_rows) for shape in steps]
    return Latency(least_squares(rows, list(steps.values())), steps, verify, target, head_rows)


def measure_latency(
    target: Target,
    base: LlamaShape,
    shapes: Sequence[DraftShape],
    vocab: VocabMap | None,
    prompts: Sequence[Sequence[int]],
    rounds: int = 24,
    lengths: Sequence[int] = LENGTHS,
    reporter: Reporter | None = None,
) -> Latency:
    """Drafts of random weights through the engine at batch 1; medians, as
    `specctl.runtime.measure.cost` takes them. Host time of a round that no draft step causes counts
    as verification."""
    talker = reporter if reporter is not None else SilentReporter()
    policy = make_policy({"policy": "chain", "length": max(lengths)})
    ends = (min(lengths), max(lengths))
    steps: dict[DraftShape, float] = {}
    rest: list[float] = []
    with talker.task("timing", len(shapes) + 1, "shapes") as advance:
        for shape in shapes:
            drafter = random_draft(target, shape.options(base), vocab)
            # no draft of random weights is accepted: k + 1 times as many rounds come of it
            few = max(1, rounds // 4)
            table = measure_costs(target, drafter, policy, prompts, lengths=ends, rounds=few)
            line = least_squares([[1.0, k] for k in ends], [table.draft[k] for k in ends])
            start, steps[shape] = line.coefficient_C.tolist()
            rest.append(start)
            advance(1, f"{shape.name}: {1e3 * steps[shape]:.2f} ms a step")
        cheapest = min(shapes, key=lambda s: s.body_parameters(base))
        drafter = random_draft(target, cheapest.options(base), vocab)
        half = max(1, rounds // 2)
        table = measure_costs(target, drafter, policy, prompts, lengths=lengths, rounds=half)
        advance(1, "verification")
    fixed = max(0.0, median(rest))
    verify = {0: table.round_seconds(0)} | {k: table.verify[k] + fixed for k in lengths}
    return fit_latency(steps, verify, base, base.vocab_size if vocab is None else vocab.size)


def random_draft(target: Target, options: Mapping[str, Any], vocab: VocabMap | None) -> SmallLm:
    """A draft whose weights are all random: zeros could run faster."""
    drafter = SmallLm(SmallLmOptions(**options), target.spec, vocab)
    assert isinstance(drafter.module, LlamaModel)
    with torch.no_grad():
        for name, weight in drafter.module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=weight.shape[1] ** -0.5)
    drafter.to(target.device, target.dtype)
    drafter.module.eval()
    return drafter


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
