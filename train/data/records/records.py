"""One record of training data: a text or a conversation, whatever way its source writes it down
(`layouts.py` has the table of them)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specctl.core.errors import RecipeError
from specctl.train.data.records.layouts import (
    CALLERS,
    CONTENT_KEYS,
    IMAGES,
    KEPT_KEYS,
    LAYOUTS,
    NO_CHOICES,
    ROLE_KEYS,
    SOUNDS,
    SYSTEMS,
    THOUGHT_KEYS,
    FieldChoices,
    FieldReader,
    RecordContent,
    learns,
    listed,
    role_of,
)
from specctl.train.data.records.record_images import (
    MessageParts,
    given_images,
    image_part,
    joined_parts,
    part_source,
    placed_images,
    text_part,
    texts_of,
    without_parts,
)

DEEPEST = 64  # lists and objects within each other in a message or a tool
SECOND_SYSTEM = "system prompt beside the conversation's own"
IGNORED = -100  # the label of a token that is not learned, in rows made for transformers

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WrittenBy:
    """Who wrote the answer in a record of token ids: the target's name, the fingerprint of its
    weights, the digest of its chat template, and what was said to that of thinking."""

    target: str
    fingerprint: str
    template: str | None = None
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: `text`, or `messages` (role and content) with the tools they may call; and
    where it has been tokenized, the very ids, which of them are to be predicted, the fingerprint of
    the tokenizer ("": unknown), and who wrote them, where that is known. `given`: assistant turns
    that are read and neither learned nor written anew; `unanswered`: places where the target is to
    answer, and nobody has; `images`: paths or data URIs of the images that parts {"type": "image"}
    of the messages stand for, in order; `image_digests`: sha256 of each, once they were read;
    `left_out`: what is neither text nor an image, by kind."""

    where: str
    domain: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    tokenizer: str = ""
    written_by: WrittenBy | None = None
    given: tuple[int, ...] = ()
    unanswered: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    image_digests: tuple[str, ...] = ()

    def digest(self) -> bytes:
        """sha256 of what the sample says; its place does not count, so data may be moved."""
        if self.ids:
            by = [] if self.written_by is None else [asdict(self.written_by)]
            body = json.dumps([self.ids, self.mask, self.messages, self.tools, self.text, *by])
            return hashlib.sha256(b"ids:" + body.encode()).digest()
        if not self.messages:
            return hashlib.sha256(b"text:" + self.text.encode()).digest()
        marks: list[Any] = [self.given, self.unanswered] if self.given or self.unanswered else []
        marks += [self.image_digests] if self.images else []
        body = json.dumps([self.messages, self.tools, *marks], sort_keys=True)
        return hashlib.sha256(b"chat:" + body.encode()).digest()


def parse_line(line: str | bytes) -> Any:
    """The JSON value of a line; ValueError says why there is none."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("line is nested too deep") from None


def without_nulls(value: Any) -> Any:
    """The same without the keys that say nothing: a table has every key of any of its rows in every
    object."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value


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


def sample_of(
    record: Any, where: str, domain: str = "", choices: FieldChoices = NO_CHOICES
) -> Sample:
    """The sample of a JSON or table record, the first where it holds several answers; ValueError
    says what the record lacks, RecipeError names a field that is not understood."""
    return samples_of(record, where, domain, choices)[0]


def samples_of(
    record: Any, where: str, domain: str = "", choices: FieldChoices = NO_CHOICES
) -> list[Sample]:
    """The samples of a record, one for each of its answers."""
    if not isinstance(record, Mapping):
        raise ValueError("record is not an object")
    try:
        return _samples(record, where, domain, choices)
    except RecipeError as error:  # a field that is not understood
        error.where = where
        error.args = (error.text(),)
        raise


def _samples(
    record: Mapping[str, Any], where: str, domain: str, choices: FieldChoices
) -> list[Sample]:
    reader = FieldReader(record, choices)
    named = next((reader.values[n] for n in ("domain", "category") if reader.values.get(n)), None)
    domain = named if isinstance(named, str) else domain
    encoded = _encoded(reader)
    if learns(reader) is False:
        raise ValueError("record is marked as not to be learned")
    content = _content(reader, is_needed=not encoded)
    left_out = tuple(name for name in SOUNDS if reader.has(name))
    images = _listed_images(reader)
    reader.skip(*IMAGES, *SOUNDS)
    if images and encoded:
        raise ValueError("record has token ids and images: ids say nothing of what these show")
    if not content.turns and not any(content.answers):
        if images:
            raise ValueError("record has images and a text; they stand in conversations")
        _check_unicode(content.text)
        reader.check([content.text])
        return [Sample(where, domain, text=content.text, left_out=left_out, **encoded)]
    tools = _tools(reader)
    bare = _bare(reader, content, where, domain, tools, images)
    found = [replace(one, left_out=(*left_out, *one.left_out), **encoded) for one in bare]
    reader.check([text for one in found for text in _words_of(one)])
    return found


def _listed_images(reader: FieldReader) -> tuple[str, ...]:
    """The images that a record lists. ValueError where two fields list others: nothing says in
    which order they stand."""
    images, *others = [given_images(reader.get(name)) for name in IMAGES]
    for other in others:
        if images and not {*other} <= {*images}:
            raise ValueError("record has images in 'images' and others in 'image'")
        images = images or other
    return images


def _content(reader: FieldReader, is_needed: bool) -> RecordContent:
    for layout in LAYOUTS:
        content = layout.read(reader)
        if content is not None:
            return content
    if is_needed:
        raise ValueError("record has no messages, prompt and response, or text")
    return RecordContent()


def _bare(
    reader: FieldReader,
    content: RecordContent,
    where: str,
    domain: str,
    tools: tuple[Any, ...],
    images: tuple[str, ...],
) -> list[Sample]:
    """The conversations of a record, without ids."""
    system = reader.get(*SYSTEMS)
    if isinstance(system, Mapping):
        system = _message({"role": "system", **system}, reader.choices).message.get("content")
    if system is not None and not isinstance(system, str):
        raise ValueError("the system prompt of a record is not text")
    masked = reader.get("mask")
    given_before_last = reader.get("mask_history") is True
    found = []
    for answer in content.answers:
        read = [_message(turn, reader.choices) for turn in (*content.turns, *answer)]
        own = [one.message.get("content") for one in read if one.role == "system"]
        if system is not None and not own:
            read = [_Turn("system", {"role": "system", "content": system}), *read]
        if content.is_unanswered:  # behind every question stands the place of its answer
            read = [each for one in read for each in _with_answer(one)]
        if not read:
            raise ValueError("messages is empty")
        own_images = [source for one in read for source in one.images]
        messages, shown = placed_images([one.message for one in read], own_images, images)
        spoken = [i for i, one in enumerate(read) if one.role == "assistant"]
        given = {i for i in spoken if read[i].is_learned is False}
        given |= set(spoken[:-1]) if given_before_last else set()
        if isinstance(masked, str) and role_of(masked) == "assistant":
            given = set(spoken)
        if spoken and given == set(spoken):
            raise ValueError("every answer of the record is marked as not to be learned")
        found.append(
            Sample(
                where,
                domain,
                messages=messages,
                tools=tools,
                given=tuple(sorted(given)),
                unanswered=tuple(i for i in spoken if read[i].is_open),
                left_out=(
                    *(kind for one in read for kind in one.left_out),
                    *([SECOND_SYSTEM] if own and system not in (None, *own) else []),
                ),
                images=shown,
            )
        )
    return found


def _words_of(sample: Sample) -> list[str]:
    """What a sample says, text by text."""
    said = [text for m in sample.messages for text in texts_of(m.get("content"))]
    return [text for text in said if text.strip()]


def _tools(reader: FieldReader) -> tuple[Any, ...]:
    """Functions that the assistant may call; also as JSON text, and by the name that they had
    before tools (`functions`)."""
    found = reader.find(("tools", "functions"))
    if found is None:
        return ()
    name, given = found
    tools = listed(given, "tools")
    if name == "functions":
        tools = [{"type": "function", "function": one} for one in tools]
    check_values(tools, "a tool")
    return tuple(tools)


def _encoded(reader: FieldReader) -> dict[str, Any]:
    """Ids and mask of a record that has been tokenized; nothing of another. Labels of -100 are
    those that are not learned."""
    ids, mask, labels = (reader.values.get(key) for key in ("input_ids", "loss_mask", "labels"))
    if ids is None:
        return {}
    if mask is None and isinstance(labels, list | tuple):
        mask = [label != IGNORED for label in labels]
    if mask is None:
        raise ValueError("input_ids without loss_mask or labels do not say what is learned")
    is_ids = isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)
    if not is_ids or not isinstance(mask, list | tuple) or len(mask) != len(ids) or not ids:
        raise ValueError("input_ids and loss_mask are not token ids and as many marks")
    tokenizer = reader.values.get("tokenizer")
    return {
        "ids": tuple(ids),
        "mask": tuple(bool(mark) for mark in mask),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else "",
        "written_by": _written_by(reader),
    }


def _written_by(reader: FieldReader) -> WrittenBy | None:
    """Who wrote the answers of a record, as `specctl regenerate` notes it."""
    given = reader.values.get("written_by")
    if not isinstance(given, Mapping) or "fingerprint" not in given:
        return None
    reader.skip("written_by")
    template, thinking = given.get("template"), given.get("thinking")
    return WrittenBy(
        str(given.get("target", "")),
        str(given["fingerprint"]),
        template if isinstance(template, str) else None,
        thinking if isinstance(thinking, bool) else None,
    )


def _check_unicode(text: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text holds half of a surrogate pair") from None


def without(sample: Sample, drop: Sequence[str]) -> Sample:
    """The sample with those strings left out of what is said, and the blanks after them."""
    if not drop:
        return sample

    def cut(text: str) -> str:
        return re.sub("(?:" + "|".join(map(re.escape, drop)) + r")[^\S\n]*\n?", "", text)

    def cut_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(cut(part["text"])) if part["type"] == "text" else part

    def cut_message(message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": cut(content)}
        return {**message, "content": [*map(cut_part, content)]} if content else message

    messages = tuple(map(cut_message, sample.messages))
    return replace(sample, text=cut(sample.text), messages=messages)


def without_images(sample: Sample) -> Sample:
    """The sample as text alone, its images counted among what is left out."""
    if not sample.images:
        return sample
    messages = tuple(without_parts(message) for message in sample.messages)
    left_out = (*sample.left_out, *["image"] * len(sample.images))
    return replace(sample, messages=messages, images=(), image_digests=(), left_out=left_out)


# -- messages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message as chat templates take it, and what stood beside it."""

    role: str
    message: Message
    is_learned: bool | None = None
    is_open: bool = False
    left_out: tuple[str, ...] = ()
    images: tuple[str | None, ...] = ()  # of its parts; None: the next that the record lists


def _with_answer(turn: _Turn) -> list[_Turn]:
    """A question, and the place of the answer that nobody has written yet."""
    place = _Turn("assistant", {"role": "assistant", "content": ""}, is_open=True)
    return [turn, place] if turn.role == "user" else [turn]


def _message(turn: Any, choices: FieldChoices) -> _Turn:
    """A turn of any layout as a message; keys that say nothing (null) are dropped."""
    if not isinstance(turn, Mapping):
        raise ValueError("a message is not an object")
    check_values(turn)
    reader = FieldReader(turn, choices.of_messages(), "messages.")
    word = reader.get(*ROLE_KEYS)
    role = role_of(word)
    parts = _parts(_content_of(reader))
    content, thoughts, left_out = parts.content, parts.thoughts, parts.left_out
    is_learned = learns(reader)
    if reader.values.get("mask") is not None:
        raise ValueError("a message has a mask, which some tools learn and others leave out")
    message: Message = {"role": role}
    if content is not None:
        message["content"] = content
    thoughts = thoughts or reader.get(*THOUGHT_KEYS)
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    message |= {key: reader.get(key) for key in KEPT_KEYS if reader.has(key)}
    _add_calls(message, reader, str(word).strip().lower())
    if "content" not in message and "tool_calls" not in message:
        raise ValueError("a message has no content")
    if not isinstance(message.get("content", ""), str) and not parts.images:
        raise ValueError("the content of a message is neither text nor parts")
    said = [*texts_of(message.get("content")), *([thoughts] if isinstance(thoughts, str) else [])]
    _keep_or_refuse(message, reader, said)
    return _Turn(role, message, is_learned, left_out=left_out, images=parts.images)


def _content_of(reader: FieldReader) -> Any:
    """What a message says; an empty text counts."""
    found = reader.find(CONTENT_KEYS)
    if found is not None:
        return found[1]
    empty = next((key for key in CONTENT_KEYS if reader.values.get(key) is not None), None)
    reader.seen |= {empty} if empty is not None else set()
    return None if empty is None else reader.values[empty]


def _keep_or_refuse(message: Message, reader: FieldReader, said: Sequence[str]) -> None:
    """Other keys of a message stay for a template that reads them; one that carries content and is
    read by nobody is refused."""
    others = {key: v for key, v in reader.values.items() if key not in reader.seen}
    for key, value in others.items():
        is_read = re.search(rf"\b{re.escape(str(key))}\b", reader.choices.template) is not None
        if is_read and value is not None and key not in reader.choices.ignore:
            reader.seen.add(key)
            message[key] = value
    reader.check(said)


def _parts(content: Any) -> MessageParts:
    """What a message in parts says: its text, or parts of text and images; the thoughts among
    them, and the kinds of those that are neither (sounds)."""
    if not isinstance(content, list | tuple):
        return MessageParts(content)
    said, thoughts, left_out = list[Any](), list[str](), list[str]()
    images = list[str | None]()
    for part in content:
        is_object = isinstance(part, Mapping)
        kind = (part.get("type") or next(iter(part), "none")) if is_object else "text"
        text = part.get("text") if is_object else part
        if is_object and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        elif isinstance(text, str):
            said += [text_part(text)] if text else []
        elif str(kind).startswith(("image", "input_image")):
            images.append(part_source(part))
            said.append(image_part())
        elif str(kind).startswith(("audio", "video", "input_audio")):
            left_out.append(str(kind))
        else:
            raise ValueError(f"a message has a part of an unknown kind: {str(kind)[:40]!r}")
    found = joined_parts(said)
    return MessageParts(found, "\n".join(thoughts) or None, tuple(left_out), tuple(images))


def _add_calls(message: Message, reader: FieldReader, word: str) -> None:
    """Calls of tools in the form of OpenAI, from the older forms of a message."""
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = listed(message["tool_calls"], "tool_calls")
    call = reader.get("function_call")
    if isinstance(call, Mapping):
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if word in CALLERS and "tool_calls" not in message:
        calls = _called(message.get("content"))
        if calls:
            message["tool_calls"] = calls
            message.pop("content")


def _called(text: Any) -> list[Any]:
    """The calls that a ShareGPT turn of a caller holds as JSON; none where it is another text."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return []
    calls = found if isinstance(found, list) else [found]
    known = [c for c in calls if isinstance(c, Mapping) and {"name", "arguments"} <= set(c)]
    is_call = len(known) == len(calls)
    return [{"type": "function", "function": dict(call)} for call in known] if is_call else []
