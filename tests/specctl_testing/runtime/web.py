"""Requests to an app in this process, without sockets; and to a real server on a free port."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from specctl.server.app import create_app
from specctl.server.listen import Listener, bind, url_of
from specctl_testing.runtime.serving import StubService

BASE = "http://127.0.0.1"


def make_app(service: StubService | None = None, **options: Any) -> FastAPI:
    """An app over a stub that is ready."""
    service = service if service is not None else StubService()
    service.start()
    return create_app(service, "tiny", **options)


def ask(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request and its whole answer."""
    return request_all(app, [(method, path, request)])[0]


def request_all(app: FastAPI, requests: Sequence[tuple[str, str, dict]]) -> list[httpx.Response]:
    """Requests all at once; the answers in their order."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            waiting = [client.request(m, path, **request) for m, path, request in requests]
            return list(await asyncio.gather(*waiting))

    return asyncio.run(run())


def post(app: FastAPI, path: str, body: Any, **request: Any) -> httpx.Response:
    """One POST of JSON."""
    return ask(app, "POST", path, json=body, **request)


def events(response: httpx.Response) -> list[Any]:
    """The data of server-sent events, [DONE] as a string."""
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"], body
    return body["error"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server on a port of its own, in a thread; `codes` gets its exit code."""

    url: str
    listener: Listener
    codes: list[int]
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@contextmanager
def running(
    service: StubService, drain: float = 5.0, bound: socket.socket | None = None, **options: Any
) -> Iterator[Running]:
    """A real server over `service`, on that socket; it is drained at the end, unless that was done
    before. To collect the garbage of a process of tests takes a second or two: it is left as it
    is."""
    app = create_app(service, "tiny", **options)
    bound, ready, codes = bound or bind("127.0.0.1", 0), threading.Event(), []
    listener = Listener(app, service, bound, drain, is_alone=False)
    url = url_of(bound)

    def serve() -> None:
        codes.append(asyncio.run(listener.run(ready.set)))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20), "the server did not start"
    yield Running(url, listener, codes, thread)
    if thread.is_alive():
        with suppress(RuntimeError):  # its loop has just ended
            listener.end(signal.SIGTERM)
        thread.join(20)
    assert not thread.is_alive(), "the server did not end"
