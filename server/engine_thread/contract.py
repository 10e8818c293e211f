"""What a client of the engine thread sees: asks go in, tickets hand out pieces.

Everything here is plain data and one small class, so that the HTTP layer, the page and the tests
can be written against a service without a model (`Serving` is what they are given).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from specctl.core.errors import ResourceError, SpecctlError
from specctl.core.forward.prompt_images import PromptImages
from specctl.runtime.engine.request import TokenLogprob
from specctl.runtime.engine.row_features import RowFeatures
from specctl.runtime.measure.stats import RowStats
from specctl.runtime.outline.answer import OutlineReport
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.requests.limits import Limits


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One continuation. Asks of one `conversation` (a name that nobody else can guess) may reuse
    what was read of them before. `logprobs`: None for none, k for the drawn token and the k best.
    `shown`: control tokens that are spelled in the text. `drafts`: False decodes it plainly; of a
    team the name of the member that drafts for it.
    `keeps_stop`: the text ends with what ended it, a stop string or a token, not in front of it.
    `tenant`: who may be drafted for from this answer (`Request.tenant`). `keeps_features`: the
    target's states may be kept for training. `num_begun`: how many of the last tokens are of a text
    that the answer goes on from, in the middle. `goes_on`: it is a further request of an answer
    that is under way (`Serving.answers`), which is served while the service drains. `images`: those
    of the prompt, whose placeholders are among its tokens. `adapter`: the one of the target's that
    reads and writes it.
    """

    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    conversation: str | None = None
    logprobs: int | None = None
    shown: frozenset[int] = frozenset()
    drafts: bool | str = True
    keeps_stop: bool = False
    tenant: str | None = None
    keeps_features: bool = False
    num_begun: int = 0
    goes_on: bool = False
    images: PromptImages | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round emitted for one ask. `text` holds complete characters only and ends before a
    stop string: the texts of all pieces joined are the text of the whole answer. `spans` is `text`
    by token ("" for a token that is held back; what is released late belongs to the later token).
    `starts` are the characters of the answer's text in front of each token, held back or not.
    `accepted`: the token was drafted and accepted. The last piece says in `finish_reason` why it is
    the last: "eos", "stop", "length", "context", "grammar" (which is a failure, too) or "error";
    and in `stop_reason` which stop string or stop token it was.
    """

    tokens: tuple[int, ...]
    accepted: tuple[bool, ...]
    text: str
    spans: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    starts: tuple[int, ...] = ()
    stop_reason: str | int | None = None


class Busy(ResourceError):
    """The queue is full, or an ask waited too long in it. Try again in `retry_after` seconds."""

    def __init__(self, retry_after: int, what: str = "the queue of the server is full") -> None:
        self.retry_after = retry_after
        super().__init__(what, do=f"try again in {retry_after} s")


class Unavailable(ResourceError):
    """The service takes no asks now: it is "loading", "draining", "stopped" or "failed"."""

    def __init__(self, state: str) -> None:
        self.state = state
        super().__init__(
            "the server takes no requests", found=f"it is {state}", do="try again later"
        )


class TooLong(SpecctlError):
    """Prompt and answer together can never fit."""

    def __init__(self, found_tokens: int, allowed_tokens: int, new_tokens: int = 0) -> None:
        self.found_tokens, self.allowed_tokens = found_tokens, allowed_tokens
        self.new_tokens = new_tokens
        answer = f" and {new_tokens:,} to be generated" if new_tokens else ""
        super().__init__(
            "the prompt does not fit the context of the server",
            found=f"{found_tokens:,} prompt tokens{answer}",
            expected=f"at most {allowed_tokens:,} together",
            do="shorten the prompt"
            + (", or ask for fewer new tokens" if found_tokens < allowed_tokens else ""),
        )


class Ticket:
    """One ask on its way: `async for piece in ticket`. Belongs to the event loop that submitted it.

    Iterating ends after the piece with a `finish_reason`, or after `cancel`; it raises Busy where
    the ask waited too long (then there was no piece). `stats` is there when it has finished, and
    `features` where they are kept, and `outline` where it was written from one; `since`: when it
    was made, in seconds of the monotonic clock.
    """

    def __init__(self, ask: GenerateRequest, on_cancel: Callable[[Ticket], None]) -> None:
        self.ask, self.stats, self.since = ask, RowStats(), time.monotonic()
        self.failure: SpecctlError | None = None
        self.features: RowFeatures | None = None
        self.outline: OutlineReport | None = None
        self.loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | SpecctlError | None] = asyncio.Queue()
        self._on_cancel, self._is_over = on_cancel, False

    def cancel(self) -> None:
        """Give up. From any thread, at any time, any number of times."""
        self._on_cancel(self)

    def deliver(self, piece: Piece | SpecctlError | None) -> None:
        """Only the service calls it, in this ticket's loop. None ends the iteration."""
        self._pieces.put_nowait(piece)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Piece:
        piece = None if self._is_over else await self._pieces.get()
        if isinstance(piece, Piece):
            self._is_over = piece.finish_reason is not None
            return piece
        self._is_over = True
        if piece is not None:
            raise piece
        raise StopAsyncIteration


@dataclass(frozen=True, slots=True)
class Status:
    """`state` is "loading", "ready", "draining", "stopped" or "failed"; `context` the most tokens
    of prompt and answer together; `why_off` says why nothing is drafted, None while it is;
    `drafter` names what drafts, None where nothing does; `drafters` those that a request may
    choose."""

    state: str
    running: int
    waiting: int
    slots: int
    context: int
    speculation: str
    why_off: str | None = None
    drafter: str | None = None
    drafters: tuple[str, ...] = ()


@dataclass(slots=True)
class Counters:
    """Totals since the start. One writer: the engine thread; anybody may read.

    `rounds` counts target forwards of rows (tau = tokens / rounds), `steps` those of the whole
    batch, `drafts` the rounds that drafted, `spec_off` those that did not, `spec_disabled` the rows
    that lost a failing drafter. `requests` counts by outcome: a finish reason, "cancelled",
    "timeout" or "refused"; `exchanges` drafters that came in another's place; `chosen` what rows
    did that chose a drafter, by its name.
    """

    rounds: int = 0
    steps: int = 0
    drafts: int = 0
    spec_off: int = 0
    spec_disabled: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tested_per_position: list[int] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    exchanges: int = 0
    chosen: dict[str, RowStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """An ask that has left, for metrics. `inter_token_seconds` has one entry per token after the
    first piece: the time since the piece before, shared by the tokens that came together.
    `adapter`: the one that answered, None for the target itself."""

    outcome: str
    stats: RowStats
    prompt_tokens: int
    queue_seconds: float
    first_token_seconds: float | None
    inter_token_seconds: tuple[float, ...]
    adapter: str | None = None


class Serving(Protocol):
    """What the HTTP layer is given. `on_finish` callbacks run in the engine thread: be quick.
    `failure` says why the state is "failed", None while it is not. `answers`: those made of several
    requests that are under way, kept by whoever makes the requests, in the event loop."""

    target: Target
    limits: Limits
    counters: Counters
    failure: str | None
    on_finish: list[Callable[[Finished], None]]
    answers: set[Ticket]

    def start(self) -> None:
        """Begin to load; the state becomes "ready" when asks are served."""

    async def submit(self, ask: GenerateRequest) -> Ticket:
        """A ticket of an ask that will be served. Raises Busy, Unavailable or TooLong."""

    async def drain(self, seconds: float) -> bool:
        """Refuse new asks, let the others finish: True if all did within that time."""

    def stop(self) -> None:
        """End at once; what is left unfinished is cancelled. Any number of times."""

    def status(self) -> Status: ...
