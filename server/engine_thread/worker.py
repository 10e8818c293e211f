"""Worker: the engine thread. Between two rounds it takes what lies on the desk; after each round it
posts the pieces. Nobody else touches the engine. A `ServerJob` is one ask in it, from the queue to
its last piece."""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from specctl.core.errors import ResourceError, RowsError, SpecctlError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard, place_of
from specctl.runtime.engine.image_rows import with_images
from specctl.runtime.engine.request import Emission, Request, Row
from specctl.runtime.engine.team_drafter import drafter_names
from specctl.runtime.measure.stats import RowStats
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder
from specctl.server.engine_thread.contract import (
    Busy,
    Counters,
    Finished,
    Piece,
    Ticket,
    Unavailable,
)
from specctl.server.engine_thread.exchange import Exchange
from specctl.server.engine_thread.request_queue import RequestQueue


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
        given = self.ticket.ask
        shown = given.logprobs, given.drafts, given.tenant
        return Request(
            given.tokens,
            given.sampling,
            given.conversation,
            *shown,
            keeps_features=given.keeps_features,
            adapter=given.adapter,
        )

    def seat(self, row: Row) -> None:
        """It has got a slot."""
        self.row, self.seated = row, time.monotonic()

    def piece(self, emission: Emission) -> Piece:
        """What a round emitted, as the client gets it."""
        now, tokens, reason = time.monotonic(), emission.tokens, emission.row.finished
        spans, starts = self._texts(tokens, reason)
        if self.first is None:
            self.first = now
        else:
            self.gaps.extend([(now - self.latest) / len(tokens)] * len(tokens))
        self.latest, self.num_tokens = now, self.num_tokens + len(tokens)
        accepted = tuple(i < emission.num_accepted for i in range(len(tokens)))
        return Piece(
            tokens,
            accepted,
            "".join(spans),
            tuple(spans),
            emission.logprobs,
            reason,
            tuple(starts),
            self._stop_reason(tokens, reason),
        )

    def _texts(self, tokens: Sequence[int], reason: str | None) -> tuple[list[str], list[int]]:
        """The text that each token sets free, and where in the answer it stands. A token that ends
        the answer is no part of its text, as in vLLM."""
        spans, starts = list[str](), list[int]()
        is_end = reason == "eos" or (reason == "stop" and self._is_stop_token(tokens[-1]))
        num_said = len(tokens) - (is_end and not self.ticket.ask.keeps_stop)
        for place, token in enumerate(tokens):
            starts.append(self.text.position)
            spans.append(self.text.add(token) if place < num_said else "")
        if reason is not None and spans:
            spans[-1] += self.text.end()
        return spans, starts

    def _is_stop_token(self, token: int) -> bool:
        return token in self.ticket.ask.sampling.stop_token_ids

    def _stop_reason(self, tokens: Sequence[int], reason: str | None) -> str | int | None:
        """The stop string or the stop token; None where the text ended by itself or at a limit."""
        if reason != "stop":
            return None
        return tokens[-1] if self._is_stop_token(tokens[-1]) else self.text.stop

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
        given, gaps = self.ticket.ask, tuple(self.gaps)
        waited = ended - self.asked
        return Finished(outcome, stats, len(given.tokens), waited, first, gaps, given.adapter)


def _add(total: list[int], now: list[int], before: list[int]) -> None:
    total.extend([0] * (len(now) - len(total)))
    for at, number in enumerate(now):
        total[at] += number - (before[at] if at < len(before) else 0)


LOG = logging.getLogger("specctl.server")
CRASHES = 3  # rounds in a row that fail before the service gives up

Letter = tuple[Ticket, Piece | SpecctlError | None]


class Worker:
    """Serves until the desk closes. One writer of the counters, but for what the desk refused."""

    def __init__(
        self,
        engine: Engine,
        guard: Guard,
        desk: RequestQueue,
        counters: Counters,
        on_finish: Sequence[Callable[[Finished], None]],
        queue_timeout: float,
        exchange: Callable[[Worker, Exchange], None],
    ) -> None:
        self._exchange = exchange  # carries it out, by `replace`
        self.engine, self.guard, self.desk, self.counters = engine, guard, desk, counters
        counters.spec_disabled = guard.num_disabled  # not 0 where the drafter could not be opened
        self._disabled_before = 0  # rows that lost a drafter that is not there any more
        self.on_finish, self.queue_timeout = on_finish, queue_timeout
        self._decoders = dict[frozenset[int], TokenDecoder]()
        self.jobs: dict[int, ServerJob] = {}
        self._index_of: dict[Ticket, int] = {}
        self._numbers, self._crashes = count(), 0
        self._out: dict[AbstractEventLoop, list[Letter]] = {}

    def serve(self) -> None:
        """Until the service stops; what is unfinished then is cancelled."""
        while self.desk.is_open:
            asked, given_up = self.desk.take(wait=not self.engine.is_busy)
            for ticket in asked:
                self._enter(ticket)
            for ticket in given_up:
                self._cancel(ticket)
            self._expire()
            self._round()
            self._flush()
            if not self.engine.is_busy and (order := self.desk.take_order()) is not None:
                self._exchange(self, order)
        self.end()

    def end(self) -> None:
        """Let go of everybody: cancelled, or failed where the service has."""
        if (order := self.desk.take_order()) is not None:
            order.settle(Unavailable(self.desk.state))
        for ticket in self.desk.take(wait=False)[0]:
            self._enter(ticket)
        for job in list(self.jobs.values()):
            if self.desk.state == "failed":
                self._fail(job, "the service has failed")
            else:
                self._leave(job, "cancelled", None)
        self._flush()

    @property
    def num_running(self) -> int:
        return len(self.engine.rows) + len(self.engine.scheduler.prefilling)

    # -- one round ------------------------------------------------------------------------------

    def _round(self) -> None:
        began = time.monotonic()
        try:
            emissions = self.engine.step()
        except RowsError as error:
            self._refuse(error)
            return
        except Exception as error:
            self._survive(error)
            return
        for progress in self.engine.scheduler.prefilling:
            self._seat(progress.row)
        for emission in emissions:
            self._crashes = 0
            self._seat(emission.row)
            job = self.jobs[emission.row.index]
            try:
                self._tell(job, emission)
            except Exception as error:
                LOG.error("an answer failed: %s", place_of(error), exc_info=error)
                self._fail(job, place_of(error))
        self.counters.steps += bool(emissions)
        self.counters.seconds += time.monotonic() - began
        self.counters.spec_disabled = self._disabled_before + self.guard.num_disabled

    def replace(self, engine: Engine, guard: Guard) -> None:
        """Go on with another engine and what guards its drafter; no row is active."""
        if guard is not self.guard:
            self._disabled_before += self.guard.num_disabled
        self.engine, self.guard = engine, guard

    def _tell(self, job: ServerJob, emission: Emission) -> None:
        piece = job.piece(emission)
        job.count(self.counters)
        if piece.finish_reason is None:
            self._post(job.ticket, piece)
        else:
            self._leave(job, piece.finish_reason, piece)

    def _seat(self, row: Row) -> None:
        job = self.jobs[row.index]
        if job.row is None:
            job.seat(row)
            self.counters.prompt_tokens += row.prompt_len
            self.counters.reused_tokens += row.reused_len

    def _expire(self) -> None:
        """Refuse who waited too long and gets no slot in this round either; the queue is in order
        of arrival."""
        late, scheduler = time.monotonic() - self.queue_timeout, self.engine.scheduler
        while len(scheduler.waiting) > len(scheduler.free):
            job = self.jobs[scheduler.waiting[len(scheduler.free)][0]]
            if job.asked >= late:
                return
            self.engine.cancel(job.index)
            refusal = Busy(self.desk.retry_after(), "the server was busy for too long")
            self._leave(job, "timeout", refusal)

    def _refuse(self, error: RowsError) -> None:
        """Some rows cannot be decoded, and say why; the others go on, and so does the service."""
        LOG.error("an answer could not be given: %s", error)
        for job in [self.jobs[index] for index in error.rows]:
            self.engine.cancel(job.index)
            job.ticket.failure = error
            self._leave(job, "error", error)

    def _survive(self, error: Exception) -> None:
        """A round failed. Out of it go the rows that can be told to be the cause: those whose own
        code runs in it, those being read, those whose text is torn. If there are none, all go."""
        self._crashes += 1
        LOG.error("a round failed: %s", place_of(error), exc_info=error)
        live = {row.index: row for row in self.engine.rows}
        waiting = {index for index, _ in self.engine.scheduler.waiting}
        inside = [job for job in self.jobs.values() if job.index not in waiting]
        suspects = [job for job in inside if _is_suspect(job, live.get(job.index))]
        for job in suspects or inside:
            self._fail(job, place_of(error))
        if self._crashes >= CRASHES:
            self.desk.enter("failed")

    def _fail(self, job: ServerJob, found: str) -> None:
        """This answer ends here; its ticket says why."""
        self.engine.cancel(job.index)
        do = "send the request again; if it fails again, tell who runs the server"
        job.ticket.failure = ResourceError("the answer could not be finished", found=found, do=do)
        self._leave(job, "error", Piece((), (), "", (), None, "error"))

    # -- coming and going -----------------------------------------------------------------------

    def _enter(self, ticket: Ticket) -> None:
        request = ticket.ask
        begun = request.tokens[len(request.tokens) - request.num_begun :]
        how = self._decoder(request.shown), request.sampling.stop, request.keeps_stop, begun
        stream = TextStream(*how)
        job = ServerJob(next(self._numbers), ticket, stream, ticket.since)  # an exchange held it
        self.jobs[job.index], self._index_of[ticket] = job, job.index
        try:
            wanted = replace(job.request, drafts=self._drafts(request.drafts))
            own = with_images(self.engine.target, wanted, request.images)
            self.engine.submit(job.index, own)
        except SpecctlError as error:
            self._leave(job, "error", error)

    def _drafts(self, chosen: bool | str) -> bool | str:
        """What a request has chosen, among the drafters of now: another may have come while it
        waited, or the one that it chose could not be opened. The text is the same."""
        names = drafter_names(self.engine.drafter)
        return bool(names) if isinstance(chosen, str) and chosen not in names else chosen

    def _decoder(self, shown: frozenset[int]) -> TokenDecoder:
        """One for each set of control tokens that are spelled."""
        if shown not in self._decoders:
            self._decoders[shown] = TokenDecoder.of(self.engine.target, shown)
        return self._decoders[shown]

    def _cancel(self, ticket: Ticket) -> None:
        index = self._index_of.get(ticket)
        if index is not None:
            self.engine.cancel(index)
            self._leave(self.jobs[index], "cancelled", None)

    def _leave(self, job: ServerJob, outcome: str, last: Piece | SpecctlError | None) -> None:
        """The ask is over: its ticket gets the last it will get, everybody is told."""
        del self.jobs[job.index], self._index_of[job.ticket]
        if job.row is not None:
            job.ticket.stats, job.ticket.features = job.row.stats, job.row.features
            if isinstance(name := job.row.request.drafts, str):
                self.counters.chosen.setdefault(name, RowStats()).add(job.row.stats)
        self._post(job.ticket, last)
        self.counters.requests[outcome] = self.counters.requests.get(outcome, 0) + 1
        finished = job.finished(outcome)
        for callback in self.on_finish:
            try:
                callback(finished)
            except Exception as error:  # whoever counts must not stop who serves
                LOG.error("a callback failed: %s", place_of(error), exc_info=error)
        self.desk.close(time.monotonic() - job.asked)

    # -- the post -------------------------------------------------------------------------------

    def _post(self, ticket: Ticket, letter: Piece | SpecctlError | None) -> None:
        self._out.setdefault(ticket.loop, []).append((ticket, letter))

    def _flush(self) -> None:
        """One call into each event loop; a loop that is closed wants nothing any more."""
        out, self._out = self._out, {}
        for loop, letters in out.items():
            try:
                loop.call_soon_threadsafe(_deliver, letters)
            except RuntimeError:
                for ticket, _ in letters:
                    self.desk.give_up(ticket)


def _is_suspect(job: ServerJob, row: Row | None) -> bool:
    """No live row (its prompt was being read), own code in the round, or tokens without a piece."""
    sampling = job.ticket.ask.sampling
    has_code = bool(sampling.processors) or sampling.grammar is not None
    return row is None or has_code or row.num_new != job.num_tokens


def _deliver(letters: Sequence[Letter]) -> None:
    for ticket, letter in letters:
        ticket.deliver(letter)
