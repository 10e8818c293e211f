"""Figures of a training run: sums with counts, the JSONL log, simulated and measured tau."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.storage.files import write_bytes
from specctl.train.distributed.ranks import Ranks
from specctl.train.metrics.log import read_log as read_log

Window = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Totals:
    """Name -> (sum, count) of one step, over its micro-batches and over all ranks."""

    pairs: Mapping[str, Tensor] = field(default_factory=dict)

    def plus(self, out: LossOut, batch: TrainBatch) -> Totals:
        """These totals and those of one more micro-batch."""
        num_tokens = (batch.own(batch.document_BS) >= 0).sum().to(out.sum.device)
        fresh = {"loss": (out.sum, out.count), "tokens": (num_tokens, num_tokens), **out.metrics}
        pairs = dict(self.pairs)
        for name, (total, count) in fresh.items():
            wide = torch.float32 if total.device.type == "mps" else torch.float64
            pair = torch.stack([total.detach().to(wide), count.detach().to(wide)])
            pairs[name] = pairs[name] + pair if name in pairs else pair
        return Totals(pairs)

    def over(self, ranks: Ranks) -> Totals:
        """The sums over all ranks, in one message."""
        if ranks.size == 1:
            return self
        names = sorted(self.pairs)
        table = ranks.sum_(torch.stack([self.pairs[name] for name in names]))
        return Totals(dict(zip(names, table, strict=True)))

    def to_floats(self) -> Window:
        """The pairs on the host."""
        names = list(self.pairs)
        rows = torch.stack([self.pairs[name] for name in names]).tolist()
        return {name: (row[0], row[1]) for name, row in zip(names, rows, strict=True)}


def merged(window: Window, more: Window) -> Window:
    """Sums and counts of two windows."""
    result = dict(window)
    for name, (total, count) in more.items():
        before = result.get(name, (0.0, 0.0))
        result[name] = (before[0] + total, before[1] + count)
    return result


def means(window: Window) -> dict[str, float]:
    """Name -> mean; names without a count are left out."""
    return {name: total / count for name, (total, count) in window.items() if count}


def alphas(averages: Mapping[str, float]) -> tuple[float, ...]:
    """Acceptance per drafted position, from the metrics `alpha`, `alpha/1`, `alpha/2` ..."""
    found = [averages["alpha"]] if "alpha" in averages else []
    while found and f"alpha/{len(found)}" in averages:
        found.append(averages[f"alpha/{len(found)}"])
    return tuple(found)


def simulated_tau(alpha: Sequence[float], length: int) -> float | None:
    """Tau of a chain of `length` drafts if position i passed with chance alpha[i], independently:
    1 + sum over k of alpha[0] * ... * alpha[k]; the last known alpha serves deeper positions."""
    if not alpha:
        return None
    chances = [alpha[min(i, len(alpha) - 1)] for i in range(length)]
    return 1.0 + sum(math.prod(chances[: k + 1]) for k in range(length))


class HeldOutMeasurement(Protocol):
    """What was measured between two steps. `key` names the figure of `to_json` that counts."""

    key: ClassVar[str]

    def beats(self, best: Mapping[str, Any]) -> bool:
        """Whether this is better than what an earlier `to_json` gave."""
        ...

    def to_json(self) -> dict[str, Any]: ...

    def log_line(self) -> dict[str, Any]:
        """What the log keeps of it; `key` is part of it, and of no other line."""
        ...


@dataclass(frozen=True, slots=True)
class SuiteTau:
    """Tau on so many questions of a public suite, decoded as the held-out prompts are."""

    name: str
    tau: float
    prompts: int


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """What a short real decode through the engine measured; or, `is_estimate`, the loss over text
    that was kept back, at temperature 1, where the target cannot be run here. `suite` decides
    nothing: the figures that count are those of held-out text."""

    key: ClassVar[str] = "tau"
    tau: float
    alpha: float
    accepted_per_position: tuple[float, ...]
    prompts: int
    tokens: int
    temperature: float
    is_estimate: bool = False
    suite: SuiteTau | None = None

    def beats(self, best: Mapping[str, Any]) -> bool:
        return bool(self.tau > best["tau"])

    def log_line(self) -> dict[str, Any]:
        line = {"tau": self.tau, "measured_alpha": list(self.accepted_per_position)}
        if self.suite is None:
            return line
        return line | {"suite": self.suite.name, "suite_tau": self.suite.tau}

    def to_json(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "alpha": self.alpha,
            "accepted_per_position": list(self.accepted_per_position),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "temperature": self.temperature,
            **({"is_estimate": True} if self.is_estimate else {}),
            **({} if self.suite is None else {"suite": asdict(self.suite)}),
        }


class MetricsLog:
    """OUT/metrics.jsonl: one object a line, `step` in each. One writer: the main rank's loop.

    A line that cannot be written now is kept and written with the next one: a full disk stops a
    run at its next save, on all ranks together, and not in the middle of a step of one.
    """

    measured: ClassVar[str] = MeasuredAcceptance.key  # what marks the line of a measurement

    def __init__(
        self, path: Path, is_main: bool = True, warn: Callable[[str], None] | None = None
    ) -> None:
        self.path, self.is_main, self._warn = path, is_main, warn
        self._waiting = b""

    def write(self, **values: Any) -> None:
        if not self.is_main:
            return
        clean = {name: _json_number(value) for name, value in values.items()}
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._append(self._waiting)
        except OSError as error:
            if self._warn is not None:
                self._warn(f"{self.path.name} cannot be written now: {error.strerror}")
            return
        self._waiting = b""

    def _append(self, body: bytes) -> None:
        """Add these lines, or none of them."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            left = memoryview(body)
            try:
                while len(left):
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def rewind(self, step: int, tau_step: int) -> None:
        """Forget what was logged after the state that the run continues from."""
        if not self.is_main or not self.path.exists():
            return
        kept = [
            line
            for line in read_log(self.path)
            if line["step"] <= (tau_step if self.measured in line else step)
        ]
        write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
