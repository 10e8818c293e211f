"""One record of training data: a text or a conversation, whatever way its source writes it down."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
DEEPEST = 64  # lists and objects within each other in a message or a tool
SYSTEM = ("system", "system_prompt")  # what a record may say before its first turn
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: `text`, or `messages` (role and content) with the tools they may call; and
    where it has been tokenized, the very ids, which of them are to be predicted, and the
    fingerprint of the tokenizer ("": unknown)."""

    where: str
    domain: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    tokenizer: str = ""

    def digest(self) -> bytes:
        """sha256 of what the sample says; its place does not count, so data may be moved."""
        if self.ids:
            body = json.dumps([self.ids, self.mask, self.messages, self.tools, self.text])
            return hashlib.sha256(b"ids:" + body.encode()).digest()
        if not self.messages:
            return hashlib.sha256(b"text:" + self.text.encode()).digest()
        body = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(b"chat:" + body.encode()).digest()


def parse_line(line: str | bytes) -> Any:
    """The JSON value of a line; ValueError says why there is none."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("line is nested too deep") from None


def check_values(value: Any, owner: str = "a message", depth: int = 0) -> None:
    """ValueError for what no template can write and no JSON can hold: values of other kinds (of
    tables), lists and objects without end, halves of characters."""
    if isinstance(value, str):
        _check_unicode(value)
    elif isinstance(value, Mapping | list | tuple):
        if depth == DEEPEST:
            raise ValueError(f"{owner} is nested too deep")
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
            raise ValueError(f"{owner} has a key that is no string")
        for part in parts:
            check_values(part, owner, depth + 1)
    elif not (value is None or isinstance(value, int | float)):
        raise ValueError(f"{owner} holds a value that JSON has not: {type(value).__name__}")


def sample_of(record: Any, where: str, domain: str = "") -> Sample:
    """The sample of a JSON or table record; ValueError says what the record lacks."""
    if not isinstance(record, Mapping):
        raise ValueError("record is not an object")
    named = record.get("domain") or record.get("category")
    domain = named if isinstance(named, str) else domain
    tools = record.get("tools") or ()
    if isinstance(tools, str) or not isinstance(tools, list | tuple):
        raise ValueError("tools is not a list")
    text = record.get("text")
    text = text if isinstance(text, str) and text.strip() else ""
    encoded = _encoded(record)
    turns = _conversation(record) or ([] if text else _prompt_alone(record))
    if turns:
        messages = _messages(_with_system(record, turns))
        check_values(messages)
        check_values(tools, "a tool")
        return Sample(where, domain, messages=messages, tools=tuple(tools), **encoded)
    if text:
        _check_unicode(text)
        return Sample(where, domain, text=text, **encoded)
    if encoded:
        return Sample(where, domain, **encoded)
    raise ValueError("record has no messages, prompt and response, or text")


def _encoded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Ids and mask of a record that has been tokenized; nothing of another."""
    ids, mask = record.get("input_ids"), record.get("loss_mask")
    if ids is None or mask is None:
        return {}
    is_ids = isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)
    if not is_ids or not isinstance(mask, list | tuple) or len(mask) != len(ids) or not ids:
        raise ValueError("input_ids and loss_mask are not token ids and as many marks")
    tokenizer = record.get("tokenizer")
    return {
        "ids": tuple(ids),
        "mask": tuple(bool(mark) for mark in mask),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else "",
    }


def _check_unicode(text: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text holds half of a surrogate pair") from None


def _conversation(record: Mapping[str, Any]) -> list[Any]:
    """The turns of a record in which somebody answers; none where it holds something else."""
    if record.get("messages"):
        return _turns(record["messages"])
    if record.get("conversations"):
        return [_from_sharegpt(turn) for turn in _turns(record["conversations"])]
    for ask, answer in PAIRS:
        if ask in record and answer in record:
            return [*_asked(record, ask), *_spoken(record[answer], "assistant")]
    return []


def _prompt_alone(record: Mapping[str, Any]) -> list[Any]:
    """A conversation that waits for its answer."""
    asked = next((ask for ask, _ in PAIRS if record.get(ask)), None)
    return [] if asked is None else _asked(record, asked)


def _with_system(record: Mapping[str, Any], turns: list[Any]) -> list[Any]:
    """The turns behind the record's own system prompt, where they bring none."""
    system = next((record[name] for name in SYSTEM if record.get(name)), None)
    if not isinstance(system, str) or any(_role(turn) == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _asked(record: Mapping[str, Any], ask: str) -> list[Any]:
    """What the user says: an instruction goes with the input that it is about (Alpaca)."""
    more = record.get("input") if ask == "instruction" else None
    if isinstance(more, str) and more.strip() and isinstance(record[ask], str):
        return _spoken(f"{record[ask]}\n\n{more}", "user")
    return _spoken(record[ask], "user")


def _spoken(said: Any, role: str) -> list[Any]:
    """One side of a pair as turns: words, or the messages themselves."""
    is_turns = isinstance(said, list) and bool(said) and all(_role(turn) for turn in said)
    return said if is_turns else [{"role": role, "content": said}]


def _turns(turns: Any) -> list[Any]:
    if not isinstance(turns, list | tuple):
        raise ValueError("messages is not a list")
    return list(turns)


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError("a message is not an object")
    if "role" in turn:
        return dict(turn)
    role = str(turn.get("from", ""))
    return {"role": SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}


def without(sample: Sample, drop: Sequence[str]) -> Sample:
    """The sample with those strings left out of what is said, and the blanks after them."""
    if not drop:
        return sample

    def cut(text: str) -> str:
        return re.sub("(?:" + "|".join(map(re.escape, drop)) + r")[^\S\n]*\n?", "", text)

    messages = tuple(
        {**m, "content": cut(m["content"])} if isinstance(m.get("content"), str) else m
        for m in sample.messages
    )
    return replace(sample, text=cut(sample.text), messages=messages)


def _said(content: Any) -> Any:
    """The text of a message given in parts; images, sounds and the like are left out."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _named(role: Any) -> bool:
    return isinstance(role, str) and bool(role)


def _messages(turns: Any) -> tuple[Message, ...]:
    """Messages as the chat template takes them; keys that say nothing (null) are dropped."""
    messages = []
    for turn in _turns(turns):
        if not isinstance(turn, Mapping) or not _named(turn.get("role")):
            raise ValueError("a message has no role")
        message = {key: value for key, value in turn.items() if value is not None}
        if "content" in message:
            message["content"] = _said(message["content"])
        if "content" not in message and "tool_calls" not in message:
            raise ValueError("a message has no content")
        if not isinstance(message.get("content", ""), str):
            raise ValueError("the content of a message is neither text nor parts")
        messages.append(message)
    return tuple(messages)
