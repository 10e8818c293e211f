"""Ways to serve many users at once: our service, in process or over HTTP (others: load_others.py).

A way is opened for a number of users and asked by all of them in one event loop. What it says of an
answer is when its tokens came.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from specctl.core.drafter import Drafter
from specctl.runtime.batching import Batching
from specctl.runtime.policies import Policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import GenerateRequest, Service
from specctl.server.requests.limits import Limits


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token, and between tokens: those that came together share the time.
    `tokens` is None where only their number is told."""

    num_tokens: int
    first: float
    gaps: tuple[float, ...]
    tokens: tuple[int, ...] | None


@dataclass(slots=True)
class Stamps:
    """Notes when tokens come."""

    started: float = field(default_factory=time.perf_counter)
    pieces: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> None:
        self.count(len(tokens))
        self.tokens += tokens

    def count(self, num_tokens: int) -> None:
        if num_tokens:
            self.pieces.append((time.perf_counter(), num_tokens))

    def answer(self) -> Answer:
        assert self.pieces, "an answer without tokens"
        gaps = []
        for (before, _), (now, count) in zip(self.pieces, self.pieces[1:], strict=False):
            gaps += [(now - before) / count] * count
        total = sum(count for _, count in self.pieces)
        tokens = tuple(self.tokens) if self.tokens else None
        return Answer(total, self.pieces[0][0] - self.started, tuple(gaps), tokens)


class Way(Protocol):
    name: str

    def open(self, users: int, longest: int) -> AbstractContextManager[None]:
        """Ready for so many users; no prompt is longer than `longest` tokens."""

    async def ask(self, prompt: Sequence[int]) -> Answer:
        """One answer, greedily, to its full length."""

    def notes(self) -> dict[str, Any]:
        """What else it can say about the time since it was opened."""


@dataclass
class Served:
    """Our service in this process. `batching` makes a fresh policy; None: every draft has the
    length of the tree policy."""

    name: str
    target: Target
    drafter: Drafter | None
    policy: Policy | None
    batching: Callable[[], Batching] | None
    tokens: int

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        self.chosen = self.batching() if self.batching is not None else None
        limits = Limits(
            max_batch=users,
            max_queue=users,
            max_len=longest + self.tokens,
            queue_timeout=3600.0,
        )
        self.service = Service(
            self.target, self.drafter, self.policy, batching=self.chosen, limits=limits
        )
        self.service.start()
        try:
            while (state := self.service.status().state) == "loading":
                time.sleep(0.01)
            assert state == "ready", self.service.failure
            assert self.service.status().slots == users, "memory holds fewer rows"
            yield
        finally:
            self.service.stop()

    async def ask(self, prompt: Sequence[int]) -> Answer:
        sampling = Sampling(max_new_tokens=self.tokens, ignore_eos=True)
        stamps = Stamps()
        async for piece in await self.service.submit(GenerateRequest(tuple(prompt), sampling)):
            stamps.add(piece.tokens)
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        counters = self.service.counters
        tau = counters.tokens / max(counters.rounds, 1)
        batching = None if self.chosen is None else dict(self.chosen.to_json())
        drafting = counters.drafts / max(counters.drafts + counters.spec_off, 1)
        return {
            "tau": round(tau, 3),
            "drafting": round(drafting, 3),
            "batching": batching,
            "goodput": (batching or {}).get("goodput"),
        }


@dataclass
class OverHttp:
    """The same service behind its HTTP server, asked by a client in this process."""

    inner: Served

    @property
    def name(self) -> str:
        return f"{self.inner.name} over http"

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        from specctl.server.app import create_app
        from specctl.server.listen import Listener, bind, url_of

        with self.inner.open(users, longest):
            service, sock = Started(self.inner.service), bind("127.0.0.1", 0)
            self.url, ready = url_of(sock), threading.Event()
            listener = Listener(create_app(service, self.inner.target.name), service, sock, 5.0)
            thread = threading.Thread(target=lambda: asyncio.run(listener.run(ready.set)))
            thread.start()
            assert ready.wait(60), "the HTTP server did not start"
            try:
                yield
            finally:
                listener.end(15)
                thread.join()

    async def ask(self, prompt: Sequence[int]) -> Answer:
        return await _counted(self.url, self.inner.target.name, prompt, self.inner.tokens)

    def notes(self) -> dict[str, Any]:
        return self.inner.notes()


@dataclass
class OwnServer:
    """`specctl serve` in a process of its own, as the servers of other engines are."""

    name: str
    draft: str
    target: Target
    tokens: int
    flags: Sequence[str]

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        from serve_common import serve_process

        words = ["--draft", self.draft, "--max-batch", str(users), *self.flags]
        words += ["--max-len", str(longest + self.tokens), "--set", f"limits.max_queue={users}"]
        with tempfile.TemporaryDirectory() as folder, serve_process(Path(folder), *words) as server:
            self.url = server.url
            yield

    async def ask(self, prompt: Sequence[int]) -> Answer:
        return await _counted(self.url, self.target.name, prompt, self.tokens)

    def notes(self) -> dict[str, Any]:
        return {}


async def _counted(url: str, model: str, prompt: Sequence[int], tokens: int) -> Answer:
    """The answer of our server."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0,
        "stream": True, "specctl": True, "ignore_eos": True,
    }  # fmt: skip
    stamps = Stamps()
    async for chunk in stream(f"{url}/v1/completions", body):
        stamps.count(len(chunk.get("specctl", {}).get("spans", ())))
    return stamps.answer()


class Started:
    """A service that runs already."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def start(self) -> None: ...


async def stream(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Making a client takes 60 ms where it reads the
    certificates of the system, which a server on loopback does not have, and 0.3 ms otherwise."""
    async with (
        httpx.AsyncClient(timeout=3600.0, verify=False, trust_env=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)
