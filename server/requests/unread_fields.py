"""Fields of a request that nothing here reads: taken out of it, and named to the client.

Clients send back what other servers, caches and their own storage put into a conversation
(`cache_control`, `id`, `timestamp`, `reasoning_details`), and the sampling fields of other engines.
They change nothing, so the request is served, and the answer names them in a header; a strict
server refuses them. Refused in any case is a misspelt field of the request, and what asks for
another answer than the one that would be given: a few fields of other servers, and pictures and
sounds in a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from specctl.server.errors import UNSUPPORTED, ApiError, Path, unknown_field, written_path

IGNORED = "X-Specctl-Ignored"  # names the fields of a request that change nothing
MAX_NAMED, MAX_CHARS = 64, 1000  # of that header
REFUSED = frozenset({
    "add_generation_prompt", "allowed_token_ids", "audio", "bad_words", "best_of", "chat_template",
    "continue_final_message", "documents", "echo", "functions", "logits_processors", "outline",
    "prompt_embeds", "prompt_logprobs", "suffix", "truncate_prompt_tokens", "use_beam_search",
})  # fmt: skip
NEUTRAL = {"add_generation_prompt": True, "best_of": 1}
MEDIA = ("images", "image", "audio", "audios", "video", "videos", "input_audio")
_UNSAFE = re.compile(r"[^!-+\--~]")  # all but printable ASCII without blanks and commas


@dataclass(frozen=True, slots=True)
class UnreadField:
    """Where it was, what it held, and what the object may have instead; `is_known`: the protocol
    has it, with no effect."""

    path: Path
    value: Any
    known: tuple[str, ...] = ()
    is_known: bool = False


def take_unread(body: BaseModel, is_strict: bool = False) -> list[str]:
    """The names of the fields of a request that change nothing; unknown ones are taken out of it.
    ApiError for one that cannot be left unread; `is_strict`: for any that is unknown."""
    found: list[str] = []
    for one in _unread(body, ()):
        is_off = not one.is_known and _is_off(one)
        is_wrong = is_strict or _is_misspelt(one)
        if not one.is_known and not is_off and is_wrong:
            raise unknown_field(one.path, one.known)
        if one.value is not None and not is_off:  # null is the same as leaving a field out
            found.append(_named(one.path) if len(found) < MAX_NAMED else "")
    return found


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names them, cut where a client sends endless ones; none for no names."""
    shown, length = list[str](), 0
    for name in names[:MAX_NAMED]:
        length += len(name) + 2
        if length > MAX_CHARS:
            break
        shown.append(name)
    rest = [f"and {len(names) - len(shown)} more"] if len(shown) < len(names) else []
    return {IGNORED: ", ".join([*shown, *rest])} if names else {}


def _unread(value: Any, path: Path) -> Iterator[UnreadField]:
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for at, each in enumerate(value):
            yield from _unread(each, (*path, at))
    if not isinstance(value, BaseModel):
        return
    about, extra = type(value).model_fields, value.__pydantic_extra__ or {}
    known = tuple(field.alias or name for name, field in about.items())
    for name in sorted(value.model_fields_set):
        if name in extra:
            yield UnreadField((*path, name), extra[name], known)
            continue
        inner, place = getattr(value, name), (*path, about[name].alias or name)
        if IGNORED in (about[name].description or ""):
            yield UnreadField(place, inner, is_known=True)
        else:
            yield from _unread(inner, place)
    extra.clear()


def _is_misspelt(one: UnreadField) -> bool:
    """Whether it is a field of the request but for an underscore, a plural or capitals: an answer
    without the limit of `max_token` would not be the one that was meant."""
    name = _spelling(str(one.path[-1]))
    return len(one.path) == 1 and one.value is not None and name in map(_spelling, one.known)


def _spelling(name: str) -> str:
    return re.sub(r"[_-]", "", name.lower()).removesuffix("s")


def _is_off(one: UnreadField) -> bool:
    """Whether it asks for something that is not served, and that it be left out; ApiError where it
    asks for it."""
    name, value = str(one.path[-1]), one.value
    is_media = one.path[0] == "messages" and name in MEDIA
    if not is_media and not (len(one.path) == 1 and name in REFUSED):
        return False
    if name in NEUTRAL and value == NEUTRAL[name]:
        return True
    if value is None or value in ("", [], {}) or (value is False and name not in NEUTRAL):
        return not is_media
    message = UNSUPPORTED["audio" if is_media else name]
    raise ApiError(400, message, param=written_path(one.path), code="unsupported_parameter")


def _named(path: Path) -> str:
    """`messages[0].content[0].cache_control`, in characters that a header may have."""
    return _UNSAFE.sub("?", written_path(path))
