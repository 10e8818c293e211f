"""Request, Row, Completion: one sequence before, while and after it is generated."""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.runtime.sampling import Sampling
from specctl.runtime.stats import RowStats


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it. Requests of one `conversation` (a name that
    nobody else can guess) may share what a drafter remembers of them; None shares nothing."""

    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished row: `tokens` are the emitted ones (an ending EOS included), `finish_reason` is
    "eos", "stop", "length" or "context"."""

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str
    stats: RowStats


@dataclass(slots=True)
class Row:
    """A live sequence. One writer: the engine.

    Invariant between rounds: kept_len == len(tokens) - 1; the last token has no cache entry yet.
    """

    index: int
    slot: int
    request: Request
    tokens: list[int]
    kept_len: int
    stats: RowStats
    num_rounds: int = 0
    finished: str | None = None

    @classmethod
    def of(cls, index: int, slot: int, request: Request) -> Row:
        """A row about to join: its prompt is read up to the last token."""
        tokens = list(request.tokens)
        return cls(index, slot, request, tokens, len(tokens) - 1, RowStats())

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def room(self) -> int:
        """Tokens that this row may still emit by its own limit."""
        return self.request.sampling.max_new_tokens - self.num_new

    def completion(self) -> Completion:
        assert self.finished is not None, "a live row has no completion"
        new = tuple(self.tokens[self.prompt_len :])
        return Completion(self.request, new, self.finished, self.stats)
