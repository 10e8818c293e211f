"""Llama 3: {"name": ..., "parameters": {...}} as the whole answer, or behind <|python_tag|>.

Several calls are separated by ";". Without the tag, an object is a call only if it names a tool of
the request: an answer may well be JSON. Behind the tag there may also be a call of a built-in tool
as Python writes it, `brave_search.call(query="...")`, or plain code for the interpreter.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from specctl.server.tools.base import CallParser, CallRules, Spelled, Tool, ToolFormat
from specctl.server.tools.base import before_marker as before
from specctl.server.tools.json_call import KEYS, SPACE, CallObject
from specctl.server.tools.rules import literal, object_rules, repeated

TAG = "<|python_tag|>"
INTERPRETERS = ("code_interpreter", "python", "ipython")
_BUILT_IN = re.compile(r"\s*(\w[\w.]*)\.call\((.*)\)\s*", re.DOTALL)


class Llama3Parser(CallParser):
    """An answer that begins with an object or with the tag; anything else is text up to a tag."""

    _is_tagged = False

    def begin(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if not bare or TAG.startswith(bare):
            return self.keep(text)
        self._mode = self._in_text
        if bare.startswith("{"):
            return self._open(bare)
        return text

    def _in_text(self, text: str) -> str:
        content, marker, rest = before(text, (TAG,))
        self.say(content)
        if marker is None:
            return self.keep(rest)
        self._is_tagged, self._mode = True, self._behind_tag
        return rest

    def _behind_tag(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if not bare:
            return self.keep(text)
        if bare.startswith("{"):
            return self._open(bare)
        self._mode = self._in_code
        return text

    def _in_code(self, text: str) -> str:
        return self.keep(text)  # whole at the end

    def _open(self, text: str) -> str:
        self._object, self._is_sent = CallObject(), False
        self._mode = self._in_object
        return text

    def _in_object(self, text: str) -> str:
        rest = self._object.feed(text)
        one = self._object
        is_known = self._is_tagged or one.name in self.names
        if one.name is not None and is_known and one.has_arguments and not self._is_sent:
            self._is_sent = True
            self.call(one.name)
        if self._is_sent:
            self.more(one.take())
        is_other = one.key not in ("", *KEYS) or one.name not in (None, *self.names)
        is_text = one.is_done or (is_other and not self._is_tagged)
        if one.is_broken or (is_text and not self._is_sent):
            self._mode = self._in_text
            if not self._is_sent:
                self.say(one.raw)
        elif one.is_done:
            self._mode = self._between
        return rest

    def _between(self, text: str) -> str:
        bare = text.lstrip(SPACE + ";,")
        if not bare or TAG.startswith(bare):
            return self.keep(text)
        if bare.startswith("{"):
            return self._open(bare)
        self._mode = self._in_text
        return bare if bare.startswith(TAG) else text

    def finish(self) -> None:
        if self._mode == self._in_object and not self._is_sent:
            self.say(self._object.raw)
        elif self._mode == self._in_code:
            self._code(self._kept)
        elif self._mode == self._between:
            self._kept = ""

    def _code(self, text: str) -> None:
        """A built-in tool, code for an interpreter that the request has, or nothing of the kind."""
        self._kept = ""
        match = _BUILT_IN.fullmatch(text)
        arguments = None if match is None else _keywords(match[2])
        interpreter = next((name for name in INTERPRETERS if name in self.names), None)
        if match is not None and arguments is not None:
            self.call(match[1], arguments)
        elif interpreter is not None:
            self.call(interpreter, json.dumps({"code": text}, ensure_ascii=False))
        else:
            self.say(text)


def _keywords(text: str) -> str | None:
    """`a="x", b=2` as a JSON object; None if it is not that."""
    try:
        found = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(found, ast.Call) or found.args:
            return None
        values = {str(word.arg): ast.literal_eval(word.value) for word in found.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def rules(tools: Sequence[Tool], spelled: Spelled, most: int, template: str) -> CallRules:
    """Objects, with the tag in front or without it; text that calls nothing begins otherwise."""
    others = object_rules(tools, '{"name": ', ', "parameters": ', "}")
    calls = f"{spelled(TAG)}? call {repeated(literal('; ') + ' call', most - 1)}"
    return CallRules("", calls, others, plain=r"\s*([^\s{<](.|\n)*)?")


TOOL_FORMAT = ToolFormat(
    name="llama3",
    summary="JSON as the whole answer, or behind <|python_tag|>: Llama 3.1 to 3.3",
    paper="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/",
    signs=("<|python_tag|>", "<|start_header_id|>"),
    markers=(TAG,),
    parser=Llama3Parser,
    rules=rules,
    form='{"name": %s, "parameters": %s}',
)
