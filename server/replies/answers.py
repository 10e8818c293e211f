"""The answers of the API in OpenAI's shapes: whole, and in chunks; both made of the same pieces."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.runtime.measure.stats import add_counts, shares
from specctl.server.engine_thread.contract import Piece, Ticket
from specctl.server.replies.message_parser import MessageParser, Parts
from specctl.server.replies.tokens import TokenTexts

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def event(body: Json, name: str | None = None) -> bytes:
    """A server-sent event. ASCII, so that no client takes U+2028 for the end of a line."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {ENCODER.encode(body)}\n\n".encode("ascii")


@dataclass(slots=True)
class Choice:
    """One choice as it grows. One writer: the request that reads its ticket."""

    index: int
    ticket: Ticket
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    num_tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    parser: MessageParser = field(default_factory=MessageParser)

    def take(self, piece: Piece) -> Parts:
        """Counts a piece in; returns what it holds."""
        self.text.append(piece.text)
        self.num_tokens += len(piece.tokens)
        self.reason = REASONS.get(piece.finish_reason or "")
        self.stop_reason = piece.stop_reason
        parts = self.parser.feed(piece.spans)
        if self.reason is not None:
            parts += self.parser.end()
            if self.parser.calls and self.reason == "stop":
                self.reason = "tool_calls"
        return parts


@dataclass(frozen=True, slots=True)
class ApiAnswer(ABC):
    """What a request is answered with. `verification`: lossless or approximate."""

    model: str
    texts: TokenTexts
    verification: str
    prompt_tokens: int
    tells_rounds: bool
    tells_usage: bool
    has_logprobs: bool
    choices: tuple[Choice, ...]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def take(self, choice: Choice, piece: Piece) -> Json | None:
        """Counts a piece in; returns the chunk that tells it, None if it tells nothing."""
        logprobs = self._logprobs(choice, piece) if self.has_logprobs else None
        is_first = not choice.text  # sent in any case: it names the role
        parts = choice.take(piece)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        part = self._part(piece, parts, is_first)
        body = {**part, "index": choice.index, "logprobs": logprobs}
        ended = {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
        chunk = self._chunk([{**body, **ended}])
        is_news = is_first or any(part.values()) or bool(piece.logprobs)
        if self.tells_rounds and piece.tokens:
            chunk["specctl"] = {"spans": piece.spans, "accepted": piece.accepted}
        if choice.reason is not None:
            chunk.setdefault("specctl", {})["stats"] = self._stats([choice])
        return chunk if is_news or "specctl" in chunk else None

    def add(self, choice: Choice, piece: Piece) -> None:
        """Counts a piece in of an answer that is not streamed."""
        self.take(choice, piece)

    # -- events -----------------------------------------------------------------------------------

    def opening(self) -> list[bytes]:
        """What a stream begins with."""
        return []

    def waiting(self) -> list[bytes]:
        """What is sent while nothing comes, so that nobody takes the connection for a dead one."""
        return []

    def events(self, choice: Choice, piece: Piece) -> list[bytes]:
        """Counts a piece in; returns the events that tell it."""
        chunk = self.take(choice, piece)
        if chunk is None:
            return []
        if self.tells_usage:
            chunk["usage"] = None
        return [event(chunk)]

    def closing(self) -> list[bytes]:
        """What a stream ends with that is whole."""
        return [*([event(self.usage_chunk())] if self.tells_usage else []), DONE]

    def failure(self, error: Json) -> list[bytes]:
        """What a stream ends with that broke off."""
        return [event(error)]

    def whole(self) -> Json:
        """The answer of a request that is not streamed."""
        choices = [
            {
                "index": choice.index,
                **self._body(choice),
                "logprobs": self._joined(choice) if self.has_logprobs else None,
                "finish_reason": choice.reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in self.choices
        ]
        about = self._about(self.whole_object)
        stats = {"stats": self._stats(self.choices)}
        return {**about, "choices": choices, "usage": self.usage(), "specctl": stats}

    def usage_chunk(self) -> Json:
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> Json:
        new = sum(choice.num_tokens for choice in self.choices)
        thoughts = sum(choice.parser.num_thoughts for choice in self.choices)
        found: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }
        if thoughts:
            found["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return found

    # -- the two shapes ---------------------------------------------------------------------------

    prefix = ""
    whole_object = chunk_object = ""

    @abstractmethod
    def _part(self, piece: Piece, parts: Parts, is_first: bool) -> Json:
        """A piece of an answer in a chunk."""

    @abstractmethod
    def _body(self, choice: Choice) -> Json:
        """The whole of a choice."""

    @abstractmethod
    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        """The log-probabilities of a piece."""

    @abstractmethod
    def _joined(self, choice: Choice) -> Json:
        """The log-probabilities of all pieces."""

    # -- what they share --------------------------------------------------------------------------

    def _about(self, kind: str) -> Json:
        name = self.prefix + self.id
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: Sequence[Json]) -> Json:
        return {**self._about(self.chunk_object), "choices": choices}

    def _stats(self, choices: Sequence[Choice]) -> Json:
        """What speculation did, in the words of `runtime/measure/stats.py`."""
        rows = [choice.ticket.stats for choice in choices]
        rounds, tokens = sum(r.rounds for r in rows), sum(r.tokens for r in rows)
        counts = (add_counts(r.accepted_at for r in rows), add_counts(r.tested_at for r in rows))
        outlines = [c.ticket.outline.to_json() for c in choices if c.ticket.outline is not None]
        return {
            "verification": self.verification,
            "rounds": rounds,
            "drafted": sum(r.drafted for r in rows),
            "accepted": sum(r.accepted for r in rows),
            "tau": round(tokens / rounds, 4) if rounds else None,
            "accepted_per_position": [round(share, 4) for share in shares(*counts)],
            **({"outline": outlines[0]} if outlines else {}),
        }
