"""What a tool format is: a parser of its calls, a grammar of them, and how its templates look.

A parser is fed text as it is set free and gives back what it is sure of: content, and pieces of
calls. What may still become a call is held back; what turns out to be none becomes content, so that
no character of an answer is lost.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Spelled = Callable[[str], str]  # a marker as a term of a grammar: its token, or its characters


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index` of an answer. The first one has its `name` (and the `id` that
    the model gave it, if it did); the `arguments` of all joined are JSON text."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


@dataclass(slots=True)
class ParsedText:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class CallParser(ABC):
    """The reader of one answer; one writer: the request that it answers.

    `_mode` takes what has come and returns what it leaves to the next mode; a mode that must see
    more text keeps what it has in `_kept` and returns "". White space around calls is no content.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.num_calls = names, 0
        self._kept, self._space, self._found = "", "", ParsedText()
        self._mode: Callable[[str], str] = self.begin

    @abstractmethod
    def begin(self, text: str) -> str:
        """The first mode."""

    def finish(self) -> None:
        """No text follows: say what was held back, beyond what was kept."""
        return

    def feed(self, text: str) -> ParsedText:
        """What this text sets free."""
        text, self._kept = self._kept + text, ""
        while text:
            text = self._mode(text)
        found, self._found = self._found, ParsedText()
        return found

    def end(self) -> ParsedText:
        """What was held back, now that nothing follows."""
        self.finish()
        self.say(self._kept)
        if self._space and not self.num_calls:
            self._found.content += self._space
        self._kept = self._space = ""
        found, self._found = self._found, ParsedText()
        return found

    # -- for modes --------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """It is content. White space waits for what follows it."""
        text = self._space + text
        bare = text.rstrip()
        self._found.content += bare
        self._space = text[len(bare) :]

    def keep(self, text: str) -> str:
        """It is not known yet what it is."""
        self._kept = text
        return ""

    def call(self, name: str, arguments: str = "", id: str | None = None) -> None:
        """A call begins."""
        self._space = ""
        self._found.calls.append(CallDelta(self.num_calls, arguments, name, id))
        self.num_calls += 1

    def more(self, arguments: str) -> None:
        """The newest call goes on."""
        if arguments:
            self._found.calls.append(CallDelta(self.num_calls - 1, arguments))


def before_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """The text in front of the first marker, that marker, and what follows; without one: the text
    that cannot be part of a marker, None, and the rest that may be the beginning of one."""
    places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if places:
        at, marker = min(places)
        return text[:at], marker, text[at + len(marker) :]
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return text[:-count], None, text[-count:]
    return text, None, ""


@dataclass(frozen=True, slots=True)
class CallRules:
    """A grammar of calls, in llguidance's dialect of Lark. An answer that calls is `marker` (a
    string that no other text may hold; "" for none) and then what rule `calls` describes."""

    marker: str
    calls: str
    others: Mapping[str, str] = field(default_factory=dict)  # further rules by name
    plain: str = r"(.|\n)*"  # a regular expression of answers that do not call


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What the module of a format defines as TOOL_FORMAT. `signs`: a chat template that has one of
    them writes this format. `markers` are kept in the text even where they are control tokens.
    `rules(tools, spelled, most, template)`: the grammar of one to `most` calls. `id_chars`: the
    length of call ids that are letters and digits only, None for ids like OpenAI's. `form`: a call
    with its name and arguments left out."""

    name: str
    summary: str
    paper: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    parser: Callable[[frozenset[str]], CallParser]
    rules: Callable[[Sequence[Tool], Spelled, int, str], CallRules]
    form: str
    id_chars: int | None = None

    def write(self, name: str, arguments: Any) -> str:
        """A call as the model writes it."""
        return self.form % (json.dumps(name), json.dumps(arguments, ensure_ascii=False))

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tools in a system message, for templates that know none."""
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        intro = "You may call these functions:"
        how = f"To call one, answer with nothing but\n{self.write('FUNCTION', {'NAME': 'VALUE'})}"
        return "\n".join([intro, *lines, how])
