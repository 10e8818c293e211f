"""One timed run, and what is counted in it: by answer, by position in the draft, by the length of
the context in which a round was played.

Errors are standard errors by the jackknife over questions: of a ratio of sums (tokens by rounds,
tokens by seconds) the figure is computed once without each question. Rounds of one answer depend
on each other, so they are no sample; questions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from specctl.runtime.measure.round_cost import Spent
from specctl.runtime.measure.stats import add_counts, shares, well_counted

CONTEXTS = (0, 512, 1024, 2048, 4096, 8192)  # tokens from which a range of contexts begins


def context_range(length: int) -> int:
    """The index in CONTEXTS of the range in which a context of that length lies."""
    return sum(length >= start for start in CONTEXTS) - 1


def context_name(index: int) -> str:
    """Such as "512-1k"."""
    names = [f"{start // 1024}k" if start >= 1024 else str(start) for start in CONTEXTS]
    return f"{names[index]}-{names[index + 1]}" if index + 1 < len(names) else f"{names[index]}+"


@dataclass(slots=True)
class AnswerCount:
    """Of one answer, or of several: tokens and rounds, the same by range of contexts, seconds (0.0
    where rows are decoded together). One writer: the run that counts."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    context_tokens: list[int] = field(default_factory=lambda: [0] * len(CONTEXTS))
    context_rounds: list[int] = field(default_factory=lambda: [0] * len(CONTEXTS))

    def count(self, context: int, tokens: int) -> None:
        """A round in a context of that many tokens, which brought `tokens`."""
        at = context_range(context)
        self.tokens += tokens
        self.rounds += 1
        self.context_tokens[at] += tokens
        self.context_rounds[at] += 1


def added(counts: Sequence[AnswerCount]) -> AnswerCount:
    """Their sum."""
    return AnswerCount(
        sum(one.tokens for one in counts),
        sum(one.rounds for one in counts),
        sum(one.seconds for one in counts),
        [sum(column) for column in zip(*(one.context_tokens for one in counts), strict=True)]
        or [0] * len(CONTEXTS),
        [sum(column) for column in zip(*(one.context_rounds for one in counts), strict=True)]
        or [0] * len(CONTEXTS),
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed run: tokens and seconds, and what the engine counted (None or nothing where
    unknown). `answers` are in the order of the prompts."""

    tokens: int
    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    tau: float | None = None
    draft_share: float | None = None
    accepted_at: tuple[int, ...] = ()
    tested_at: tuple[int, ...] = ()
    answers: tuple[AnswerCount, ...] = ()
    spent: Spent | None = None

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Accepted / tested at each position."""
        return shares(self.accepted_at, self.tested_at)

    @property
    def well_counted(self) -> tuple[float, ...]:
        """The same of the positions that were tested often."""
        return well_counted(self.accepted_at, self.tested_at)


def joined(parts: Sequence[Timed]) -> Timed:
    """Several runs as one, one after the other."""
    seconds = sum(one.seconds for one in parts)
    rounds = sum(one.tokens / one.tau for one in parts if one.tau)
    tokens = sum(one.tokens for one in parts)
    known = all(one.tau for one in parts)
    spent = [one.spent for one in parts if one.spent is not None]
    drafting = [one.draft_share * one.seconds for one in parts if one.draft_share is not None]
    return Timed(
        tokens,
        seconds,
        tuple(ids for one in parts for ids in one.token_ids),
        tokens / rounds if known and rounds else None,
        sum(drafting) / seconds if len(drafting) == len(parts) and seconds else None,
        add_counts(one.accepted_at for one in parts),
        add_counts(one.tested_at for one in parts),
        tuple(answer for one in parts for answer in one.answers),
        Spent.sum(spent) if len(spent) == len(parts) and parts else None,
    )


def jackknife(count: int, figure: Callable[[Sequence[int]], float]) -> float | None:
    """The standard error of a figure of `count` questions; `figure` computes it from those of these
    indices. None of fewer than two."""
    if count < 2:
        return None
    every = range(count)
    left = [figure([i for i in every if i != out]) for out in every]
    mean = sum(left) / count
    return sqrt((count - 1) / count * sum((one - mean) ** 2 for one in left))


def tau_error(answers: Sequence[AnswerCount]) -> float | None:
    """The standard error of tau over these answers, each of a question."""

    def tau(kept: Sequence[int]) -> float:
        rounds = sum(answers[i].rounds for i in kept)
        return sum(answers[i].tokens for i in kept) / max(1, rounds)

    return jackknife(len(answers), tau)


def speedup_error(answers: Sequence[AnswerCount], plain: Sequence[AnswerCount]) -> float | None:
    """The standard error of the speed-up over plain decoding of the same questions; None where
    rows were decoded together, so that a question has no time of its own."""
    if len(answers) != len(plain) or not all(one.seconds > 0 for one in (*answers, *plain)):
        return None

    def speedup(kept: Sequence[int]) -> float:
        ours, theirs = ([side[i] for i in kept] for side in (answers, plain))
        return _speed(ours) / _speed(theirs)

    return jackknife(len(answers), speedup)


def _speed(answers: Sequence[AnswerCount]) -> float:
    return sum(one.tokens for one in answers) / sum(one.seconds for one in answers)
