"""Request, Row, Emission, Completion: one sequence before, while and after it is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.forward.slot_state import StateSnapshot
from specctl.runtime.engine.row_features import RowFeatures
from specctl.runtime.measure.stats import RowStats
from specctl.runtime.sampling.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it. Requests of one `conversation` (a name that
    nobody else can guess) may share what a drafter remembers of them, and what a slot has cached of
    their common beginning; None shares nothing. `logprobs`: None for none, k for the drawn token
    and the k best. `drafts`: False decodes it plainly, whoever drafts for others; of
    a team the name of the member that is to draft for it. `tenant`: whose
    it is, where drafters remember answers (a name that nobody else can guess); None: its answer is
    not remembered. `written`: so many of the last tokens were generated before: the text goes on
    from there, with its own limits, penalties, stops, grammar and random numbers. `keeps_features`:
    the target's states at its tokens may be kept for training, where the engine keeps any.
    `images`: what stands at the placeholders among the tokens, for a target with its vision.
    `adapter`: which of the target's `row_adapters` reads and writes it; None: none of them."""

    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    conversation: str | None = None
    logprobs: int | None = None
    drafts: bool | str = True
    tenant: str | None = None
    written: int = 0
    keeps_features: bool = False
    images: PromptImages | None = None
    adapter: str | None = None


def check_fits(request: Request, context: int) -> None:
    """Refuse a prompt that a target with that context can never read and continue."""
    check_length(len(request.tokens), context)


def check_length(length: int, context: int) -> None:
    """Refuse a prompt of so many tokens."""
    if not 0 < length < context:
        raise SpecctlError(
            "the prompt does not fit the target's context",
            found=f"{length:,} tokens",
            expected=f"1 to {context - 1:,} tokens",
            do="shorten the prompt, or choose a target with a longer context",
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished row: `tokens` are the emitted ones (an ending EOS included), `finish_reason` is
    "eos", "stop", "length", "context", or "grammar" where the text broke off because its grammar
    could not be followed further."""

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str
    stats: RowStats


@dataclass(slots=True, eq=False)
class Row:
    """An active sequence. One writer: the scheduler that owns it.

    Invariant between rounds: kept_len == len(tokens) - 1; the last token has no cache entry yet.
    `reused_len` positions of the prompt were in the cache already; `prompt_taps` are kept where a
    later request may reuse them, `prompt_states` beside them where layers are recurrent;
    `features` where they are kept for training.
    """

    index: int
    slot: int
    request: Request
    tokens: list[int]
    kept_len: int
    stats: RowStats
    num_rounds: int = 0
    finished: str | None = None
    reused_len: int = 0
    prompt_taps: Mapping[int, Tensor] = field(default_factory=dict)
    prompt_states: StateSnapshot | None = None
    features: RowFeatures | None = None

    @classmethod
    def of(cls, index: int, slot: int, request: Request) -> Row:
        """A row about to join: its prompt is read up to the last token. What was written before
        took at most a round a token: rounds that count on from there have numbers of their own."""
        tokens = list(request.tokens)
        return cls(index, slot, request, tokens, len(tokens) - 1, RowStats(), request.written)

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens) - self.request.written

    @property
    def start_len(self) -> int:
        """Tokens that it joined with."""
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token before temperature and truncation, after bias, penalties and
    grammar, not below -9999; `top`: (token, log-probability) of the best ones, best first;
    `entropy` of that whole distribution, in bits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class Emission:
    """What a round gave one row: its new tokens, of which the first `num_accepted` were drafted
    (more were accepted where a stop cut them off), and why it ended, None while it goes on. Of
    `num_drafted` nodes those behind the last accepted one were rejected, if `is_rejected`."""

    row: Row
    tokens: tuple[int, ...]
    num_accepted: int
    finished: str | None
    num_drafted: int
    is_rejected: bool
    logprobs: tuple[TokenLogprob, ...] | None = None
