"""Requests to an app in this process, without sockets; and to a real server on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from serving import StubService

from specctl.runtime.server.app import create_app

BASE = "http://127.0.0.1"


def make_app(service: StubService | None = None, **options: Any) -> FastAPI:
    """An app over a stub that is ready."""
    service = service if service is not None else StubService()
    service.start()
    return create_app(service, "tiny", **options)


def ask(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request and its whole answer."""
    return ask_all(app, [(method, path, request)])[0]


def ask_all(app: FastAPI, requests: Sequence[tuple[str, str, dict]]) -> list[httpx.Response]:
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
