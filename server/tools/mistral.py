"""Mistral: [TOOL_CALLS] and a JSON list of calls, or, of late, [TOOL_CALLS]name[ARGS]{...} each."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.server.tools.base import CallParser, CallRules, Spelled, Tool, ToolFormat
from specctl.server.tools.base import before_marker as before
from specctl.server.tools.json_call import SPACE, CallObject, JsonValue
from specctl.server.tools.rules import literal, object_rules, repeated, schema_rule

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LONGEST_NAME = 256


class MistralParser(CallParser):
    """Text up to the marker, then calls in either way of writing them."""

    def begin(self, text: str) -> str:
        content, marker, rest = before(text, (MARKER,))
        self.say(content)
        if marker is None:
            return self.keep(rest)
        self._mode = self._opening
        return rest

    def _opening(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if not bare:
            return self.keep(text)
        if bare[0] in "[{":
            self._is_list = bare[0] == "["
            return self._open(bare[1:] if self._is_list else bare)
        self._mode = self._in_name
        return bare

    # -- a list of objects ------------------------------------------------------------------------

    def _open(self, text: str) -> str:
        self._object, self._is_sent = CallObject(), False
        self._mode = self._in_object
        return text

    def _in_object(self, text: str) -> str:
        rest = self._object.feed(text)
        one = self._object
        if one.name is not None and not one.is_broken and not self._is_sent and one.has_arguments:
            self._is_sent = True
            self.call(one.name, id=one.id)
        if one.is_done and not self._is_sent and one.name is not None:
            self._is_sent = True
            self.call(one.name, id=one.id)
        if self._is_sent:
            self.more(one.take())
        if one.is_broken:
            self._mode = self.begin
            if not self._is_sent:
                self.say(one.raw)
        elif one.is_done:
            self._mode = self._between if self._is_list else self.begin
        return rest

    def _between(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if not bare:
            return ""
        if bare[0] == ",":
            return self._open(bare[1:])
        self._mode = self.begin
        return bare[1:] if bare[0] == "]" else bare

    # -- name[ARGS]{...} --------------------------------------------------------------------------

    def _in_name(self, text: str) -> str:
        head, marker, rest = before(text, (ARGS,))
        at = text.find("{")
        if marker is None and at < 0:
            if len(text) > LONGEST_NAME:
                self._mode = self.begin
                self.say(MARKER + text)
                return ""
            return self.keep(text)
        if marker is None or 0 <= at < len(head):
            head, rest = text[:at], text[at:]
        name, _, given = head.partition(CALL_ID)
        self.call(name.strip(), id=given.strip() or None)
        self._value = JsonValue()
        self._mode = self._in_arguments
        return rest.lstrip(SPACE)

    def _in_arguments(self, text: str) -> str:
        for at, char in enumerate(text):
            if self._value.is_done:
                return self._after(text[at:])
            if not self._value.add(char):
                return self._after(text[at:])
            self.more(char)
        return self._after("") if self._value.is_done else ""

    def _after(self, text: str) -> str:
        self._mode = self.begin
        return text

    def finish(self) -> None:
        if self._mode == self._in_object and not self._is_sent:
            self.say(MARKER + self._object.raw)
        elif self._mode in (self._in_name, self._opening):
            self._kept = MARKER + self._kept


def rules(tools: Sequence[Tool], spelled: Spelled, most: int, template: str) -> CallRules:
    """As the template writes calls of earlier turns."""
    if ARGS in template:
        found = {"call": " | ".join(f"call_{at}" for at in range(len(tools)))}
        for at, tool in enumerate(tools):
            arguments = schema_rule(tool.parameters, tool.strict)
            found[f"call_{at}"] = f"{literal(tool.name)} {spelled(ARGS)} arguments_{at}"
            found[f"arguments_{at}"] = arguments
        return CallRules(MARKER, f"call {repeated(spelled(MARKER) + ' call', most - 1)}", found)
    others = object_rules(tools, '{"name": ', ', "arguments": ', "}")
    more = repeated(literal(", ") + " call", most - 1)
    return CallRules(MARKER, f'" "? "[" call {more} "]"', others)


TOOL_FORMAT = ToolFormat(
    name="mistral",
    summary="behind [TOOL_CALLS], as a list or as name[ARGS]{...}: Mistral, Ministral, Magistral",
    paper="https://docs.mistral.ai/capabilities/function_calling/",
    signs=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    markers=(MARKER, ARGS, CALL_ID),
    parser=MistralParser,
    rules=rules,
    form='[TOOL_CALLS] [{"name": %s, "arguments": %s}]',
    id_chars=9,
)
