"""Stop rules of chains, by name. One file per rule."""

from __future__ import annotations

from pathlib import Path

from specctl.core.errors import RecipeError, unknown
from specctl.core.plugins import Plugins, plugins
from specctl.runtime.stops.base import DraftStep, StopRule, Tested, tested_rows
from specctl.runtime.stops.learned import LearnedStop, read_stop

STOPS: Plugins[type[StopRule]] = plugins(__name__, "STOP", lambda entry: entry.make)


def make_stop(name: str, threshold: float | None = None, file: str | None = None) -> StopRule:
    """A fresh rule. `threshold` replaces its own; `file` holds the weights of a trained rule."""
    if name not in STOPS:
        listed = "specctl recipes schema --field serve"
        raise unknown("stop rule", name, STOPS, "serve.stop", listed)
    kind = STOPS[name]
    if threshold is not None and "threshold" not in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        raise RecipeError(
            f"stop rule {name} has no threshold",
            where="serve.threshold",
            found=f"{threshold:g}",
            expected="no threshold",
            do="remove it",
        )
    rule = kind() if threshold is None else kind(threshold=threshold)  # type: ignore[call-arg]
    if not isinstance(rule, LearnedStop):
        if file is not None:
            raise RecipeError(
                f"stop rule {name} is not trained",
                where="serve.stop_file",
                found=file,
                expected="no file",
                do="remove it, or name a trained rule: " + ", ".join(trained_stops()),
            )
        return rule
    if file is None:
        return rule
    found, tensors = read_stop(Path(file))
    if found != name:
        raise RecipeError(
            "the file holds another stop rule",
            where=file,
            found=found or "no name",
            expected=name,
            do=f"write stop: {found}" if found in STOPS else "train it with specctl train-stop",
        )
    return rule.loaded(tensors)


def trained_stops() -> list[str]:
    return [name for name, kind in STOPS.working().items() if issubclass(kind, LearnedStop)]


__all__ = [
    "STOPS",
    "DraftStep",
    "LearnedStop",
    "StopRule",
    "Tested",
    "make_stop",
    "tested_rows",
    "trained_stops",
]
