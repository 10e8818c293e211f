"""Relaxed rules: drafts that stand although the target chose otherwise. Approximate, all of them.

A relaxed rule is named with its numbers, `fly` or `fly:0.5` or `fly:0.5:4`. It keeps every draft
that the lossless rule would keep (`greedy`, and `target-only` for sampled rows) and lets more of
them stand; what a round adds behind them is the target's own choice (`reflect` has the target read
the draft once more before it chooses; `grouped` relaxes speculative sampling, and of sampled rows
neither holds). With numbers that let nothing stand the output is that of the lossless rule, token
by token. These rules are no entries of `verify.RULES`, so no proof counts them; every result of
theirs is marked approximate.
"""

from __future__ import annotations

from specctl.core.errors import RecipeError
from specctl.core.plugins import Plugins, plugins
from specctl.runtime.verify.relaxed.base import Relaxation, RelaxedRule

__all__ = ["RELAXED", "Relaxation", "RelaxedRule", "relaxation"]

RELAXED: Plugins[RelaxedRule] = plugins(__name__, "RELAXED")


def relaxation(rule: str) -> Relaxation | None:
    """The relaxed rule that is named so, with its numbers; None of any other rule."""
    name, *numbers = rule.split(":")
    if name not in RELAXED:
        return None
    entry = RELAXED[name]
    values = [knob.default for knob in entry.knobs]
    for at, number in enumerate(numbers):
        try:
            values[at] = entry.knobs[at].read(number)
        except (IndexError, ValueError) as error:
            usual = ":".join([name, *(f"{k.default:g}" for k in entry.knobs)])
            raise RecipeError(
                f"relaxed rule {name} has other numbers",
                where="serve.rule",
                found=rule[:80],
                expected=":".join([name, *(knob.meaning for knob in entry.knobs)]),
                do=f"write rule: {usual}, on a command line --rule {usual}",
            ) from error
    return Relaxation(entry, tuple(values))
