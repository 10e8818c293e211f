"""Messages as a chat template takes them: texts as strings or in parts, arguments of calls as
objects or as JSON text, null or "" where nothing is said beside a call, thoughts under the name
that the template reads.

Templates differ in this, and one that is given the other form often writes something else without
an error (`{'city': 'Bern'}` for `{"city": "Bern"}`; nothing at all for a string, by LLaVA's), so
each is tried once with a call and a text of ours.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # as servers and templates name them
FUNCTION, VALUE = "probe_function", "probe value"
FORMS = ((False, None), (False, ""), (True, None), (True, ""))  # arguments as text, empty content

TODAY = re.compile(r"""\bstrftime_now\(\s*(['"])(.*?)\1\s*\)""")

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes calls. `as_text`: their arguments are JSON text; `nothing`: the content
    of a turn that only calls; `is_written`: whether it writes calls at all."""

    as_text: bool = False
    nothing: str | None = ""
    is_written: bool = False


@lru_cache(maxsize=16)
def call_form(tokenizer: Any, template: str) -> CallForm:
    """The first form in which the template writes a call as JSON; `template` is its text, so that
    a tokenizer whose template was replaced is tried again."""
    from jinja2.exceptions import TemplateError

    from specctl.runtime.target.templates.bounded_templates import tried

    for as_text, nothing in FORMS:
        try:
            text = tried(tokenizer, _probe(as_text, nothing))
        except TemplateError:
            continue
        is_python = f"'{VALUE}'" in text or (nothing is None and "None" in text)
        is_escaped = '\\"' in text
        if FUNCTION in text and VALUE in text and not is_python and not is_escaped:
            return CallForm(as_text, nothing, is_written=True)
    return CallForm()


@lru_cache(maxsize=16)
def takes_parts(tokenizer: Any, template: str) -> bool:
    """Whether a template writes a text in parts and loses one that is a string."""
    from jinja2.exceptions import TemplateError

    from specctl.runtime.target.templates.bounded_templates import tried

    try:
        if VALUE in tried(tokenizer, [{"role": "user", "content": VALUE}]):
            return False
        return VALUE in tried(tokenizer, [{"role": "user", "content": _parts(VALUE)}])
    except TemplateError:
        return False


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _probe(as_text: bool, nothing: str | None) -> list[dict[str, Any]]:
    arguments: Any = {"x": VALUE}
    function = {"name": FUNCTION, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": nothing, "tool_calls": [call]},
    ]


def as_taken(tokenizer: Any, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns in the forms that the tokenizer's chat template takes; nothing of them is lost."""
    template = template_text(tokenizer)
    return [_taken(tokenizer, template, dict(turn)) for turn in turns]


def template_text(tokenizer: Any) -> str:
    """The chat templates of a tokenizer as one text; "" without any."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(map(str, dict(found).values()))


def reads(template: str, name: str) -> bool:
    """Whether a template mentions a name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def reads_key(template: str, name: str) -> bool:
    """Whether a template looks a key up: message.NAME or message['NAME']."""
    return re.search(rf"\.{name}\b|['\"]{name}['\"]", template) is not None


def written_on(tokenizer: Any, day: str) -> dict[str, Any]:
    """What makes a tokenizer's chat template write an ISO date, whatever day it is: the template
    with that day in the places where it looks at the calendar."""
    template, date = tokenizer.chat_template, datetime.date.fromisoformat(day)
    if not isinstance(template, str):
        return {}
    return {"chat_template": TODAY.sub(lambda found: repr(date.strftime(found[2])), template)}


def writes_date(template: str) -> bool:
    """Whether a template writes the day on which it is used."""
    return TODAY.search(template) is not None


def _taken(tokenizer: Any, template: str, turn: dict[str, Any]) -> dict[str, Any]:
    if turn.get("role") == "developer" and not reads(template, "developer"):
        turn["role"] = "system"
    _name_thoughts(template, turn)
    calls = turn.get("tool_calls")
    if calls:
        form = call_form(tokenizer, template)
        turn["tool_calls"] = [_call(call, form) for call in calls]
        if not turn.get("content"):
            turn["content"] = form.nothing
    said = turn.get("content")
    if isinstance(said, str) and said and takes_parts(tokenizer, template):
        turn["content"] = _parts(said)
    return turn


def _name_thoughts(template: str, turn: dict[str, Any]) -> None:
    """Thoughts under the first name that the template reads; elsewhere they stay as they are."""
    given = next((name for name in THOUGHTS if turn.get(name)), None)
    known = next((name for name in THOUGHTS if reads_key(template, name)), None)
    if given is not None and known is not None and given != known and known not in turn:
        turn[known] = turn.pop(given)


def _call(call: Any, form: CallForm) -> Any:
    """A call, as {"function": {"name", "arguments"}}, with arguments in that form."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    function = {**function, "arguments": _arguments(function["arguments"], form)}
    return {**call, "function": function} if "function" in call else function


def _arguments(given: Any, form: CallForm) -> Any:
    """Text that is no JSON object stays as it is."""
    found = parsed_arguments(given)
    if form.as_text and isinstance(found, Mapping):
        return given if isinstance(given, str) else json.dumps(found, ensure_ascii=False)
    return found


def parsed_arguments(given: Any) -> Any:
    """The object that JSON text holds; whatever else it is stays as it is."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given
