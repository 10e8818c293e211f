"""Answers from servers that speak OpenAI's API and have the target: vLLM, SGLang and their like.

Prompts are posted to /v1/completions as token ids, and token ids are asked for (`return_token_ids`
of vLLM from 0.10.2 and SGLang from July 2026), so that nothing is tokenized twice. Many requests
are in flight at once, each at the server that has fewest; a conversation stays where its beginning
is cached. A server that says 429 or 5xx, or is not there, is left alone for as long as it asks
(Retry-After), else for longer and longer; its requests go to the others or wait.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from specctl.core.errors import IncompatibleError, NetworkError, RecipeError
from specctl.core.messages.installed import library
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.answers import AnswerJob, Done
from specctl.train.data.written.answers_end import as_written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # to be asked again
REFUSED = frozenset({401, 403, 404, 405})  # nothing that is asked there will be answered
ATTEMPTS = 8  # of one request that a server, while it answers others, fails on
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds between them, doubled each time
PATIENCE = 600.0  # seconds without any answer after which a run gives up
ANSWER_SECONDS = 1800.0  # for one request
KEY = "OPENAI_API_KEY"
PROBE = "def na\u00efve(x):\n    return x + 1_000  # \u6771\u4eac, \U0001f600?\n\tplain words, 3.14"


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where the servers are and how they are used; `wait` and `patience` in seconds."""

    urls: tuple[str, ...]
    model: str | None = None
    requests: int = 64
    wait: float = FIRST_WAIT
    patience: float = PATIENCE

    @classmethod
    def of(cls, endpoint: str, model: str | None, requests: int) -> EndpointSettings:
        """The settings of `URL[,URL]`."""
        urls = tuple(_base(url.strip()) for url in endpoint.split(",") if url.strip())
        if not urls or len(set(urls)) < len(urls):
            raise RecipeError(
                "data.endpoint names no servers, or one twice",
                where="data.endpoint",
                found=endpoint,
                expected="URL[,URL], each another",
                do="data.endpoint=http://localhost:8000",
            )
        return cls(urls, model, requests)


def _base(url: str) -> str:
    """The address in front of /v1."""
    if not url.startswith(("http://", "https://")):
        raise RecipeError(
            "an address of data.endpoint is no URL",
            where="data.endpoint",
            found=url,
            expected="http://HOST:PORT or https://...",
            do=f"data.endpoint=http://{url}",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(slots=True)
class Server:
    """One address. One writer: the client. `until`: it is left alone before that moment."""

    url: str
    model: str = ""
    context: int | None = None
    num_open: int = 0
    failures: int = 0
    until: float = 0.0


@dataclass(slots=True)
class _Tally:
    """What happened so far. One writer: the client."""

    last_answer: float
    num_answers: int = 0
    without_ids: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


class _Again(Exception):
    """A request is to be posted again, after so many seconds where the server said so. `is_load`:
    the server could not take it, which says nothing against the request."""

    def __init__(self, why: str, seconds: float | None = None, is_load: bool = False) -> None:
        super().__init__(why)
        self.seconds, self.is_load = seconds, is_load


class _Unanswerable(Exception):
    """A server refuses this one request."""


class EndpointWriter:
    """Answers from servers; the target in this process is only asked for its tokenizer. `share`:
    processes that write beside each other divide the requests in flight."""

    name = "endpoint"

    def __init__(
        self, target: Target, settings: EndpointSettings, console: Reporter, share: int = 1
    ) -> None:
        self.target, self.settings, self.console = target, settings, console
        self.each = max(1, settings.requests // share)
        self.servers = [Server(url) for url in settings.urls]
        self._httpx = _library()
        self._tally = _Tally(time.monotonic())
        self._changed = asyncio.Event()

    def write(self, jobs: Iterator[AnswerJob], done: Done) -> None:
        """Answer all jobs; what a server refuses is left out and told."""
        asyncio.run(self._write(jobs, done))
        self._tell()

    async def _write(self, jobs: Iterator[AnswerJob], done: Done) -> None:
        self._changed = asyncio.Event()
        async with self._client() as client:
            strangers = [server for server in self.servers if not server.model]
            await asyncio.gather(*(self._greet(client, server) for server in strangers))
            self._tally = _Tally(time.monotonic())
            width = self.each * len(self.servers)
            workers = [asyncio.ensure_future(self._work(client, jobs, done)) for _ in range(width)]
            try:
                await asyncio.gather(*workers)
            finally:  # the first error ends all of them before the client is closed
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        key, httpx = os.environ.get(KEY), self._httpx
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.each)
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=10.0)
        async with AsyncExitStack() as held:
            yield await held.enter_async_context(
                httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
            )

    # -- the first words ------------------------------------------------------------------------

    async def _greet(self, client: httpx.AsyncClient, server: Server) -> None:
        """Learn the target's name there, and that its tokenizer is ours."""
        models = await self._patiently(client, server, "GET", "/v1/models", None)
        entry = self._served(server, models)
        server.model, server.context = entry["id"], entry.get("max_model_len")
        body = {
            "model": server.model,
            "prompt": PROBE,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = await self._patiently(client, server, "POST", "/v1/completions", body)
        choices = reply.get("choices") or [{}]
        ours, theirs = self.target.encode(PROBE), choices[0].get("prompt_token_ids")
        count = (reply.get("usage") or {}).get("prompt_tokens")
        if theirs is not None and list(theirs) != ours:
            raise self._other_tokenizer(server, f"{list(theirs)[:8]}...", f"{ours[:8]}...")
        if theirs is None and count is not None and count != len(ours):
            raise self._other_tokenizer(server, f"{count} tokens", f"{len(ours)} tokens")
        self._greeted(reply)

    def _greeted(self, reply: Mapping[str, Any]) -> None:
        """What is to be done with the reply to the first words."""

    def _served(self, server: Server, models: Mapping[str, Any]) -> dict[str, Any]:
        entries = [e for e in models.get("data") or () if isinstance(e, dict) and e.get("id")]
        wanted = self.settings.model
        if wanted is None and len(entries) == 1:
            return entries[0]
        names = (wanted,) if wanted is not None else (self.target.name,)
        found = [e for e in entries if e["id"] in names or e.get("root") in names]
        if found:
            return found[0]
        raise RecipeError(
            "the endpoint serves no model of the target's name",
            where=server.url,
            found=", ".join(str(entry["id"]) for entry in entries)[:200] or "no model",
            expected=str(names[0]),
            do="--set data.endpoint_model=NAME",
        )

    def _other_tokenizer(self, server: Server, found: str, expected: str) -> IncompatibleError:
        return IncompatibleError(
            "the endpoint reads text with another tokenizer than the target's",
            where=f"{server.url}, model {server.model}",
            found=found,
            expected=expected,
            do="serve the very target that --target names, with its own tokenizer",
        )

    async def _patiently(
        self,
        client: httpx.AsyncClient,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """One request to one server, asked again while it is busy or still starting."""
        began, attempt = time.monotonic(), 0
        while True:
            try:
                return await self._ask(client, server, method, path, body)
            except _Again as again:
                attempt += 1
                if time.monotonic() - began > self.settings.patience:
                    raise self._silent(server.url, str(again)) from again
                await asyncio.sleep(self._pause(attempt, again.seconds))
            except _Unanswerable as error:
                raise self._refusal(server, str(error)) from error

    # -- answers --------------------------------------------------------------------------------

    async def _work(self, client: httpx.AsyncClient, jobs: Iterator[AnswerJob], done: Done) -> None:
        """One request in flight after the other; conversations to their end."""
        for job in jobs:
            more: AnswerJob | None = job
            last: Server | None = None
            while more is not None:
                found = await self._answer(client, more, last)
                if found is None:
                    break
                ids, reason, last = found
                more = done(more, ids, reason)

    async def _answer(
        self, client: httpx.AsyncClient, job: AnswerJob, last: Server | None
    ) -> tuple[list[int], str, Server] | None:
        """Ids, finish reason and server of an answer; None where it had to be left out."""
        attempts = 0
        while True:
            server = await self._free_server(last)
            try:
                body = self._body(job, server)
                reply = await self._ask(client, server, "POST", "/v1/completions", body)
                ids, reason = self._read(job, reply, server)
            except _Again as again:
                attempts += not again.is_load
                self._tally.waits[str(again)] += 1
                self._rest(server, again)
                if time.monotonic() - self._tally.last_answer > self.settings.patience:
                    raise self._silent(server.url, str(again)) from again
                if attempts >= ATTEMPTS:
                    self._tally.left_out[f"failed {ATTEMPTS} times: {again}"] += 1
                    return None
                is_resting = server.until > time.monotonic()
                await asyncio.sleep(self._pause(1 if is_resting else attempts, None))
            except _Unanswerable as error:
                self._tally.left_out[str(error)] += 1
                if not self._tally.num_answers and self._tally.left_out.total() >= ATTEMPTS:
                    raise self._refusal(server, str(error)) from error
                return None
            else:
                server.failures, self._tally.last_answer = 0, time.monotonic()
                self._tally.num_answers += 1
                return ids, reason, server
            finally:
                server.num_open -= 1
                self._changed.set()

    async def _free_server(self, last: Server | None) -> Server:
        """A server with room, counted as taken: the one before if it has, else the least busy."""
        while True:
            now = time.monotonic()
            open_ones = [s for s in self.servers if s.num_open < self.each and s.until <= now]
            if open_ones:
                least = min(open_ones, key=lambda server: server.num_open)
                server = last if last in open_ones and last is not None else least
                server.num_open += 1
                return server
            self._changed.clear()
            wakes = [s.until - now for s in self.servers if s.until > now]
            try:
                await asyncio.wait_for(self._changed.wait(), min(wakes, default=1.0) + 0.001)
            except TimeoutError:
                continue

    def _rest(self, server: Server, again: _Again) -> None:
        """Leave a server alone that asked for it or does not answer."""
        server.failures += 1
        seconds = again.seconds
        if seconds is None and (again.is_load or len(self.servers) > 1):
            seconds = self._pause(server.failures, None)
        if seconds is not None:
            server.until = max(server.until, time.monotonic() + seconds)

    def _pause(self, attempt: int, asked: float | None) -> float:
        """Seconds before the next try: those that were asked for, else doubled with jitter."""
        if asked is not None:
            return min(asked, self.settings.patience)
        most = min(LONGEST_WAIT, self.settings.wait * 2.0 ** min(attempt - 1, 16))
        return most * random.uniform(0.5, 1.0)

    def _body(self, job: AnswerJob, server: Server) -> dict[str, Any]:
        sampling = job.sampling
        room = math.inf if server.context is None else server.context - len(job.prompt_ids)
        if room < 1:
            raise _Unanswerable(f"the server's context is {server.context:,} tokens")
        return {
            "model": server.model,
            "prompt": list(job.prompt_ids),
            "max_tokens": int(min(sampling.max_new_tokens, room)),
            "stop_token_ids": list(self.target.eos_ids),
            "return_token_ids": True,
            **_sampling_fields(sampling),
        }

    async def _ask(
        self,
        client: httpx.AsyncClient,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """The JSON object that a server replies with; `_Again` or `_Unanswerable` where it does
        not, a SpecctlError where it never will."""
        try:
            reply = await client.request(method, server.url + path, json=body)
        except self._httpx.RequestError as error:
            connect = (self._httpx.ConnectError, self._httpx.ConnectTimeout)
            raise _Again(type(error).__name__, is_load=isinstance(error, connect)) from error
        code = reply.status_code
        if code in BUSY:
            seconds = _retry_after(reply.headers.get("retry-after"))
            raise _Again(f"HTTP {code}", seconds, is_load=code in (429, 503))
        if code in REFUSED:
            raise self._refusal(server, f"HTTP {code} for {path}: {reply.text[:200]}")
        if code != 200:
            raise _Unanswerable(f"HTTP {code}: {_said(reply.text)}")
        try:
            found = reply.json()
        except ValueError as error:
            raise _Again("a reply that is not JSON") from error
        if not isinstance(found, dict):
            raise _Again("a reply that is no object")
        return found

    def _read(
        self, job: AnswerJob, reply: Mapping[str, Any], server: Server
    ) -> tuple[list[int], str]:
        """Ids and finish reason of a reply, checked against what the target knows."""
        choice = _choice(reply)
        read, ids = choice.get("prompt_token_ids"), choice.get("token_ids")
        if read is not None and list(read) != list(job.prompt_ids):
            raise self._other_tokenizer(server, "other ids than were posted", "the prompt's ids")
        if ids is None:
            self._tally.without_ids += 1
            ids = self._encoded(str(choice.get("text") or ""))
        reason = str(choice.get("finish_reason"))
        if reason not in ("stop", "length"):
            raise _Again(f"finish reason {reason}")
        ids = [int(token) for token in ids]
        ids, reason = as_written(ids, choice, job.prompt_ids, self.target)
        if not ids:
            raise _Again("an empty answer")
        if max(ids) >= self.target.spec.vocab_size or min(ids) < 0:
            most = f"ids below {self.target.spec.vocab_size:,}"
            raise self._other_tokenizer(server, f"token {max(ids):,}", most)
        return ids, reason

    def _encoded(self, text: str) -> list[int]:
        """The ids of an answer that came as text alone."""
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- what is said ---------------------------------------------------------------------------

    def _tell(self) -> None:
        tally, say = self._tally, self.console
        for why, number in tally.waits.most_common():
            say.say(f"endpoint: asked again {number:,} times after {why}")
        if tally.without_ids:
            say.warn(
                f"endpoint: {tally.without_ids:,} answers came without token ids and were encoded "
                "from their text, which may spell them otherwise (vLLM from 0.10.2 sends ids)"
            )
        for why, number in tally.left_out.most_common():
            say.warn(f"endpoint: {number:,} turns left out, {why}; the next run asks again")
        if not tally.num_answers and tally.left_out:
            raise NetworkError(
                "the endpoint answered nothing",
                where=", ".join(self.settings.urls),
                found=tally.left_out.most_common(1)[0][0],
                expected="answers",
                do="look into the server's log",
            )

    def _silent(self, url: str, why: str) -> NetworkError:
        return NetworkError(
            "no answer from the endpoint",
            where=url,
            found=f"{why}, for {self.settings.patience:,.0f} s",
            expected="an OpenAI-compatible server of the target",
            do="start the server, and the same command again: what is answered is kept",
        )

    def _refusal(self, server: Server, why: str) -> NetworkError:
        return NetworkError(
            "the endpoint refuses the requests",
            where=server.url,
            found=why,
            expected="/v1/completions that takes prompts as token ids",
            do=f"correct data.endpoint; a server that wants a key finds it in {KEY}",
        )


def _library() -> Any:
    return library("httpx", "data.endpoint", "endpoint")


def _choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, Sequence) or not choices or not isinstance(choices[0], Mapping):
        raise _Again("a reply without choices")
    return choices[0]


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """What a server is told of sampling; nothing is left to its defaults."""
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k or -1,
        "seed": sampling.seed,
    }


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which gives a number or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _said(text: str) -> str:
    return " ".join(text.split())[:160]
