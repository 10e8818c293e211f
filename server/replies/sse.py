"""Pieces on their way to the client: together as one answer, or as server-sent events.

A client that leaves is noticed in either case, and its tickets are cancelled: the rows it held go
to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specctl.core.errors import SpecctlError
from specctl.server.engine_thread.contract import Piece
from specctl.server.errors import ApiError, api_error, broken, outgrown
from specctl.server.replies.answers import ApiAnswer, Choice, Json

T = TypeVar("T")
PAUSE = 10.0  # seconds without an event after which one says that the stream is alive
Pieces = AsyncGenerator[tuple[Choice, Piece], None]


async def pieces_of(answer: ApiAnswer) -> Pieces:
    """The pieces of all choices as they come. Raises ApiError where one fails or is cut off."""
    if len(answer.choices) == 1:
        found = _checked(answer.choices[0])
    else:
        found = _merged([_checked(choice) for choice in answer.choices])
    async with aclosing(found) as pieces:
        async for choice, piece in pieces:
            yield choice, piece


async def _checked(choice: Choice) -> Pieces:
    reason = None
    async for piece in choice.ticket:
        reason = piece.finish_reason
        if reason == "error":
            raise broken()
        if reason == "grammar":
            raise outgrown()
        yield choice, piece
    if reason is None:
        raise ApiError(503, "the server stopped before the answer was complete", code="stopped")


async def _merged(
    sources: list[Pieces],
) -> Pieces:
    queue: asyncio.Queue[tuple[Choice, Piece] | Exception | None] = asyncio.Queue()

    async def pump(source: Pieces) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:  # raised below, where the request is answered
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def collected(answer: ApiAnswer) -> Json:
    """The whole answer."""
    async with aclosing(pieces_of(answer)) as pieces:
        async for choice, piece in pieces:
            answer.add(choice, piece)
    return answer.whole()


async def events_of(answer: ApiAnswer) -> AsyncGenerator[bytes, None]:
    """The events of an answer. A failure behind the first event is an event, too."""
    is_begun = False
    try:
        async with aclosing(_paced(answer)) as pieces:
            async for found in pieces:
                if found is None:  # not before the first event: until then it may be refused
                    events = answer.waiting() if is_begun else []
                else:
                    events = [*([] if is_begun else answer.opening()), *answer.events(*found)]
                    is_begun = True
                for event in events:
                    yield event
    except (ApiError, SpecctlError) as error:
        if not is_begun:
            raise
        refusal = error if isinstance(error, ApiError) else api_error(error)
        for event in answer.failure(refusal.body()):
            yield event
        return
    for event in answer.closing():
        yield event


async def _paced(answer: ApiAnswer) -> AsyncGenerator[tuple[Choice, Piece] | None, None]:
    """The pieces, and None whenever none has come for PAUSE seconds, where that is of use."""
    async with aclosing(pieces_of(answer)) as pieces:
        if not answer.waiting():
            async for found in pieces:
                yield found
            return
        while True:
            coming = asyncio.ensure_future(anext(pieces, None))
            try:
                while not (await asyncio.wait({coming}, timeout=PAUSE))[0]:
                    yield None
            finally:
                if not coming.done():  # a generator that runs cannot be closed
                    coming.cancel()
                    await asyncio.wait({coming})
            if (piece := coming.result()) is None:
                return
            yield piece


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """What `work` returns; ClientDisconnect, and the end of the work, if the client leaves first.
    The body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        watching.cancel()
        working.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Events, the first of which is there already; however it ends, the tickets are cancelled."""

    def __init__(self, answer: ApiAnswer, first: bytes, rest: AsyncIterator[bytes]) -> None:
        async def events() -> AsyncIterator[bytes]:
            yield first
            async for event in rest:
                yield event

        quiet = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events(), headers=quiet, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel(self.answer)


def cancel(answer: ApiAnswer) -> None:
    """Give up what is unfinished."""
    for choice in answer.choices:
        choice.ticket.cancel()
