"""StubService: a Serving without a model, for tests of everything in front of the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specctl.core.errors import SpecctlError
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder
from specctl.server.engine_thread.service import (
    Busy,
    Counters,
    Finished,
    GenerateRequest,
    Limits,
    Piece,
    Status,
    Ticket,
    TokenLogprob,
    TooLong,
    Unavailable,
)


@cache
def stub_target() -> Target:
    """The tokenizer and chat template of the embedded target around a model that is never run."""
    return target_around(AutoTokenizer.from_pretrained(str(files("specctl.recipes") / "tiny")))


def target_around(tokenizer: Any, context: int = 1024) -> Target:
    """A model that is never run, with that tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=context,
    )
    return Target.from_model(LlamaForCausalLM(config), tokenizer, "stub")


@dataclass(eq=False)
class StubService:
    """Answers every ask with `text` (its first `max_new_tokens` tokens), `chunk` tokens a piece,
    the first token of a piece as drawn and the others as accepted drafts, `delay` seconds before
    each piece. `ends`: the text ends by itself, not at a limit. `fail_after`: so many pieces, then
    one with finish_reason "error". `refuse`: raised by every submit. At most `limits.max_batch` run
    and `limits.max_queue` wait.
    """

    text: str = "def add(a, b):\n    return a + b\n"
    delay: float = 0.0
    chunk: int = 3
    ends: bool = False
    fail_after: int | None = None
    refuse: SpecctlError | None = None
    target: Target = field(default_factory=stub_target)
    limits: Limits = field(default_factory=Limits)
    counters: Counters = field(default_factory=Counters)
    on_finish: list = field(default_factory=list)
    answers: set[Ticket] = field(default_factory=set)
    asks: list[GenerateRequest] = field(default_factory=list)
    state: str = "loading"
    why_off: str | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        self._tasks: dict[Ticket, asyncio.Task] = {}
        self._free = asyncio.Semaphore(self.limits.max_batch)

    def start(self) -> None:
        self.state = "ready"

    def stop(self) -> None:
        self.state = "stopped"
        for ticket in list(self._tasks):
            ticket.cancel()

    def status(self) -> Status:
        running = min(len(self._tasks), self.limits.max_batch)
        waiting = len(self._tasks) - running
        speculation = "on" if self.why_off is None else "off"
        slots, context = self.limits.max_batch, self.target.spec.max_positions
        return Status(self.state, running, waiting, slots, context, speculation, self.why_off)

    async def drain(self, seconds: float) -> bool:
        self.state = "draining"
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)
        return not self._tasks

    async def submit(self, ask: GenerateRequest) -> Ticket:
        if self.state != "ready":
            raise Unavailable(self.state)
        if self.refuse is not None:
            raise self.refuse
        new, context = ask.sampling.max_new_tokens, self.target.spec.max_positions
        if len(ask.tokens) + new > context:
            raise TooLong(len(ask.tokens), context, new)
        if len(self._tasks) >= self.limits.max_batch + self.limits.max_queue:
            raise Busy(1)
        ticket = Ticket(ask, self._cancel)
        self.asks.append(ask)
        self._tasks[ticket] = asyncio.create_task(self._answer(ticket))
        return ticket

    def _cancel(self, ticket: Ticket) -> None:
        task = self._tasks.get(ticket)
        if task is not None:
            ticket.loop.call_soon_threadsafe(task.cancel)

    async def _answer(self, ticket: Ticket) -> None:
        outcome, asked, times = "cancelled", time.monotonic(), []
        try:
            async with self._free:
                for piece in self._pieces(ticket.ask):
                    await asyncio.sleep(self.delay)
                    times.append((time.monotonic(), len(piece.tokens)))
                    self._count(ticket, piece)
                    outcome = piece.finish_reason or outcome
                    ticket.deliver(piece)
        finally:
            self._tasks.pop(ticket, None)
            ticket.deliver(None)
            self._report(ticket, outcome, asked, times)

    def _pieces(self, ask: GenerateRequest) -> list[Piece]:
        tokens = self.target.encode(self.text)[: ask.sampling.max_new_tokens]
        is_whole = len(tokens) == len(self.target.encode(self.text))
        stream = TextStream(TokenDecoder.of(self.target, ask.shown))
        texts, starts = [], []
        for token in tokens:
            starts.append(stream.position)
            texts.append(stream.add(token))
        texts[-1] += stream.end()
        pieces = []
        for at in range(0, len(tokens), self.chunk):
            ids, part = tokens[at : at + self.chunk], tuple(texts[at : at + self.chunk])
            places = tuple(starts[at : at + self.chunk])
            last = "eos" if self.ends and is_whole else "length"
            reason = last if at + self.chunk >= len(tokens) else None
            if self.fail_after is not None and len(pieces) >= self.fail_after:
                return [*pieces, Piece((), (), "", (), None, "error")]
            logprobs = None
            if ask.logprobs is not None:
                best = [(t, -0.5 - i) for i, t in enumerate(range(ask.logprobs))]
                logprobs = tuple(TokenLogprob(t, -0.5, tuple(best)) for t in ids)
            accepted = tuple(i > 0 for i in range(len(ids)))
            pieces.append(
                Piece(tuple(ids), accepted, "".join(part), part, logprobs, reason, places)
            )
        return pieces

    def _count(self, ticket: Ticket, piece: Piece) -> None:
        num = len(piece.tokens)
        ticket.stats.count(max(num - 1, 0), sum(piece.accepted), num, is_rejected=False)
        self.counters.rounds += 1
        self.counters.steps += 1
        self.counters.tokens += num
        self.counters.accepted += sum(piece.accepted)
        self.counters.drafted += max(num - 1, 0)
        self.counters.drafts += num > 1

    def _report(self, ticket: Ticket, outcome: str, asked: float, times: list) -> None:
        self.counters.requests[outcome] = self.counters.requests.get(outcome, 0) + 1
        self.counters.prompt_tokens += len(ticket.ask.tokens)
        gaps = [
            (now - before) / num for (before, _), (now, num) in pairwise(times) for _ in range(num)
        ]
        first = times[0][0] - asked if times else None
        done = Finished(outcome, ticket.stats, len(ticket.ask.tokens), 0.0, first, tuple(gaps))
        for callback in self.on_finish:
            callback(done)
