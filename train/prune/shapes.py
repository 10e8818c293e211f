"""Which shape of a draft model is fastest here (Decoding Speculative Decoding, arXiv 2402.01528).

A round of k drafted tokens takes k t_d + t_v seconds and gives tau(alpha, k) tokens, so the paper
ranks drafts by tau / (k t_d + t_v). Two small models predict both sides for shapes never built:

    t_d(L, w) = a + b L + c L P(w) + d R w     P(w): parameters of a layer, R: rows of the head
    logit alpha(L, w) = e + f log L + g log w

by least squares on measured rounds of the real engine and on drafters healed for a few steps. On a
device that is bound by launches b dominates, and few wide layers win over many narrow ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.parts.llama import LeanLlama, LlamaShape
from specctl.drafters.parts.vocab import VocabMap
from specctl.drafters.small_lm import SmallLm, SmallLmOptions
from specctl.recipes.errors import SpecctlError
from specctl.runtime.cost import measure_costs
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.length import CostTable
from specctl.runtime.stats import expected_tau
from specctl.runtime.target import Target

LENGTHS = (1, 2, 3, 5, 8)  # draft lengths that are measured, and among which the best is chosen
_FAR = 1e-3  # alpha is kept this far from 0 and 1


@dataclass(frozen=True, slots=True, order=True)
class DraftShape:
    """Depth and width of a candidate; heads and MLP keep the target's proportions."""

    layers: int
    width: int

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


@dataclass(frozen=True, slots=True)
class Fit:
    """Least squares: one coefficient per column, and the share of variance it explains."""

    coefficient_C: Tensor
    r2: float

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
    solution_C = torch.linalg.lstsq(x_NC / scale_C, y_N[:, None], driver="gelsd").solution[:, 0]
    spread = float((y_N - y_N.mean()).square().sum())
    rest = float((x_NC / scale_C @ solution_C - y_N).square().sum())
    return Fit(solution_C / scale_C, 1.0 - rest / spread if spread > 0 else 1.0)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of a draft step by shape; `verify[k]`: what a round of k takes beside its steps."""

    fit: Fit
    measured: Mapping[DraftShape, float]
    verify: Mapping[int, float]
    target: LlamaShape
    head_rows: int

    def step(self, shape: DraftShape) -> float:
        """t_d, never below a hundredth of the fastest one measured."""
        row = latency_row(shape, self.target, self.head_rows)
        return max(self.fit.at(row), 0.01 * min(self.measured.values()))


def latency_row(shape: DraftShape, target: LlamaShape, head_rows: int) -> list[float]:
    layers = float(shape.layers)
    head = float(head_rows * shape.width)
    return [1.0, layers, layers * shape.layer_parameters(target), head]


def measure_latency(
    target: Target,
    base: LlamaShape,
    shapes: Sequence[DraftShape],
    vocab: VocabMap | None,
    prompts: Sequence[Sequence[int]],
    rounds: int = 24,
    lengths: Sequence[int] = LENGTHS,
) -> Latency:
    """Drafts of random weights through the engine at batch 1; medians, as `specctl.runtime.cost`
    takes them. Host time of a round that no draft step causes counts as verification."""
    policy = make_policy({"policy": "chain", "length": max(lengths)})
    steps: dict[DraftShape, float] = {}
    tables: list[CostTable] = []
    for shape in shapes:
        drafter = random_draft(target, shape.options(base), vocab)
        table = measure_costs(target, drafter, policy, prompts, lengths=lengths, rounds=rounds)
        line = least_squares([[1.0, k] for k in lengths], [table.draft[k] for k in lengths])
        steps[shape] = float(line.coefficient_C[1])
        tables.append(table)
    rows = base.vocab_size if vocab is None else vocab.size
    fit = least_squares([latency_row(s, base, rows) for s in shapes], list(steps.values()))
    pairs = list(zip(steps.values(), tables, strict=True))
    verify = {k: _median([_fixed(table, step, k) for step, table in pairs]) for k in lengths}
    return Latency(fit, steps, verify, base, rows)


def _fixed(table: CostTable, step: float, length: int) -> float:
    """What a round takes beside its draft steps."""
    return table.verify[length] + max(0.0, table.draft[length] - length * step)


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())


def random_draft(target: Target, options: Mapping[str, Any], vocab: VocabMap | None) -> SmallLm:
    """A draft whose weights are all random: zeros could run faster."""
    drafter = SmallLm(SmallLmOptions(**options), target.spec, vocab)
    assert isinstance(drafter.module, LeanLlama)
    with torch.no_grad():
        for name, weight in drafter.module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=weight.shape[1] ** -0.5)
    drafter.to(target.device, target.dtype)
    drafter.module.eval()
    return drafter


@dataclass(frozen=True, slots=True)
class Acceptances:
    """alpha by shape: measured where it was, else by the fit of its logit."""

    fit: Fit
    measured: Mapping[DraftShape, float]

    def alpha(self, shape: DraftShape) -> float:
        return 1.0 / (1.0 + math.exp(-self.fit.at(_acceptance_row(shape))))


def fit_acceptance(measured: Mapping[DraftShape, float]) -> Acceptances:
    """The acceptance model of healed drafters (or of a table of the user's own)."""
    rows = [_acceptance_row(shape) for shape in measured]
    kept = [min(1.0 - _FAR, max(_FAR, alpha)) for alpha in measured.values()]
    return Acceptances(least_squares(rows, [math.log(a / (1 - a)) for a in kept]), dict(measured))


def _acceptance_row(shape: DraftShape) -> list[float]:
    return [1.0, math.log(shape.layers), math.log(shape.width)]


def alpha_of(tau: float, length: int) -> float:
    """The constant acceptance whose chain of this length gives this tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tau(middle, length) < tau else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape and what is predicted of it; `length` is its best draft length."""

    shape: DraftShape
    body_parameters: int
    step_seconds: float
    alpha: float
    length: int
    tau: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        own = {"layers": self.shape.layers, "width": self.shape.width}
        names = ("body_parameters", "step_seconds", "alpha", "length", "tau", "tokens_per_second")
        return own | {name: getattr(self, name) for name in names}


def rank(
    shapes: Sequence[DraftShape],
    latency: Latency,
    acceptances: Acceptances,
    max_parameters: int | None = None,
) -> list[Candidate]:
    """Candidates by predicted tokens per second, the best first."""
    found = [_candidate(shape, latency, acceptances.alpha(shape)) for shape in shapes]
    fitting = [c for c in found if max_parameters is None or c.body_parameters <= max_parameters]
    return sorted(fitting, key=lambda c: -c.tokens_per_second)


def _candidate(shape: DraftShape, latency: Latency, alpha: float) -> Candidate:
    step = latency.step(shape)
    rate, length = max(
        (expected_tau(alpha, k) / (k * step + fixed), k) for k, fixed in latency.verify.items()
    )
    parameters = shape.body_parameters(latency.target)
    return Candidate(shape, parameters, step, alpha, length, expected_tau(alpha, length), rate)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Agreement of two rankings: 1 the same, 0 none, -1 reversed."""
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    signs = [
        math.copysign(1.0, (first[i] - first[j]) * (second[i] - second[j]))
        for i, j in pairs
        if first[i] != first[j] and second[i] != second[j]
    ]
    return sum(signs) / max(1, len(pairs))
