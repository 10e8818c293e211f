"""Conversation -> tokens, through the target's own template; no message can pose as another.

The template alone decides where a turn begins: a control token (`<|assistant|>` and the like) that
a message, a name or any other string of a turn spells is read as the characters it consists of,
also where the tokenizer would only make it one (full-width letters that NFKC folds), or where two
strings become one side by side. It is found by what comes out: the template is written once more
with every string between marks, and what is outside of them has the control tokens that the whole
may have. Turns that a template writes in plain words ("### User:") look like any text.
The same holds for tools: names, descriptions and schemas, the arguments of calls, the results.
Keys, ids and types, which templates look up and compare, are refused where they spell such a token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import TemplateError

from specctl.core.errors import SpecctlError

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters, by definition of Unicode
BATCH = 256  # texts read at once
COMPARED = ("role", "type", "id", "tool_call_id")  # words that templates look at
Turns = Sequence[Mapping[str, Any]]


class ChatTarget(Protocol):
    """What is needed of the target whose conversations are read."""

    @property
    def tokenizer(self) -> Any: ...
    def chat_text(
        self, messages: Turns, tools: Turns = (), variables: Mapping[str, Any] | None = None
    ) -> str: ...
    def encode(self, text: str) -> list[int]: ...


def chat_tokens(
    target: ChatTarget,
    turns: Turns,
    text: str | None = None,
    tools: Turns = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids up to where the assistant speaks next. `text`: the turns as the template writes
    them, where that is known; `tools` and `variables` as of `Target.chat_text`. Raises
    TemplateError where the template refuses."""

    def write(change: Callable[[str], str]) -> str:
        return target.chat_text(_mapped(turns, change), _mapped(tools, change), variables)

    text = write(str) if text is None else text
    reader = ControlTokens(target)
    _check_words(reader, turns, tools, variables or {})
    [tokens] = reader.read([text])
    begin, end, cut = _unused_marks(text)
    pieces = _marked_pieces(write, begin, end)
    own = None
    if pieces is not None:
        own = reader.controls([piece for piece, is_said in pieces if not is_said])
        if reader.among(tokens) == own:
            return tokens
    spoiled = write(lambda said: cut.join(reader.spoiled(said)))
    tokens = _joined(reader.read(spoiled.split(cut)))
    if pieces is None or reader.among(tokens) == own:
        return tokens
    parts = [reader.spoiled(piece) if is_said else [piece] for piece, is_said in pieces]
    return _joined(reader.read(_joined(parts)))


def spelled_controls(target: ChatTarget, tokens: Sequence[int]) -> list[int]:
    """The control tokens of a raw prompt, but for those that its tokenizer puts around any text."""
    reader = ControlTokens(target)
    found = Counter(reader.among(tokens)) - Counter(reader.among(target.encode("")))
    return list(found)


class ControlTokens:
    """A target's tokenizer, and which of its tokens are control tokens."""

    def __init__(self, target: ChatTarget) -> None:
        self.tokenizer, self._controls = target.tokenizer, control_ids(target.tokenizer)

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that are read one by one."""
        return [ids for part in _batches(texts) for ids in self._encoded(part)["input_ids"]]

    def among(self, tokens: Sequence[int]) -> list[int]:
        """The control tokens, in order."""
        return [token for token in tokens if token in self._controls]

    def controls(self, texts: Sequence[str]) -> list[int]:
        """The control tokens of texts that are read one by one, in order."""
        different = list(dict.fromkeys(texts))
        found = dict(zip(different, map(self.among, self.read(different)), strict=True))
        return [token for text in texts for token in found[text]]

    def spoiled(self, text: str) -> list[str]:
        """The text in pieces none of which spells a control token. SpecctlError if one character
        stands for such a token."""
        done, pieces = False, [text]
        while not done:
            cuts = [at for part in _batches(pieces) for at in self._cuts(part)]
            done = not any(cuts)
            pieces = _joined(list(map(_split, pieces, cuts)))
        return pieces

    def _cuts(self, texts: Sequence[str]) -> list[list[int]]:
        """Where to cut every text: behind the first character of what is read as a control
        token."""
        encoded, cuts = self._encoded(texts), []
        for row, ids in enumerate(encoded["input_ids"]):
            spans = [
                self._span(encoded, row, at, texts[row])
                for at, token in enumerate(ids)
                if token in self._controls
            ]
            if any(end - start < 2 for start, end in spans):
                raise SpecctlError(
                    "a message holds a control token of the target in one character",
                    where="messages",
                    do="leave that character out",
                )
            cuts.append([start + 1 for start, _ in spans])
        return cuts

    def _span(self, encoded: Any, row: int, at: int, text: str) -> tuple[int, int]:
        """The characters that a token was made of."""
        if self.tokenizer.is_fast:
            start, end = encoded.token_to_chars(row, at)
            return int(start), int(end)
        spelled = str(self.tokenizer.convert_ids_to_tokens(encoded["input_ids"][row][at]))
        start = text.find(spelled)
        return (start, start + len(spelled)) if start >= 0 else (0, len(text))

    def _encoded(self, texts: Sequence[str]) -> Any:
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)


@lru_cache(maxsize=8)
def control_ids(tokenizer: Any) -> frozenset[int]:
    """Added tokens that are special and spelled with more than one character; not the one that
    stands for what the tokenizer does not know."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    unknown = getattr(getattr(backend, "model", None), "unk_token", None)
    return frozenset(
        token_id
        for token_id, token in added.items()
        if token.special and len(str(token)) > 1 and str(token) != unknown
    )


def _marked_pieces(
    write: Callable[[Callable[[str], str]], str], begin: str, end: str
) -> list[tuple[str, bool]] | None:
    """The conversation in pieces: text, and whether it is of a turn's string; None where the
    template takes a string apart."""
    try:
        text = write(lambda said: begin + said + end)
    except TemplateError:
        return None
    parts = re.split(f"([{begin}{end}])", text)
    marks, texts = parts[1::2], parts[::2]
    if marks != [begin, end] * (len(marks) // 2):
        return None
    return [(piece, bool(at % 2)) for at, piece in enumerate(texts) if piece]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every string changed that a template may print; empty ones stay empty."""
    if isinstance(value, str):
        return change(value) if value else value
    if isinstance(value, Mapping):
        return {
            k: v if k in COMPARED and isinstance(v, str) else _mapped(v, change)
            for k, v in value.items()
        }
    if isinstance(value, Sequence):
        return [_mapped(each, change) for each in value]
    return value


def _check_words(
    reader: ControlTokens, turns: Turns, tools: Turns, variables: Mapping[str, Any]
) -> None:
    """Refuse tools, calls and variables whose keys, ids, types or values spell a control token."""
    calls = [turn[key] for turn in turns for key in ("tool_calls", "tool_call_id") if key in turn]
    words = list(_words([*tools, {"id": calls}, {"id": [*variables.values()]}]))
    if words and reader.controls(words):
        raise SpecctlError(
            "a key, an id or a type spells a control token of the target",
            where="tools, tool_calls, chat_template_kwargs",
            do="give it another name",
        )


def _words(value: Any, is_compared: bool = False) -> Iterator[str]:
    """Keys, and the strings that are left as they are."""
    if isinstance(value, str) and is_compared:
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _words(inner, key in COMPARED)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _words(inner, is_compared)


def _unused_marks(text: str) -> list[str]:
    found = [mark for mark in MARKS if mark not in text][:3]
    if len(found) < 3:
        raise SpecctlError(
            "a message holds every code point that is no character", do="leave three of them out"
        )
    return found


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """A tokenizer keeps the interpreter to itself while it hands its results over."""
    return (texts[at : at + BATCH] for at in range(0, len(texts), BATCH))


def _split(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _joined(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for one in lists for each in one]
