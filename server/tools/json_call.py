"""A call as a JSON object, read while it is written: {"name": ..., "arguments": {...}}.

Arguments are passed on as the model writes them, character by character, as soon as the name is
known. Llama 3 writes "parameters"; some models write the arguments as a string that holds JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "function")
KEYS = (*ARGUMENTS, *NAMES, "type", "id")


class JsonValue:
    """One JSON value as it grows: `text` so far. It is not checked, only its end is found."""

    def __init__(self) -> None:
        self.text, self.is_done = "", False
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def add(self, char: str) -> bool:
        """Whether the character belongs to the value; a number ends in front of what follows it."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            self.is_done = not self._in_string and self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif self._depth == 0 and char in SPACE + ",}]":
            self.is_done = True
            return False
        self.text += char
        return True


@dataclass(slots=True)
class CallObject:
    """The reader of one object. `name` and `has_arguments` say how far it has come, `raw` is all
    that it has taken, `is_broken` that it is no call and never will be."""

    name: str | None = None
    id: str | None = None
    has_arguments: bool = False
    is_done: bool = False
    is_broken: bool = False
    raw: str = ""
    key: str = ""  # the newest one
    _at: str = "start"
    _value: JsonValue = field(default_factory=JsonValue)
    _ready: str = ""  # arguments that nobody has taken yet

    def feed(self, text: str) -> str:
        """Read on; returns what follows the object."""
        for at, char in enumerate(text):
            if self.is_done or self.is_broken:
                return text[at:]
            self._read(char)
            self.raw += char
        return ""

    def take(self) -> str:
        """Arguments that have come since the last time; "" until the name is known."""
        if self.name is None:
            return ""
        taken, self._ready = self._ready, ""
        return taken

    def _read(self, char: str) -> None:
        if self._at in ("key", "value"):
            self._grow(char)
        elif char in SPACE:
            return
        elif self._at == "start":
            self._go("open", char == "{")
        elif self._at in ("open", "more") and char == '"':
            self._begin("key", char)
        elif self._at in ("open", "comma") and char == "}":
            self._close()
        elif self._at == "comma":
            self._go("more", char == ",")
        elif self._at == "colon":
            self._go("before", char == ":")
        elif self._at == "before":
            self._begin("value", char)
        else:
            self.is_broken = True

    def _go(self, to: str, ok: bool) -> None:
        self._at, self.is_broken = to, not ok

    def _begin(self, at: str, char: str) -> None:
        self._at, self._value = at, JsonValue()
        if at == "value" and self.key in ARGUMENTS:
            self.has_arguments = True
        self._grow(char)

    def _grow(self, char: str) -> None:
        taken = self._value.add(char)
        streams = self._at == "value" and self.key in ARGUMENTS and self._value.text[:1] == "{"
        if taken and streams:
            self._ready += char
        if not self._value.is_done:
            return
        try:
            found = json.loads(self._value.text, strict=False)
        except ValueError:
            self.is_broken = not streams  # what was streamed cannot be taken back
            found = None
        if self._at == "key":
            self.key, self._at = found or "", "colon"
            return
        self._at = "comma"
        if not streams:
            self._set(found)
        if not taken:
            self._read(char)

    def _set(self, found: Any) -> None:
        """A field that was not streamed."""
        if self.key in ARGUMENTS:
            self._ready += found if isinstance(found, str) else self._value.text
            if found is None:
                self._ready = "{}"
        elif self.key in NAMES and isinstance(found, str):
            self.name = found
        elif self.key == "function" and isinstance(found, dict):
            self._nested(found)
        elif self.key == "id" and isinstance(found, str):
            self.id = found

    def _nested(self, found: dict[str, Any]) -> None:
        given = [found[key] for key in ARGUMENTS if key in found]
        if isinstance(found.get("name"), str):
            self.name = found["name"]
            self._ready += json.dumps(given[0]) if given else ""
            self.has_arguments = self.has_arguments or bool(given)

    def _close(self) -> None:
        self.is_done = self.name is not None
        self.is_broken = not self.is_done
        if not self.has_arguments:
            self._ready = "{}"
