"""Messages -> tokens, through the target's own template, so that no message can pose as another.

A special token (`<|assistant|>` and the like) that is spelled out in a message is read as the
characters it consists of: the template alone decides where a turn begins. Such a spelling is broken
by a mark before the template is applied; the text is cut at the marks and read piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from specctl.core.errors import SpecctlError
from specctl.runtime.server.protocol import Message
from specctl.runtime.target.target import Target

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters, by definition of Unicode
ROLES = {"developer": "system"}  # what OpenAI calls a system message of late


def chat_tokens(target: Target, messages: Sequence[Message]) -> list[int]:
    """Token ids up to where the assistant speaks next. SpecctlError where the template refuses."""
    return encoded(target, chat_pieces(target, messages))


def encoded(target: Target, pieces: Sequence[str]) -> list[int]:
    """Token ids of pieces that are read one by one."""
    encode = target.tokenizer.encode
    return [token for piece in pieces for token in encode(piece, add_special_tokens=False)]


def chat_pieces(target: Target, messages: Sequence[Message]) -> list[str]:
    """The conversation as the template writes it, cut wherever a marker was spelled out."""
    texts = [message.text for message in messages]
    markers = _special_tokens(target)
    if not any(marker in text for text in texts for marker in markers):
        return [_written(target, [_turn(m, text) for m, text in zip(messages, texts, strict=True)])]
    mark = next((c for c in MARKS if not any(c in text for text in texts)), None)
    if mark is None:
        raise SpecctlError("a message holds every code point that is no character", do="leave one")
    for marker in markers:
        texts = [text.replace(marker, marker[0] + mark + marker[1:]) for text in texts]
    turns = [_turn(m, text) for m, text in zip(messages, texts, strict=True)]
    return _written(target, turns).split(mark)


def _turn(message: Message, text: str) -> dict[str, str]:
    turn = {"role": ROLES.get(message.role, message.role), "content": text}
    return turn if message.name is None else {**turn, "name": message.name}


def _written(target: Target, turns: list[dict[str, str]]) -> str:
    try:
        return target.chat_text(turns)
    except TemplateError as error:
        raise SpecctlError(
            "the chat template of the target does not take these messages",
            where="messages",
            found=str(error)[:200],
            do="change the order of the roles, or use /v1/completions with a prompt of your own",
        ) from error


def _special_tokens(target: Target) -> list[str]:
    """The texts of special tokens that can be spelled, the longest first."""
    added = getattr(target.tokenizer, "added_tokens_decoder", {}).values()
    found = {str(token) for token in added if token.special and len(str(token)) > 1}
    return sorted(found, key=len, reverse=True)
