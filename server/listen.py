"""The server as a process: its socket, uvicorn on it, and how it ends.

The first SIGTERM (or Ctrl-C) drains: new requests are refused at once and `/ready` says so, what
runs may finish within the time given, then the process leaves with 0. Only if something had to be
cut is the exit code that of the signal. A second signal ends the process where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specctl.core.errors import ResourceError, SpecctlError
from specctl.server.engine_thread.contract import Serving
from specctl.server.errors import ApiError
from specctl.server.logs import log

HEAD_SECONDS = 20.0  # for the head of a request; one that dribbles in is hung up on
HEAD_BYTES = 64 << 10
READ_BYTES = 8 << 10  # at once: a client that sends single bytes is as dear as its read is long
MAX_CHUNKS = 1 << 14  # of a body
KEEP_ALIVE_SECONDS = 30
ECHO_SECONDS = 0.3  # a supervisor may send one signal to the process and to its group
LEAVE_SECONDS = 1.0  # for the last bytes of what was cut


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, 0 for any free port. It answers nobody until it is listened on."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpecctlError(
            f"{host!r} is no address of this machine",
            where="--host",
            found=error.strerror or str(error),
            expected="127.0.0.1, ::1, 0.0.0.0, or a name of this machine",
            do="leave --host out to serve this machine alone",
        ) from error
    listener = socket.socket(family, kind)
    try:
        if os.name == "posix":  # elsewhere this would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"cannot listen on {host} port {port}",
            where="--host, --port",
            found=error.strerror or str(error),
            expected="a free port of an address of this machine",
            do="give another --port; --port 0 takes a free one and says which",
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where to find a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class FewChunks(h11.Connection):
    """Reads bodies in so many chunks at most: a chunk takes as long as some kilobytes of it."""

    chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            if self.chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"the body has more than {MAX_CHUNKS:,} chunks")
        return event


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which waits for the head of a request only so long, and whose own
    refusals have the shape of every other error."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = FewChunks(h11.SERVER, HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # asyncio's own transports read that much at once
            transport.max_size = READ_BYTES
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(HEAD_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(ApiError(400, msg, code="invalid_http").body()).encode()
        headers = [("content-type", "application/json"), ("connection", "close")]
        headers.append(("content-length", str(len(body))))
        events = (
            h11.Response(status_code=400, headers=headers, reason="Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to `Listener`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_of(app: Any) -> uvicorn.Server:
    """uvicorn for an ASGI application, as it serves here."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    return _Server(config)


class Listener:
    """One run of a server. Everything happens in the loop of `run`, but for `end`. `is_alone`: the
    process does nothing else, and the garbage collector leaves out what was there before."""

    def __init__(
        self, app: Any, service: Serving, sock: socket.socket, drain: float, is_alone: bool = True
    ) -> None:
        self.service, self.sock, self.drain, self.is_alone = service, sock, drain, is_alone
        self._server = server_of(app)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[int] | None = None
        self._first_signal: float | None = None

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Serve until a signal; the exit code. `on_ready` is called when requests are taken."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self.service.start()
        with self._listening(), contextlib.closing(self.sock):
            serving = asyncio.create_task(self._server.serve([self.sock]))
            watching = asyncio.create_task(self._watch(on_ready))
            ends: set[asyncio.Future[Any]] = {serving, watching, self._ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            number = self._ended.result() if self._ended.done() else 0
            was_cut = not await self._finish() if number else False
            watching.cancel()
            self._server.should_exit = True
            await serving
            await asyncio.to_thread(self.service.stop)
            if self.is_alone:
                gc.unfreeze()
            if not number:
                await watching  # raises why the engine failed
        return 128 + number if was_cut else 0

    def end(self, number: int) -> None:
        """What a signal does. From any thread."""
        now = time.monotonic()
        if self._first_signal is not None:
            if now - self._first_signal > ECHO_SECONDS:
                os._exit(128 + number)
            return
        self._first_signal = now
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_to_end, number)

    def _begin_to_end(self, number: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(number)

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        """Says when the service is ready, and stays; raises if it fails."""
        is_announced = False
        while (state := self.service.status().state) != "failed":
            if state == "ready" and self._server.started and not is_announced:
                if self.is_alone:
                    gc.collect()
                    gc.freeze()  # else each full collection visits all of torch: 0.2 s, no turn
                on_ready()
                is_announced = True
            await asyncio.sleep(0.2 if is_announced else 0.02)
        raise ResourceError(
            "the engine has failed",
            found=self.service.failure or "",
            expected="room for the target, the drafter and their caches",
            do="the log above says where; then start the server again, smaller where memory ended",
        )

    async def _finish(self) -> bool:
        """Let what runs come to its end, last bytes included: True if all of it did."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.drain
        log("draining", seconds=self.drain, running=self.service.status().running)
        is_finished = await self.service.drain(self.drain)
        if not is_finished:
            log("cut", logging.WARNING, running=self.service.status().running)
            await asyncio.to_thread(self.service.stop)  # waits for the round that runs
            deadline = loop.time() + LEAVE_SECONDS
        while self._server.server_state.tasks and loop.time() < deadline:
            await asyncio.sleep(0.01)
        return is_finished and not self._server.server_state.tasks

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Signals come to `end`; outside the main thread none do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(number: int, frame: object) -> None:
            self.end(number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [(number, signal.signal(number, end)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
