"""The answer of /v1/responses: items (thoughts, a message, calls), whole or as typed events.

Items follow one another: an item is done when the next one begins. Nothing is stored, so an id can
be asked for by nobody later.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specctl.runtime.sampling.sampling import Sampling
from specctl.server.engine_thread.contract import Piece
from specctl.server.replies.answers import ApiAnswer, Choice, Json, event
from specctl.server.replies.message_parser import Parts
from specctl.server.requests.responses_fields import ResponsesRequest


@dataclass(slots=True)
class AnswerItem:
    """An item as it grows: `kind` is reasoning, message or function_call; `call` its number."""

    kind: str
    index: int
    id: str
    call: int = -1
    name: str = ""
    call_id: str = ""
    text: str = ""

    def whole(self, status: str) -> Json:
        """As it is listed in `output`."""
        if self.kind == "function_call":
            about: Json = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"id": self.id, "type": self.kind, "status": status, **about}
        if self.kind == "reasoning":
            part = self.part()
            return {"id": self.id, "type": self.kind, "summary": [], "content": [part]}
        content = [self.part()]
        about = {"role": "assistant", "status": status, "content": content}
        return {"id": self.id, "type": "message", **about}

    def begun(self) -> Json:
        """As it is announced."""
        found = self.whole("in_progress")
        return {**found, "content": []} if "content" in found else {**found, "arguments": ""}

    def part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


WORDS = {"message": "output_text", "reasoning": "reasoning_text"}  # of their events
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class ToldItems:
    """What has been sent of an answer. One writer: the request that it answers."""

    items: list[AnswerItem] = field(default_factory=list)
    open: AnswerItem | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class ResponsesAnswer(ApiAnswer):
    """`asked`: the fields of the request that the answer repeats."""

    asked: Mapping[str, Any] = field(default_factory=dict)
    progress: ToldItems = field(default_factory=ToldItems)

    # -- events -----------------------------------------------------------------------------------

    def opening(self) -> list[bytes]:
        now = self._response("in_progress")
        return [self._event(kind, response=now) for kind in ("created", "in_progress")]

    def events(self, choice: Choice, piece: Piece) -> list[bytes]:
        return [found for parts in [choice.take(piece)] for found in self._tell(parts)]

    def closing(self) -> list[bytes]:
        found = self._close()
        status = self._status()
        return [*found, self._event(status, response=self._response(status))]

    def failure(self, error: Json) -> list[bytes]:
        found = error["error"]
        about = {"code": found["code"] or found["type"], "message": found["message"]}
        failed = {**self._response("failed"), "error": about}
        return [self._event("failed", response=failed)]

    def add(self, choice: Choice, piece: Piece) -> None:
        choice.take(piece)

    def whole(self) -> Json:
        choice = self.choices[0].parser
        said = bool(choice.content) or not choice.calls
        self._tell(Parts(choice.reasoning, choice.content if said else ""))
        if said and self.progress.open is None:
            self._open("message")
        for at, call in enumerate(choice.calls):
            self._close()
            self._open("function_call", at, call.name, call.id).text = call.arguments
        self._close()
        return self._response(self._status())

    def _tell(self, parts: Parts) -> list[bytes]:
        """Events of what a piece holds."""
        found: list[bytes] = []
        for kind, text in (("reasoning", parts.reasoning), ("message", parts.content)):
            if text:
                found += self._item(kind)
                found.append(self._delta(WORDS[kind] + ".delta", text))
        for call in parts.calls:
            found += self._item("function_call", call.index, call.name or "", call.id or "")
            if call.arguments:
                found.append(self._delta("function_call_arguments.delta", call.arguments))
        return found

    def _item(self, kind: str, call: int = -1, name: str = "", call_id: str = "") -> list[bytes]:
        """That item is open; events where it was not."""
        now = self.progress.open
        if now is not None and (now.kind, now.call) == (kind, call):
            return []
        found = self._close()
        item = self._open(kind, call, name, call_id)
        begun = item.begun()
        found.append(self._event("output_item.added", output_index=item.index, item=begun))
        if kind != "function_call":
            found.append(self._part_event("added", item))
        return found

    def _open(self, kind: str, call: int = -1, name: str = "", call_id: str = "") -> AnswerItem:
        now, id = self.progress, f"{PREFIXES[kind]}_{secrets.token_hex(16)}"
        now.open = AnswerItem(kind, len(now.items), id, call, name, call_id)
        now.items.append(now.open)
        return now.open

    def _close(self) -> list[bytes]:
        """The open item is done."""
        item, self.progress.open = self.progress.open, None
        if item is None:
            return []
        where = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            about: Json = {"name": item.name, "arguments": item.text}
            found = [self._event("function_call_arguments.done", **where, **about)]
        else:
            about = {"content_index": 0, "text": item.text}
            logprobs: Json = {"logprobs": []} if item.kind == "message" else {}
            done = self._event(f"{WORDS[item.kind]}.done", **where, **about, **logprobs)
            found = [done, self._part_event("done", item)]
        whole = item.whole("completed")
        return [*found, self._event("output_item.done", output_index=item.index, item=whole)]

    def _delta(self, kind: str, text: str) -> bytes:
        item = self.progress.open
        assert item is not None, "text belongs to an item"
        item.text += text
        where: Json = {"item_id": item.id, "output_index": item.index}
        if item.kind != "function_call":
            where["content_index"] = 0
        if item.kind == "message":
            where["logprobs"] = []
        return self._event(kind, **where, delta=text)

    def _part_event(self, what: str, item: AnswerItem) -> bytes:
        where = {"item_id": item.id, "output_index": item.index, "content_index": 0}
        return self._event(f"content_part.{what}", **where, part=item.part())

    def _event(self, kind: str, **about: Any) -> bytes:
        number, name = self.progress.number, f"response.{kind}"
        self.progress.number += 1
        return event({"type": name, "sequence_number": number, **about}, name)

    # -- the response -----------------------------------------------------------------------------

    def _status(self) -> str:
        return "incomplete" if self.choices[0].reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        is_over = status not in ("in_progress", "failed")
        items = self.progress.items if is_over else []
        ends = {"incomplete": "incomplete"}
        output = [item.whole(ends.get(status, "completed")) for item in items]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        about = {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self.model,
            "output": output,
            "usage": self._response_usage() if is_over else None,
            "store": False,
            "previous_response_id": None,
            **self.asked,
        }
        if is_over:
            about["specctl"] = {"stats": self._stats(self.choices)}
        return about

    def _response_usage(self) -> Json:
        used = self.usage()
        thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": used["total_tokens"],
        }

    # -- what chunks are made of elsewhere --------------------------------------------------------

    def _part(self, piece: Piece, parts: Parts, is_first: bool) -> Json:
        raise AssertionError("a response has no chunks")

    def _body(self, choice: Choice) -> Json:
        raise AssertionError("a response has no choices")

    def _logprobs(self, choice: Choice, piece: Piece) -> Json:
        raise AssertionError("a response has no log-probabilities")

    def _joined(self, choice: Choice) -> Json:
        raise AssertionError("a response has no log-probabilities")


def repeated(body: ResponsesRequest, sampling: Sampling) -> Json:
    """What the answer repeats of its request."""
    choice = body.tool_choice
    named = choice if isinstance(choice, str | None) else choice.model_dump()
    form = body.text.format if body.text is not None else None
    plain: Json = {"type": "text"}
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": plain if form is None else form.model_dump(by_alias=True)},
        "tool_choice": named or "auto",
        "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in body.tools or ()],
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
