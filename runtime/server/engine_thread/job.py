"""ServerJob: one ask in the engine thread, from the queue to its last piece."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specctl.runtime.engine.request import Emission, Request, Row
from specctl.runtime.measure.stats import RowStats
from specctl.runtime.server.engine_thread.contract import Counters, Finished, Piece, Ticket
from specctl.runtime.target.text_stream import TextStream


@dataclass(slots=True, eq=False)
class ServerJob:
    """An ask and what it has got so far. One writer: the engine thread. `asked` and the other
    times are seconds of the monotonic clock; `counted` is what the counters know of it."""

    index: int
    ticket: Ticket
    text: TextStream
    asked: float
    row: Row | None = None
    seated: float | None = None
    first: float | None = None
    latest: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    counted: RowStats = field(default_factory=RowStats)

    @property
    def request(self) -> Request:
        ask = self.ticket.ask
        return Request(ask.tokens, ask.sampling, ask.conversation, ask.logprobs, ask.drafts)

    def seat(self, row: Row) -> None:
        """It has got a slot."""
        self.row, self.seated = row, time.monotonic()

    def piece(self, emission: Emission) -> Piece:
        """What a round emitted, as the client gets it."""
        now, tokens, reason = time.monotonic(), emission.tokens, emission.row.finished
        spans = [self.text.add(token) for token in tokens]
        if reason is not None and spans:
            spans[-1] += self.text.end()
        if self.first is None:
            self.first = now
        else:
            self.gaps.extend([(now - self.latest) / len(tokens)] * len(tokens))
        self.latest, self.num_tokens = now, self.num_tokens + len(tokens)
        accepted = tuple(i < emission.num_accepted for i in range(len(tokens)))
        text, logprobs = "".join(spans), emission.logprobs
        return Piece(tokens, accepted, text, tuple(spans), logprobs, reason)

    def count(self, counters: Counters) -> None:
        """Add to the counters what the row did since they were last told."""
        if self.row is None:
            return
        now, before = self.row.stats, self.counted
        drafted = now.drafted - before.drafted
        counters.rounds += now.rounds - before.rounds
        counters.drafts += drafted > 0
        counters.spec_off += drafted == 0
        counters.drafted += drafted
        counters.accepted += now.accepted - before.accepted
        counters.tokens += now.tokens - before.tokens
        _add(counters.tested_per_position, now.tested_at, before.tested_at)
        _add(counters.accepted_per_position, now.accepted_at, before.accepted_at)
        self.counted = RowStats(
            now.rounds, now.drafted, now.accepted, now.tokens, [*now.accepted_at], [*now.tested_at]
        )

    def finished(self, outcome: str) -> Finished:
        """The record of an ask that leaves."""
        stats = RowStats() if self.row is None else self.row.stats
        ended = time.monotonic() if self.seated is None else self.seated
        first = None if self.first is None else self.first - self.asked
        prompt_tokens, gaps = len(self.ticket.ask.tokens), tuple(self.gaps)
        return Finished(outcome, stats, prompt_tokens, ended - self.asked, first, gaps)


def _add(total: list[int], now: list[int], before: list[int]) -> None:
    total.extend([0] * (len(now) - len(total)))
    for at, count in enumerate(now):
        total[at] += count - (before[at] if at < len(before) else 0)
