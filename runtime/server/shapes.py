"""The two shapes of an answer: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from itertools import accumulate

from specctl.runtime.server.answers import ApiAnswer, Choice, Json
from specctl.runtime.server.contract import Piece
from specctl.runtime.server.tokens import LEAST


class ChatAnswer(ApiAnswer):
    """Choices hold a message, chunks a delta."""

    prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _part(self, text: str, is_first: bool) -> Json:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text} if text or is_first else {}}

    def _body(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        del choice
        return {"content": [self.texts.drawn(one) for one in piece.logprobs or ()], "refusal": None}

    def _joined(self, choice: Choice) -> Json:
        content = [entry for part in choice.logprobs for entry in part["content"]]
        return {"content": content, "refusal": None}


class TextAnswer(ApiAnswer):
    """Choices and chunks hold text."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _part(self, text: str, is_first: bool) -> Json:
        del is_first
        return {"text": text}

    def _body(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        drawn = piece.logprobs or ()
        ends = accumulate(map(len, piece.spans), initial=choice.num_chars)
        return {
            "tokens": [self.texts.text_of(one.token) for one in drawn],
            "token_logprobs": [max(one.logprob, LEAST) for one in drawn],
            "top_logprobs": [self.texts.best(one) for one in drawn],
            "text_offset": [end for end, _ in zip(ends, drawn, strict=False)],
        }

    def _joined(self, choice: Choice) -> Json:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [x for part in choice.logprobs for x in part[name]] for name in names}
