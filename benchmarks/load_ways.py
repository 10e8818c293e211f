"""Ways to serve many users at once: our service, in process or over HTTP, and other engines.

A way is opened for a number of users and asked by all of them in one event loop. What it says of an
answer is when its tokens came.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from specctl.drafters.parts.base import Drafter
from specctl.runtime.hf import as_transformers
from specctl.runtime.policies import Policy
from specctl.runtime.policies.batch import Batching
from specctl.runtime.sampling import Sampling
from specctl.runtime.server.limits import Limits
from specctl.runtime.server.service import Ask, Service
from specctl.runtime.target import Target

PAGE = 64  # tokens in a page of transformers' cache
LLAMA = Path(__file__).with_name("load_llama.py")


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
        async for piece in await self.service.submit(Ask(tuple(prompt), sampling)):
            stamps.add(piece.tokens)
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        counters = self.service.counters
        tau = counters.tokens / max(counters.rounds, 1)
        batching = None if self.chosen is None else dict(self.chosen.to_json())
        drafting = counters.drafts / max(counters.drafts + counters.spec_off, 1)
        return {"tau": round(tau, 3), "drafting": round(drafting, 3), "batching": batching}


@dataclass
class OverHttp:
    """The same service behind its HTTP server, asked by a client in this process."""

    inner: Served

    @property
    def name(self) -> str:
        return f"{self.inner.name} over http"

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        from specctl.runtime.server.app import create_app
        from specctl.runtime.server.listen import Listener, bind, url_of

        with self.inner.open(users, longest):
            service, sock = Started(self.inner.service), bind("127.0.0.1", 0)
            self.url, ready = url_of(sock), threading.Event()
            listener = Listener(create_app(service, "target"), service, sock, 5.0)
            thread = threading.Thread(target=lambda: asyncio.run(listener.run(ready.set)))
            thread.start()
            assert ready.wait(60), "the HTTP server did not start"
            try:
                yield
            finally:
                listener.end(15)
                thread.join()

    async def ask(self, prompt: Sequence[int]) -> Answer:
        ends = {str(token): -100 for token in self.inner.target.eos_ids}
        body = {
            "model": "target",
            "prompt": list(prompt),
            "max_tokens": self.inner.tokens,
            "temperature": 0,
            "stream": True,
            "specctl": True,
            "logit_bias": ends,
        }
        stamps = Stamps()
        async for chunk in _stream(f"{self.url}/v1/completions", body):
            stamps.count(len(chunk.get("specctl", {}).get("spans", ())))
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return self.inner.notes()


class Started:
    """A service that runs already."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def start(self) -> None: ...


async def _stream(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    async with (
        httpx.AsyncClient(timeout=3600.0) as client,
        client.stream("POST", url, json=body) as response,
    ):
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


@dataclass
class Transformers:
    """transformers' continuous batching over the same parameters; it cannot speculate."""

    target: Target
    tokens: int
    name: str = "transformers"

    def __post_init__(self) -> None:
        self.model = as_transformers(self.target.lm)
        self.count = 0

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        settings = GenerationConfig(
            max_new_tokens=self.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = users * (math.ceil((longest + self.tokens) / PAGE) + 1) + 8
        cache = ContinuousBatchingConfig(num_blocks=pages, page_size=PAGE, max_batch_tokens=512)
        with self.model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=cache, warmup=False, timeout=30
        ) as self.manager:
            yield

    async def ask(self, prompt: Sequence[int]) -> Answer:
        self.count += 1
        name, results = f"ask-{self.count}", asyncio.Queue[Any]()
        stamps = Stamps()
        self.manager.register_result_handler(name, results.put_nowait)
        self.manager.add_request(
            list(prompt), request_id=name, max_new_tokens=self.tokens, streaming=True
        )
        while True:
            result = await results.get()
            stamps.add(list(result.generated_tokens)[len(stamps.tokens) :])
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return {}


@dataclass
class LlamaCpp:
    """llama.cpp's server (the package xllamacpp) on the same weights, in a process of its own.
    `python` is an interpreter that has xllamacpp, gguf and numpy; it cannot speculate with our
    drafters."""

    target: Target
    tokens: int
    folder: Path
    python: str
    threads: int
    name: str = "llama.cpp"

    def __post_init__(self) -> None:
        as_transformers(self.target.lm).save_pretrained(self.folder)

    @contextmanager
    def open(self, users: int, longest: int) -> Iterator[None]:
        context = users * (longest + self.tokens + 16)
        command = [self.python, str(LLAMA), str(self.folder), str(users), str(context)]
        with subprocess.Popen(
            [*command, str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                self.url = process.stdout.readline().strip()
                if not self.url:
                    raise RuntimeError("llama.cpp did not start: run the command by hand")
                yield
            finally:
                process.stdin.close()

    async def ask(self, prompt: Sequence[int]) -> Answer:
        body = {
            "prompt": list(prompt),
            "n_predict": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "return_tokens": True,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        stamps = Stamps()
        async for chunk in _stream(f"{self.url}/completion", body):
            stamps.add(chunk.get("tokens", ()))
        return stamps.answer()

    def notes(self) -> dict[str, Any]:
        return {}
