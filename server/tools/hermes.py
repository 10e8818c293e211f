"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a row."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.server.tools.base import CallParser, CallRules, Spelled, Tool, ToolFormat
from specctl.server.tools.base import before_marker as before
from specctl.server.tools.json_call import SPACE, CallObject
from specctl.server.tools.rules import literal, object_rules, repeated

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Text, and calls between tags."""

    def begin(self, text: str) -> str:
        content, marker, rest = before(text, (BEGIN,))
        self.say(content)
        if marker is None:
            return self.keep(rest)
        self._object, self._is_sent = CallObject(), False
        self._mode = self._in_call
        return rest

    def _in_call(self, text: str) -> str:
        rest = self._object.feed(text)
        ready = self._object.take()
        if self._object.name is not None and not self._object.is_broken and not self._is_sent:
            self._is_sent = True
            self.call(self._object.name, id=self._object.id)
        if self._is_sent:
            self.more(ready)
        if self._object.is_broken and not self._is_sent:
            self.say(BEGIN + self._object.raw)
            self._mode = self.begin
        elif self._object.is_done or self._object.is_broken:
            self._mode = self._behind
        return rest

    def _behind(self, text: str) -> str:
        """Between the object and its end tag, which a model may forget."""
        bare = text.lstrip(SPACE)
        if bare.startswith(END):
            self._mode = self.begin
            return bare[len(END) :]
        if END.startswith(bare):
            return self.keep(text)
        self._mode = self.begin
        return text

    def finish(self) -> None:
        if self._mode == self._in_call and not self._is_sent:
            self.say(BEGIN + self._object.raw)
        elif self._mode == self._behind:
            self._kept = ""


def rules(tools: Sequence[Tool], spelled: Spelled, most: int, template: str) -> CallRules:
    """The calls behind the first tag, each on a line of its own."""
    others = object_rules(tools, '{"name": ', ', "arguments": ', "}")
    line, end = literal("\n"), spelled(END)
    again = f"{line} {spelled(BEGIN)} {line} call {line} {end}"
    return CallRules(BEGIN, f"{line} call {line} {end} {repeated(again, most - 1)}", others)


TOOL_FORMAT = ToolFormat(
    name="hermes",
    summary="JSON between <tool_call> tags: Hermes, Qwen2.5, Qwen3, QwQ",
    paper="https://github.com/NousResearch/Hermes-Function-Calling",
    signs=("<tool_call>",),
    markers=(BEGIN, END),
    parser=HermesParser,
    rules=rules,
    form='<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>',
)
