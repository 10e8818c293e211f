"""Messages of a request -> the turns that the target's template writes."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from specctl.core.errors import SpecctlError
from specctl.runtime.server.protocol import Message
from specctl.runtime.target.target import Target

ROLES = {"developer": "system"}  # what OpenAI calls a system message of late


def turns_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As templates know them."""
    return [_turn(message) for message in messages]


def written(target: Target, turns: Sequence[dict[str, str]]) -> str:
    """The conversation as the template writes it; SpecctlError where the template refuses."""
    try:
        return target.chat_text(turns)
    except TemplateError as error:
        raise SpecctlError(
            "the chat template of the target does not take these messages",
            where="messages",
            found=str(error)[:200],
            do="change the order of the roles, or use /v1/completions with a prompt of your own",
        ) from error


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": ROLES.get(message.role, message.role), "content": message.text}
    return turn if message.name is None else {**turn, "name": message.name}
