"""The answer of /v1/messages: blocks (thoughts, a text, calls of tools), whole or as the events of
Anthropic's Messages API. A block is done when the next one begins."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from specctl.server.engine_thread.contract import Piece
from specctl.server.errors import MESSAGES_KINDS
from specctl.server.replies.answers import ApiAnswer, Choice, Json, event
from specctl.server.replies.message_parser import Parts

STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
FULL = "model_context_window_exceeded"
DELTAS = {  # of a block: the kind of its deltas, and their field
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """A block that was begun: its kind and, of a call, its number."""

    kind: str
    call: int = -1


@dataclass(slots=True)
class SentBlocks:
    """What has been sent of an answer. One writer: the request that it answers."""

    open: AnswerBlock | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class MessagesAnswer(ApiAnswer):
    """One choice, which is a message. `context`: how long prompt and answer may be together; where
    that ended an answer, and not the client's `max_tokens`, it says so."""

    max_tokens: int = 0
    context: int = 0
    progress: SentBlocks = field(default_factory=SentBlocks)

    # -- events -----------------------------------------------------------------------------------

    def opening(self) -> list[bytes]:
        return [_event("message_start", message=self._message([], None)), *self.waiting()]

    def waiting(self) -> list[bytes]:
        return [_event("ping")]

    def events(self, choice: Choice, piece: Piece) -> list[bytes]:
        parts, found = choice.take(piece), list[bytes]()
        open_call = -1 if self.progress.open is None else self.progress.open.call
        if parts.calls and parts.calls[0].index == open_call:  # ends before any text behind it
            found.append(self._delta("tool_use", parts.calls.pop(0).arguments))
        for kind, text in (("thinking", parts.reasoning), ("text", parts.content)):
            if text:
                found += self._begin(AnswerBlock(kind), {"type": kind, kind: ""})
                found.append(self._delta(kind, text))
        for call in parts.calls:
            block: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            found += self._begin(AnswerBlock("tool_use", call.index), block)
            if call.arguments:
                found.append(self._delta("tool_use", call.arguments))
        return found

    def closing(self) -> list[bytes]:
        found = self._end()
        if not self.progress.count:  # a message has a block, and be it an empty one
            found += self._begin(AnswerBlock("text"), {"type": "text", "text": ""}) + self._end()
        delta = {"stop_reason": self._stop(), "stop_sequence": self._stop_sequence()}
        about: Json = {"usage": self._used(), "specctl": {"stats": self._stats(self.choices)}}
        return [*found, _event("message_delta", delta=delta, **about), _event("message_stop")]

    def failure(self, error: Json) -> list[bytes]:
        found = error["error"]
        kind = MESSAGES_KINDS.get(found["type"], found["type"])
        return [_event("error", error={"type": kind, "message": found["message"]})]

    def _begin(self, block: AnswerBlock, content: Json) -> list[bytes]:
        """That block is open; events where it was not."""
        if self.progress.open == block:
            return []
        found = self._end()
        if block.kind == "thinking":
            content = {**content, "signature": ""}
        self.progress.open = block
        self.progress.count += 1
        begun = _event("content_block_start", index=self._index, content_block=content)
        return [*found, begun]

    def _delta(self, kind: str, text: str) -> bytes:
        name, key = DELTAS[kind]
        delta = {"type": name, key: text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> list[bytes]:
        """The open block is done."""
        block, self.progress.open = self.progress.open, None
        return [] if block is None else [_event("content_block_stop", index=self._index)]

    @property
    def _index(self) -> int:
        return self.progress.count - 1

    # -- the message ------------------------------------------------------------------------------

    def add(self, choice: Choice, piece: Piece) -> None:
        choice.take(piece)

    def whole(self) -> Json:
        said, blocks = self.choices[0].parser, list[Json]()
        if said.reasoning:
            blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.content or not (said.calls or said.reasoning):
            blocks.append({"type": "text", "text": said.content})
        for call in said.calls:
            about = {"id": call.id, "name": call.name, "input": _arguments(call.arguments)}
            blocks.append({"type": "tool_use", **about})
        return {
            **self._message(blocks, self._stop()),
            "specctl": {"stats": self._stats(self.choices)},
        }

    def _message(self, blocks: list[Json], stop: str | None) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": stop,
            "stop_sequence": self._stop_sequence(),
            "usage": self._used(),
        }

    def _stop(self) -> str:
        if self._stop_sequence() is not None:
            return "stop_sequence"
        choice = self.choices[0]
        is_full = self.prompt_tokens + choice.num_tokens >= self.context > 0
        if choice.reason == "length" and is_full and choice.num_tokens < self.max_tokens:
            return FULL
        return STOPS.get(choice.reason or "", "end_turn")

    def _stop_sequence(self) -> str | None:
        """The string that ended the text; None where a token of the target did."""
        choice = self.choices[0]
        found = choice.stop_reason
        return found if choice.reason == "stop" and isinstance(found, str) else None

    def _used(self) -> Json:
        used = self.usage()
        about = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        counts = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        return {**counts, **about}

    # -- what chunks are made of elsewhere --------------------------------------------------------

    def _part(self, piece: Piece, parts: Parts, is_first: bool) -> Json:
        raise AssertionError("a message has no chunks")

    def _body(self, choice: Choice) -> Json:
        raise AssertionError("a message has no choices")

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        raise AssertionError("a message has no log-probabilities")

    def _joined(self, choice: Choice) -> Json:
        raise AssertionError("a message has no log-probabilities")


def _event(kind: str, **about: Any) -> bytes:
    return event({"type": kind, **about}, kind)


def _arguments(text: str) -> Any:
    """What a call was made with; of an answer that was cut off, the text that there is."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {"incomplete": text}
    return found if isinstance(found, dict) else {"value": found}
