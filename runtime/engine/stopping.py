"""Where a row ends: EOS, stop strings, its own limit and the context, applied in token order.

An EOS behind a text that its grammar does not accept is no end of a text but the only token left
where the grammar could not be followed further: the row ends with "grammar", which is a failure.

The only place that decides this. A token after the first that ends the row is never emitted,
counted or fed to anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.runtime.engine.request import Row
from specctl.runtime.target.target import Target

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar import Grammar


def cut(row: Row, new: Sequence[int], target: Target) -> tuple[list[int], str | None]:
    """The tokens of `new` that are emitted, and why the row ended (None = it goes on)."""
    sampling = row.request.sampling
    room = min(row.room, target.spec.max_positions - len(row.tokens))
    kept: list[int] = []
    for token in new:
        kept.append(token)
        if token in target.eos_ids:
            if sampling.grammar is not None and not _is_accepted(row, kept, sampling.grammar):
                return kept, "grammar"
            if not sampling.ignore_eos:
                return kept, "eos"
        if sampling.stop and _ends_with_stop(row, kept, sampling.stop, target):
            return kept, "stop"
        if len(kept) >= room:
            return kept, "length" if len(kept) >= row.room else "context"
    return kept, None


def _is_accepted(row: Row, kept: Sequence[int], grammar: Grammar) -> bool:
    """The text in front of the EOS that it ends with is one of the grammar; an EOS behind another
    one says nothing new."""
    *text, end = [*row.tokens[row.prompt_len :], *kept]
    return not grammar.eos_ids.isdisjoint(text) or grammar.accepts(text, end)


def _ends_with_stop(row: Row, kept: Sequence[int], stops: Sequence[str], target: Target) -> bool:
    """A stop string occurs in the last few tokens: every token covers at least one byte of it."""
    window = max(len(stop.encode()) for stop in stops) + 4
    generated = [*row.tokens[row.prompt_len :][-window:], *kept][-window:]
    text = target.decode(generated)
    return any(stop in text for stop in stops)


def trim_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
