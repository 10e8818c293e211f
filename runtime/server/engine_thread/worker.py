"""Worker: the engine thread. Between two rounds it takes what lies on the desk; after each round it
posts the pieces. Nobody else touches the engine."""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from itertools import count

from specctl.core.errors import ResourceError, SpecctlError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import Guard, place_of
from specctl.runtime.engine.request import Emission, Row
from specctl.runtime.server.engine_thread.contract import Busy, Counters, Finished, Piece, Ticket
from specctl.runtime.server.engine_thread.job import ServerJob
from specctl.runtime.server.engine_thread.request_queue import RequestQueue
from specctl.runtime.target.text_stream import TextStream, TokenDecoder

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
    ) -> None:
        self.engine, self.guard, self.desk, self.counters = engine, guard, desk, counters
        counters.spec_disabled = guard.num_disabled  # not 0 where the drafter could not be opened
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
        self.end()

    def end(self) -> None:
        """Let go of everybody: cancelled, or failed where the service has."""
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
        self.counters.spec_disabled = self.guard.num_disabled

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
        stream = TextStream(self._decoder(ticket.ask.shown), ticket.ask.sampling.stop)
        job = ServerJob(next(self._numbers), ticket, stream, time.monotonic())
        self.jobs[job.index], self._index_of[ticket] = job, job.index
        try:
            self.engine.submit(job.index, job.request)
        except SpecctlError as error:
            self._leave(job, "error", error)

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
            job.ticket.stats = job.row.stats
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
