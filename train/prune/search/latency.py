"""Seconds of a draft step by shape, measured in the real engine and fitted for shapes never built.

    t_d(L, w) = a + b L + c L P(w) + d R w     P(w): parameters of a layer, R: rows of the head

Verification does not depend on the shape and is measured once, at every length; of each shape only
the slope of drafting between the shortest and the longest length is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from specctl.core.vocab import VocabMap
from specctl.drafters.small_lm import SmallLm, SmallLmOptions
from specctl.models.llama import LlamaModel, LlamaShape
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.prune.search.fits import Fit, least_squares
from specctl.train.prune.search.shape import DraftShape

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
