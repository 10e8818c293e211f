"""Grammars of calls: what formats share of them, and the grammar of a whole answer.

An answer may think first, and then either calls tools or says something; each part as far as the
request needs it. Rules are written in llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.runtime.sampling.grammar import WHITESPACE, GrammarSpec
from specctl.server.tools.base import CallRules, Spelled, Tool

ANY = r"/(.|\n)*/"


def literal(text: str) -> str:
    """A string as a term of a grammar."""
    return json.dumps(text)


def repeated(term: str, most: int) -> str:
    """That term up to so many times."""
    return f"({term}){{0,{most}}}" if most else ""


def schema_rule(schema: Mapping[str, Any], is_strict: bool) -> str:
    """JSON of a schema. What llguidance does not know of a schema that is not strict (a format such
    as "uri", say) is left to the model; of one that is, it is an error."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def object_rules(tools: Sequence[Tool], begin: str, middle: str, end: str) -> dict[str, str]:
    """Rule `call`: one of the tools, its name between `begin` and `middle`, then its arguments."""
    found = {"call": " | ".join(f"call_{at}" for at in range(len(tools)))}
    for at, tool in enumerate(tools):
        head = literal(begin + json.dumps(tool.name) + middle)
        found[f"call_{at}"] = f"{head} arguments_{at}" + (f" {literal(end)}" if end else "")
        found[f"arguments_{at}"] = schema_rule(tool.parameters, tool.strict)
    return found


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must be. `thinks`: it begins inside of its thoughts, which `think_end` ends,
    if there are any. `calls`: how it may call; `must_call`: nothing else. `form`: what it says
    where it does not call; None for any text."""

    thinks: bool = False
    think_tags: tuple[str, str] | None = None
    calls: CallRules | None = None
    must_call: bool = False
    form: GrammarSpec | None = None

    def grammar(self, spelled: Spelled) -> GrammarSpec | None:
        """One grammar of all of it; None where any text will do."""
        if self.calls is None and (self.form is None or self.think_tags is None):
            return self.form
        rules = dict[str, str]()
        says = self._says(rules)
        body = f"{self._calls(rules, spelled)} | {says}" if says else self._calls(rules, spelled)
        rules["body"] = body if self.calls is not None else says
        start = self._thoughts(rules, spelled)
        lines = [f"start: {start}"]
        lines += [f"{name}: {rule}" for name, rule in rules.items()]
        return GrammarSpec("lark", "\n".join(lines))

    def _says(self, rules: dict[str, str]) -> str:
        """What is no call; "" where the answer must call."""
        if self.must_call and self.calls is not None:
            return ""
        if self.form is not None:
            rules["form"] = nested(self.form)
            return "form"
        assert self.calls is not None, "without calls there is a form"
        rules["PLAIN"] = f"/{_escaped(self.calls.plain)}/" + _without(self.calls.marker)
        return "PLAIN"

    def _calls(self, rules: dict[str, str], spelled: Spelled) -> str:
        if self.calls is None:
            return ""
        rules |= {"calls": self.calls.calls, **self.calls.others}
        marker = self.calls.marker
        if not marker:
            return "calls"
        term = spelled(marker)
        if self.must_call or self.form is not None:
            return f"{term} calls"
        if _is_token(term):  # no other text spells it
            rules["FREE"] = ANY + _without(marker)
            return f"FREE? {term} calls"
        rules[f"free[suffix={literal(marker)}]"] = ANY
        return "free calls"

    def _thoughts(self, rules: dict[str, str], spelled: Spelled) -> str:
        """What stands in front of the body: nothing, or thoughts to their end."""
        if self.think_tags is None:
            return "body"
        begin, end = map(spelled, self.think_tags)
        if _is_token(end):
            rules["THOUGHT"] = ANY + _without(self.think_tags[1])
            inside = f"THOUGHT? {end}"
        else:
            rules[f"thought[suffix={literal(self.think_tags[1])}]"] = ANY
            inside = "thought"
        space = r"/\s{0,4}/"
        return f"{inside} {space} body" if self.thinks else f"({begin} {inside} {space})? body"


def nested(form: GrammarSpec) -> str:
    """A grammar as a rule of another one."""
    if form.kind == "regex":
        return f"/{_escaped(form.text)}/"
    if form.kind == "lark":
        return "%lark {\n" + form.text + "\n}"
    schema = json.loads(form.text) if form.kind == "json_schema" else {"type": "object"}
    return schema_rule(schema, is_strict=True)


def _escaped(pattern: str) -> str:
    """A slash ends a regular expression in Lark."""
    return re.sub(r"\\.|/", lambda one: "\\/" if one[0] == "/" else one[0], pattern, flags=re.S)


def _without(marker: str) -> str:
    """No text that spells it."""
    return rf" & ~/(.|\n)*{_escaped(re.escape(marker))}(.|\n)*/" if marker else ""


def _is_token(term: str) -> bool:
    return term.startswith("<[")
