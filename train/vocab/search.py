"""Search over vocabulary size, draft length and domain weights together (TPE).

The balance of coverage and draft latency (arXiv 2603.05210) has one integer variable as long as the
ranking of ids is given, and is then searched exhaustively (`train.predict`). With several knobs the
space is a product, and Optuna's Tree-structured Parzen Estimator samples it. A choice that covers
too little counts less than any that covers enough, and tells the sampler how much it lacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.installed import pip_install

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
    try:
        import optuna
    except ImportError as error:
        raise SpecctlError(
            "searching several knobs needs optuna",
            where="--search",
            found="no module optuna",
            expected="optuna",
            do=f"{pip_install('tune')}, or --search exhaustive",
        ) from error
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
