"""What a server answers while its model is loaded: 503 and that it loads, in the shape of each API;
on `/health`, which says that the process answers, 200. Clients and probes then wait, where a
refused connection looks like a server that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from socket import socket

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from specctl.server.errors import RETRY_SECONDS, ApiError
from specctl.server.listen import server_of


@contextlib.contextmanager
def answering(bound: socket) -> Iterator[None]:
    """Answers on the socket, which stays bound, from a thread of its own, until the block ends."""
    server = server_of(_is_loading)
    shared = bound.dup()  # a server closes the socket that it has served

    def serve() -> None:
        with contextlib.closing(shared):
            asyncio.run(server.serve([shared]))

    thread = threading.Thread(target=serve, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _is_loading(scope: Scope, receive: Receive, send: Send) -> None:
    later = {"Retry-After": str(RETRY_SECONDS)}
    refusal = ApiError(503, "the server is loading", code="loading", headers=later)
    is_health = scope["path"] == "/health"
    answer = JSONResponse({"status": "loading"}) if is_health else refusal.response(scope)
    await answer(scope, receive, send)
