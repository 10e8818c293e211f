"""OutlinedTicket: one answer from an outline (runtime/outline), made of several requests.

It runs in the event loop of whoever submitted it: the outline is a request of its own, then the
points of a wave are requests that the engine decodes with everybody else's, as rows of one batch.
What they write comes back in the order of the points, as pieces of one answer. Cancelling it
cancels all of them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.runtime.measure.stats import RowStats, add_counts
from specctl.runtime.outline.answer import AnswerPart, OutlinedAnswer
from specctl.runtime.outline.in_order import InOrder
from specctl.runtime.target.text.stop_strings import HeldText, StopStrings, special_tokens
from specctl.server.engine_thread.contract import Busy, GenerateRequest, Piece, Serving, Ticket

PAUSE = 0.25  # seconds between two tries of a point that finds the queue full
FAILED = ("error", "grammar")
InThread = Callable[..., Awaitable[Any]]
Arrived = tuple[int, Piece | Exception | None]


class _Ended(Exception):
    """One of the requests failed, or the service stopped: so does the answer. `piece` says it."""

    def __init__(self, piece: Piece | None = None) -> None:
        super().__init__()
        self.piece = piece


class OutlinedTicket(Ticket):
    """A ticket whose pieces are those of the points, in order. The first piece holds the tokens of
    the outline and no text. `in_thread` runs what needs the tokenizer. Made by `submitted`."""

    def __init__(
        self,
        service: Serving,
        request: GenerateRequest,
        answer: OutlinedAnswer,
        in_thread: InThread,
    ) -> None:
        super().__init__(request, lambda _: self._give_up())
        self.service, self.answer, self.in_thread = service, answer, in_thread
        self._request = request
        self._name = request.conversation or secrets.token_hex(16)
        self._tickets: list[Ticket] = []  # of all requests
        self._task: asyncio.Task[None] | None = None
        hidden = special_tokens(service.target.tokenizer)
        hidden = {token: word for token, word in hidden.items() if token not in request.shown}
        self._held = HeldText(StopStrings.of(request.sampling.stop, hidden))
        self._stop_reason: str | int | None = None
        self._order = InOrder[Piece]([])
        self._last = 0  # the last point of the answer: those behind it are not needed
        self._texts, self._counts = defaultdict[int, str](str), defaultdict[int, int](int)
        self._written = set[int]()  # the points that have ended
        self._undelivered: list[Piece] = []

    @classmethod
    async def submitted(
        cls, service: Serving, request: GenerateRequest, answer: OutlinedAnswer, in_thread: InThread
    ) -> OutlinedTicket:
        """With its first request in the queue; raises what `Serving.submit` raises."""
        ticket = cls(service, request, answer, in_thread)
        part = await in_thread(answer.outline_part)
        first = await ticket._submit(answer.plain_part() if part is None else part)
        service.answers.add(ticket)
        ticket._task = asyncio.create_task(ticket._write(first, part is not None))
        ticket._task.add_done_callback(lambda _: service.answers.discard(ticket))
        return ticket

    def _give_up(self) -> None:
        """From any thread."""
        if self._task is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._task.cancel)

    async def _write(self, first: Ticket, is_outline: bool) -> None:
        try:
            if is_outline:
                await self._read_outline(first)
            if self.answer.outline is not None:
                await self._points()
            else:
                part = self.answer.plain_part()
                ticket = await self._submit_in_time(part) if is_outline else first
                await self._plain(ticket)
        except _Ended as ended:
            self.deliver(ended.piece)
        except SpecctlError as error:
            self.deliver(error)
        finally:
            for ticket in self._tickets:
                ticket.cancel()
            self.deliver(None)

    async def _submit(self, part: AnswerPart) -> Ticket:
        """A request of the answer, cut to the room that its prompt leaves."""
        room = max(1, self.service.status().context - len(part.tokens))
        most = min(part.sampling.max_new_tokens, room)
        sampling = replace(part.sampling, max_new_tokens=most)
        request = replace(
            self._request,
            tokens=part.tokens,
            sampling=sampling,
            conversation=self._name,
            keeps_features=False,
            num_begun=part.num_begun,
            goes_on=bool(self._tickets),
        )
        ticket = await self.service.submit(request)
        self._tickets.append(ticket)
        return ticket

    async def _submit_in_time(self, part: AnswerPart) -> Ticket:
        """An answer that has begun waits where the queue is full, as long as a request may wait in
        it."""
        until = time.monotonic() + self.service.limits.queue_timeout
        while True:
            try:
                return await self._submit(part)
            except Busy:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(PAUSE)

    def _checked(self, piece: Piece, ticket: Ticket) -> Piece:
        if piece.finish_reason in FAILED:
            self.failure = ticket.failure
            raise _Ended(piece)
        return piece

    # -- the outline, or none ---------------------------------------------------------------------

    async def _read_outline(self, ticket: Ticket) -> None:
        """Its tokens are counted, its text is not shown."""
        tokens, accepted, reason, is_over = list[int](), list[bool](), "", False
        async for piece in ticket:
            self._checked(piece, ticket)
            reason = piece.finish_reason or ""
            tokens += piece.tokens
            accepted += piece.accepted
            if not is_over and self.answer.add_outline(piece.spans):
                is_over = True
                ticket.cancel()
        if not is_over and not reason:
            raise _Ended
        self.answer.take_outline(is_cut=reason in ("length", "context"))
        read = slice(self.answer.outline_tokens)
        spans = ("",) * len(tokens[read])
        self.deliver(Piece(tuple(tokens[read]), tuple(accepted[read]), "", spans))

    async def _plain(self, ticket: Ticket) -> None:
        async for piece in ticket:
            self._checked(piece, ticket)
            self.answer.take_plain(len(piece.tokens))
            if piece.finish_reason is not None:
                self._conclude()
            self.deliver(piece)

    def _conclude(self) -> None:
        """What the answer took, in front of its last piece."""
        self.outline = self.answer.report()
        rows = [ticket.stats for ticket in self._tickets]
        self.stats = RowStats(
            sum(row.rounds for row in rows),
            sum(row.drafted for row in rows),
            sum(row.accepted for row in rows),
            sum(row.tokens for row in rows),
            [*add_counts(row.accepted_at for row in rows)],
            [*add_counts(row.tested_at for row in rows)],
        )

    # -- points -----------------------------------------------------------------------------------

    async def _points(self) -> None:
        outline = self.answer.outline
        assert outline is not None, "there are points"
        headings = [self.answer.heading(point) for point in outline.points]
        self._order = InOrder([[Piece((), (), text, (text,))] for text in headings])
        self._last = len(headings)
        for wave in outline.waves:
            numbers = [number for number in wave if number <= self._last]
            if numbers:
                parts = await self.in_thread(self.answer.parts, numbers)
                for number in set(numbers) - {part.number for part in parts}:
                    self._give(self._order.end(number - 1))
                await self._wave(parts)
        for number in self._counts.keys() - self._written:
            self.answer.take_cancelled(self._counts[number])
        text, rest = self._held.end(), self._undelivered
        stopped = self._held.stop is not None
        self._conclude()
        self.deliver(
            Piece(
                tuple(token for piece in rest for token in piece.tokens),
                tuple(flag for piece in rest for flag in piece.accepted),
                text,
                (text,) if text else (),
                None,
                "stop" if stopped else self.answer.reason,
                (),
                self._held.stop if stopped else self._stop_reason,
            )
        )

    async def _wave(self, parts: Sequence[AnswerPart]) -> None:
        """The points of a wave, to the end of all of them: as many at once as there are rows, so
        that they wait for other answers and not for one another."""
        free = asyncio.Semaphore(self.service.status().slots)
        arrived, left = asyncio.Queue[Arrived](), {part.number for part in parts}
        tickets: dict[int, Ticket] = {}
        pumps = [asyncio.create_task(self._pump(part, tickets, arrived, free)) for part in parts]
        try:
            while left:
                number, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is not None:
                    self._take(number, self._checked(item, tickets[number]))
                else:
                    left.discard(number)
                    if number <= self._last and number not in self._written:
                        raise _Ended
                for other, ticket in tickets.items():
                    if other > self._last:
                        ticket.cancel()
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self,
        part: AnswerPart,
        tickets: dict[int, Ticket],
        arrived: asyncio.Queue[Arrived],
        free: asyncio.Semaphore,
    ) -> None:
        """Submit a point, if it is still needed, and pass on what comes of it."""
        try:
            async with free:
                if part.number <= self._last:
                    ticket = tickets[part.number] = await self._submit_in_time(part)
                    async for piece in ticket:
                        arrived.put_nowait((part.number, piece))
            arrived.put_nowait((part.number, None))
        except Exception as error:  # raised where the answer is written
            arrived.put_nowait((part.number, error))

    def _take(self, number: int, piece: Piece) -> None:
        """A piece of a point."""
        self._texts[number] += piece.text
        self._counts[number] += len(piece.tokens)
        self._undelivered.append(piece)
        self._give(self._order.add(number - 1, [piece]))
        reason = piece.finish_reason
        if reason is None:
            return
        if reason == "stop" and piece.stop_reason == self.answer.next_point(number):
            reason = "eos"
        self._written.add(number)
        self.answer.take_point(number, self._texts[number], self._counts[number], reason)
        if reason != "stop":
            self._give(self._order.end(number - 1))
        elif number <= self._last:  # nothing behind this point is given out
            self._last, self._stop_reason = number, piece.stop_reason
        if self._held.stop is not None:
            self._last = 0

    def _give(self, pieces: Sequence[Piece]) -> None:
        """Deliver what stands next in the answer, up to a stop string."""
        for piece in pieces:
            if self._held.stop is not None:
                return
            self._undelivered = [one for one in self._undelivered if one is not piece]
            spans = tuple(map(self._held.pass_text, piece.spans))
            text = "".join(spans)
            plain = replace(piece, finish_reason=None, stop_reason=None)
            self.deliver(replace(plain, text=text, spans=spans))
