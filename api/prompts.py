"""What a `prompts` argument stands for: a text, token ids, a conversation, or a list of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.runtime.target.prompt_limits import check_room
from specctl.runtime.target.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and the text by which results name it."""

    ids: tuple[int, ...]
    text: str


def encode_prompts(
    target: Target, prompts: Prompt | Sequence[Prompt], chat: bool = False
) -> list[EncodedPrompt]:
    """Every prompt, encoded; one that cannot fit the target's context is refused unread. `chat`
    wraps texts in the target's chat template, as conversations always are."""
    several: Any = prompts
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        several = [prompts]
    return [_encoded(target, prompt, chat) for prompt in several]


def _encoded(target: Target, prompt: Any, chat: bool) -> EncodedPrompt:
    if isinstance(prompt, str):
        if not chat:
            check_room(target, prompt.strip())
            return EncodedPrompt(tuple(target.encode(prompt)), prompt)
        prompt = [{"role": "user", "content": prompt}]
    if prompt and all(isinstance(one, Mapping) for one in prompt):
        text = str(prompt[-1].get("content", ""))
        check_room(target, text.strip())  # templates may leave out blanks at either end
        return EncodedPrompt(tuple(target.encode_chat([dict(one) for one in prompt])), text)
    if any(not isinstance(one, int) for one in prompt):
        raise SpecctlError(
            "a prompt is no text",
            where="prompts",
            found=repr(prompt)[:80],
            expected='a string, token ids, or messages such as {"role": "user", "content": "..."}',
            do='specctl.generate(target, "import os")',
        )
    ids = tuple(prompt)
    return EncodedPrompt(ids, "" if target.tokenizer is None else target.decode(ids))
