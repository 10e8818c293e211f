"""An answer in its parts as it streams: thoughts, content, tool calls.

Thoughts stand between <think> and </think> (Magistral: [THINK] and [/THINK]) at the beginning of an
answer; a template may have opened them already, at the end of the prompt. What stands in them is
read by nobody as a call.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field

from specctl.server.tools.base import CallDelta, CallParser, ParsedText
from specctl.server.tools.base import before_marker as before

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Parts:
    """What a piece of an answer holds. `thoughts`: how many of its tokens ended in thoughts."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    thoughts: int = 0

    def __iadd__(self, other: Parts) -> Parts:
        self.reasoning += other.reasoning
        self.content += other.content
        self.thoughts += other.thoughts
        self.calls = joined([*self.calls, *other.calls])
        return self


@dataclass(slots=True)
class Call:
    """A call as it grows."""

    id: str
    name: str
    arguments: str = ""


class MessageParser:
    """The reader of one answer. One writer: the request that it answers."""

    def __init__(
        self,
        tags: tuple[str, str] | None = None,
        is_thinking: bool = False,
        calls: CallParser | None = None,
        id_chars: int | None = None,
    ) -> None:
        self.reasoning, self.content = "", ""
        self.calls = list[Call]()
        self.num_thoughts = 0
        self._tags, self._parser, self._id_chars = tags, calls, id_chars
        self._at = "content" if tags is None else "thoughts" if is_thinking else "start"
        self._kept, self._space = "", ""

    @property
    def is_thinking(self) -> bool:
        return self._at == "thoughts"

    def feed(self, spans: tuple[str, ...]) -> Parts:
        """What the texts of these tokens hold."""
        parts = Parts()
        for span in spans:
            self._read(span, parts)
            parts.thoughts += self.is_thinking
        return self._noted(parts)

    def end(self) -> Parts:
        """What was held back, now that nothing follows."""
        parts = Parts()
        if self._at == "thoughts":
            self._think(self._kept, parts)
        elif self._kept:
            self._say(self._kept, parts)
        if self._parser is not None:
            _add(parts, self._parser.end())
        self._kept = ""
        return self._noted(parts)

    def _read(self, text: str, parts: Parts) -> None:
        text, self._kept = self._kept + text, ""
        if self._at == "start" and self._tags is not None:
            begin, bare = self._tags[0], text.lstrip()
            if begin.startswith(bare):
                self._kept = text
                return
            is_open = bare.startswith(begin)
            self._at = "thoughts" if is_open else "content"
            text = bare[len(begin) :] if is_open else text
        if self._at == "thoughts" and self._tags is not None:
            thought, marker, rest = before(text, (self._tags[1],))
            self._think(thought, parts)
            if marker is None:
                self._kept = rest
                return
            self._at, self._space, text = "gap", "", rest
        if self._at == "gap":
            text = text.lstrip()
            self._at = "content" if text else "gap"
        if self._at == "content" and text:
            self._say(text, parts)

    def _think(self, text: str, parts: Parts) -> None:
        """White space around thoughts is none of them."""
        text = self._space + text
        if not self.reasoning and not parts.reasoning:
            text = text.lstrip()
        bare = text.rstrip()
        parts.reasoning += bare
        self._space = text[len(bare) :]

    def _say(self, text: str, parts: Parts) -> None:
        if self._parser is None:
            parts.content += text
        else:
            _add(parts, self._parser.feed(text))

    def _noted(self, parts: Parts) -> Parts:
        """The whole so far; calls get their ids."""
        self.reasoning += parts.reasoning
        self.content += parts.content
        self.num_thoughts += parts.thoughts
        calls = list[CallDelta]()
        for one in parts.calls:
            if one.index == len(self.calls):
                self.calls.append(Call(one.id or self._new_id(), one.name or ""))
                one = CallDelta(one.index, one.arguments, one.name, self.calls[-1].id)
            self.calls[one.index].arguments += one.arguments
            calls.append(one)
        parts.calls = calls
        return parts

    def _new_id(self) -> str:
        if self._id_chars is None:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(LETTERS) for _ in range(self._id_chars))


def _add(parts: Parts, found: ParsedText) -> None:
    parts.content += found.content
    parts.calls = joined([*parts.calls, *found.calls])


def joined(calls: list[CallDelta]) -> list[CallDelta]:
    """Pieces of one call that come together are one piece."""
    found = list[CallDelta]()
    for one in calls:
        last = found[-1] if found else None
        if last is not None and last.index == one.index:
            arguments = last.arguments + one.arguments
            found[-1] = CallDelta(last.index, arguments, last.name, last.id)
        else:
            found.append(one)
    return found
