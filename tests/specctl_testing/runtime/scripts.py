"""Reads JavaScript as far as brackets, strings, templates, comments and regular expressions go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

CLOSING = {")": "(", "]": "[", "}": "{"}
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*[\s\S]*?\*/)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[A-Za-z_$][\w$]*)
      | (?P<number>\d[\w.]*)
      | (?P<space>\s+)
      | (?P<sign>=>|[-+*%&|^!<>=?~.,:;@#]|\.\.\.)
      | (?P<bracket>[()\[\]{}])""",
    re.VERBOSE,
)
REGEX = re.compile(r"/(?![*/])(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
OPERATORS = ("return", "typeof", "case", "of", "in", "await", "yield")


class Broken(ValueError):
    """The text is no script; says what is wrong in which line."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


def tokens(source: str) -> Iterator[Token]:
    """Every token but comments and blanks. Brackets pair off, texts end: otherwise Broken."""
    open_brackets: list[Token] = []
    templates: list[int] = []  # depth of brackets at which each template goes on
    before, at = Token("sign", ";", 1), 0
    while at < len(source):
        token = _next(source, at, before)
        at += len(token.text)
        if token.kind in ("comment", "space"):
            continue
        before = token
        yield token
        if token.text in CLOSING.values():
            open_brackets.append(token)
        elif token.text in CLOSING:
            if not open_brackets or open_brackets.pop().text != CLOSING[token.text]:
                raise Broken(f"line {token.line}: {token.text} closes nothing")
        elif token.kind == "template" and token.text.endswith("${"):
            open_brackets.append(Token("bracket", "{", token.line))
            templates.append(len(open_brackets))
        if templates and token.text == "}" and len(open_brackets) < templates[-1]:
            rest = _template(source, at, token.line)
            at += len(rest.text)
            before = rest
            yield rest
            if rest.text.endswith("${"):
                open_brackets.append(Token("bracket", "{", rest.line))
            else:
                templates.pop()
    if open_brackets:
        raise Broken(f"line {open_brackets[-1].line}: {open_brackets[-1].text} is never closed")


def _next(source: str, at: int, before: Token) -> Token:
    line = source.count("\n", 0, at) + 1
    if source[at] == "`":
        opened = _template(source, at + 1, line)
        return Token("template", "`" + opened.text, line)
    if source[at] == "/" and source[at : at + 2] not in ("//", "/*"):
        is_value = before.kind in ("string", "number", "template") or before.text in (")", "]", "}")
        if is_value or (before.kind == "word" and before.text not in OPERATORS):
            return Token("sign", "/", line)
        found = REGEX.match(source, at)
        if found is None:
            raise Broken(f"line {line}: a regular expression has no end")
        return Token("regex", found[0], line)
    found = TOKEN.match(source, at)
    if found is None:
        raise Broken(f"line {line}: {source[at : at + 20]!r} is nothing")
    return Token(str(found.lastgroup), found[0], line)


def _template(source: str, at: int, line: int) -> Token:
    """The rest of a template: to its end, or to where an expression begins."""
    found = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)").match(source, at)
    if found is None:
        raise Broken(f"line {line}: a template has no end")
    return Token("template", found[0], line)
