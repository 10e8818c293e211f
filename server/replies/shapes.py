"""The two shapes of an answer: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from specctl.server.engine_thread.contract import Piece
from specctl.server.replies.answers import ApiAnswer, Choice, Json
from specctl.server.replies.message_parser import Call, Parts
from specctl.server.replies.tokens import LEAST
from specctl.server.tools.base import CallDelta


class ChatAnswer(ApiAnswer):
    """Choices hold a message, chunks a delta."""

    prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _part(self, piece: Piece, parts: Parts, is_first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": ""} if is_first else {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [_call_part(one) for one in parts.calls]
        return {"delta": delta}

    def _body(self, choice: Choice) -> Json:
        found = choice.parser
        message: Json = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_call(one) for one in found.calls]
        return {"message": message}

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        return {"content": [self.texts.drawn(one) for one in piece.logprobs or ()], "refusal": None}

    def _joined(self, choice: Choice) -> Json:
        content = [entry for part in choice.logprobs for entry in part["content"]]
        return {"content": content, "refusal": None}


class TextAnswer(ApiAnswer):
    """Choices and chunks hold text."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _part(self, piece: Piece, parts: Parts, is_first: bool) -> Json:
        return {"text": piece.text}

    def _body(self, choice: Choice) -> Json:
        return {"text": "".join(choice.text)}

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        drawn = piece.logprobs or ()
        return {
            "tokens": [self.texts.text_of(one.token) for one in drawn],
            "token_logprobs": [max(one.logprob, LEAST) for one in drawn],
            "top_logprobs": [self.texts.best(one) for one in drawn],
            "text_offset": list(piece.starts[: len(drawn)]),
        }

    def _joined(self, choice: Choice) -> Json:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [x for part in choice.logprobs for x in part[name]] for name in names}


def _call(one: Call) -> Json:
    """A call of a message."""
    about = {"name": one.name, "arguments": one.arguments}
    return {"id": one.id, "type": "function", "function": about}


def _call_part(one: CallDelta) -> Json:
    """A piece of a call in a chunk: the first one names it."""
    if one.name is None:
        return {"index": one.index, "function": {"arguments": one.arguments}}
    function = {"name": one.name, "arguments": one.arguments}
    return {"index": one.index, "id": one.id, "type": "function", "function": function}
