"""Images in records of training data: where people write them, and where they stand in messages.

A record lists them (`images`, `image`), or parts of its messages hold them. They stand where a part
or the mark `<image>` says so, in order; without either, in front of the user's first words.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "<image>"
BLANKS = re.compile(r"[^\S\n]*\n?")  # behind a mark that is left out
FILE = "file://"
NOWHERE = ""  # the source of an image that a record only speaks of

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MessageParts:
    """What a message in parts says: `content` as a text, or as a list of parts where it holds
    images; for each of these its source, None for the next that the record lists."""

    content: Any
    thoughts: str | None = None
    left_out: tuple[str, ...] = ()
    images: tuple[str | None, ...] = ()


def image_part() -> dict[str, Any]:
    """A part that stands for an image, as chat templates know it."""
    return {"type": "image"}


def text_part(text: str) -> dict[str, Any]:
    """A part of text."""
    return {"type": "text", "text": text}


def given_images(value: Any) -> tuple[str, ...]:
    """The images that a record lists: one or several; ValueError for what is none."""
    if value is None:
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple(_source(one) for one in listed)


def _source(value: Any) -> str:
    """A path or a data URI, of a text, or as `datasets` keeps an image (bytes, path)."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        if isinstance(data, bytes):
            return _uri("image/png", base64.b64encode(data).decode())  # its bytes say what it is
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return _uri("image/png", base64.b64encode(value).decode())
    if not isinstance(value, str) or not value.strip():
        raise ValueError("an image of the record is neither a path nor a data URI")
    return value


def part_source(part: Mapping[str, Any]) -> str | None:
    """Where the image of a part is: image_url of OpenAI, `image` of Qwen, base64 blocks of
    Anthropic; None for a part that only says where the next listed image stands."""
    found = next((part[n] for n in ("image_url", "image", "path", "url") if part.get(n)), None)
    source = part.get("source")
    if found is None and isinstance(source, Mapping):
        found = source.get("url")
        if source.get("data") is not None:
            found = _uri(str(source.get("media_type", "image/png")), str(source["data"]))
    return None if found is None else _source(found)


def _uri(kind: str, data: str) -> str:
    return f"data:{kind};base64,{data}"


def joined_parts(said: Sequence[Mapping[str, Any]]) -> Any:
    """The text of parts, or where there are images among them, parts in which texts beside each
    other are one."""
    if all(part["type"] == "text" for part in said):
        return "\n".join(part["text"] for part in said)
    joined = list[dict[str, Any]]()
    for part in said:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = text_part(joined[-1]["text"] + "\n" + part["text"])
        else:
            joined.append(dict(part))
    return joined


def texts_of(content: Any) -> Iterator[str]:
    """The texts of a message."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if part["type"] == "text")


def count_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many images stand in messages."""
    contents = [message.get("content") for message in messages]
    listed = [content for content in contents if isinstance(content, list)]
    return sum(part["type"] == "image" for content in listed for part in content)


def placed_images(
    messages: Sequence[Message], own: Sequence[str | None], listed: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages with a part for each image, and the images in that order. `own`: of their parts;
    `listed`: of the record. A part whose image is nowhere has NOWHERE for it, which is refused when
    images are read. ValueError where images and places differ in number."""
    if not own and not listed:
        return tuple(messages), ()
    placed = [*messages]
    if not own:
        placed = [_marked(message) for message in messages]
        if not count_parts(placed):
            placed = _in_front(placed, len(listed))
        own = [None] * count_parts(placed)
    if any(m["role"] == "assistant" and count_parts([m]) for m in placed):
        raise ValueError("an answer holds an image: targets write text alone")
    if not listed:
        return tuple(placed), tuple(source if source is not None else NOWHERE for source in own)
    rest = iter(listed)
    found = [source if source is not None else next(rest, None) for source in own]
    left = len([*rest])
    if left or None in found:
        places = len(own)
        given = len([source for source in found if source is not None]) + left
        raise ValueError(f"record has {given} images and {places} places for them")
    return tuple(placed), tuple(source for source in found if source is not None)


def _marked(message: Message) -> Message:
    """A message with parts in the place of its marks."""
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content or message["role"] == "assistant":
        return message
    parts = list[dict[str, Any]]()
    for at, piece in enumerate(content.split(MARK)):
        parts += [image_part()] if at else []
        parts += [text_part(piece)] if piece else []
    return {**message, "content": parts}


def _in_front(messages: Sequence[Message], count: int) -> list[Message]:
    """The messages with so many images in front of the user's first."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("record has images, and no turn of a user")
    parts = [image_part() for _ in range(count)]
    text = messages[first].get("content")
    changed = {**messages[first], "content": [*parts, *([text_part(text)] if text else [])]}
    return [*messages[:first], changed, *messages[first + 1 :]]


def without_parts(message: Message) -> Message:
    """A message as text alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    text, is_behind = "", False
    for part in content:
        if part["type"] == "image":
            is_behind = True
            continue
        piece = BLANKS.sub("", part["text"], count=1) if is_behind else part["text"]
        is_open = bool(text) and not text[-1].isspace() and not part["text"][:1].isspace()
        text += ("\n" if is_open else "") + piece
        is_behind = False
    return {**message, "content": text}


def spelled_out(message: Message, spelled: str) -> Message:
    """A message as one text, with what a target writes for an image in its place."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = (spelled if part["type"] == "image" else part["text"] for part in content)
    return {**message, "content": "".join(texts)}


def resolved(sources: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The same with paths beside the data file made absolute; data URIs and addresses stay."""
    found = list[str]()
    for source in sources:
        is_address = re.match(r"(data:|[a-z]+://)", source) and not source.startswith(FILE)
        if source == NOWHERE or is_address:
            found.append(source)
        else:
            path = os.path.expanduser(source.removeprefix(FILE))  # "~1.png" is a name as well
            found.append(str((folder / path).absolute()))
    return tuple(found)
