"""What a `prompts` argument stands for: a text, token ids, a conversation, or several of these.

Ids may be a list, a tensor, a NumPy array or what a tokenizer gave back; a conversation is messages
whose content is a text or parts of type text; several may come in any iterable. Anything else is
refused by a SpecctlError that says what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.forward.prompt_images import PromptImages
from specctl.runtime.generate import Output
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.spoken_to import NO_TEMPLATE, OF_PRETRAINING
from specctl.runtime.target.text.prompt_limits import check_room

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Any  # Any: tensors and arrays
GO_ON = "go on with --set sample.ignore_eos=true"
IDS = "input_ids"  # of what a tokenizer gives back


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, the text by which results name it, and whether the target's chat
    template wrote it, then from these `messages` alone (none: with tools, or with images)."""

    ids: tuple[int, ...]
    text: str
    is_chat: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    images: PromptImages | None = None


def encode_prompts(
    target: Target, prompts: Prompt | Iterable[Prompt], chat: bool | None = None
) -> list[EncodedPrompt]:
    """Every prompt, encoded; one that cannot fit the target's context is refused unread. `chat`: a
    text is a user's turn in the target's chat template, as conversations always are, or (False) it
    goes on as it is; None: as the target is spoken to."""
    is_chat = target.is_chat if chat is None else chat
    return [_encoded(target, prompt, is_chat) for prompt in several(prompts)]


def are_chats(prompts: Sequence[EncodedPrompt]) -> bool | None:
    """Whether the prompts are turns of chats; None where some are and some are not."""
    kinds = {prompt.is_chat for prompt in prompts}
    return kinds.pop() if len(kinds) == 1 else None


def chat_note(target: Target, chat: bool | None) -> str | None:
    """What is to be said of how texts are read where nobody chose; None where that is plain."""
    if chat is not None:
        return None
    if target.is_chat:
        return (
            f"{target.name} is a chat model: a prompt is a user's turn in its template (--raw "
            "continues it as a text)"
        )
    if target.why_text in (NO_TEMPLATE, OF_PRETRAINING):
        return None
    return (
        f"prompts are continued as texts: {target.name} has a chat template, but {target.why_text} "
        "(--chat uses it)"
    )


def empty_answers(
    target: Target, prompts: Sequence[EncodedPrompt], outputs: Sequence[Output]
) -> list[str]:
    """Of answers that hold no text because the target ended them at once: why, and what to do."""
    pairs = zip(prompts, outputs, strict=True)
    empty = [p for p, o in pairs if o.finish_reason == "eos" and not o.text.strip()]
    if not empty:
        return []
    count = (
        f"{len(empty):,} of {len(outputs):,} answers are" if len(outputs) > 1 else "the answer is"
    )
    if any(prompt.is_chat for prompt in empty):
        why = "ended its turn at once"
        do = f"word the question otherwise, sample (--temperature 0.7), or {GO_ON}"
    elif target.template_digest is not None:
        why = "took the prompt for a text that is complete, and it has a chat template"
        do = "--chat makes the prompt a user's turn (in Python: chat=True)"
    else:
        why = "took the prompt for a text that is complete"
        do = f"end the prompt where something must follow, or {GO_ON}"
    return [f"{count} empty: {target.name} {why}; {do}"]


def several(prompts: Any) -> list[Any]:
    """The prompts one by one: strings, ids as lists, conversations as lists."""
    if isinstance(prompts, (str, EncodedPrompt)):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _of_mapping(prompts)
    if hasattr(prompts, "tolist") and hasattr(prompts, "ndim"):
        return _of_array(prompts)
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    several = list(prompts)
    if several and (_is_id(several[0]) or _is_message(several[0])):
        return [several]
    return [one for each in several for one in _one(each)]


def _one(prompt: Any) -> list[Any]:
    """The one prompt that an element of several stands for."""
    found = several(prompt) or [[]]  # no ids at all: refused where it would be read
    if len(found) > 1:
        raise _no_prompt(prompt)
    return found


def _of_mapping(prompt: Mapping[str, Any]) -> list[Any]:
    """A message by itself, a record with messages, or a tokenizer's encoding, unpadded."""
    if _is_message(prompt):
        return [[prompt]]
    if "messages" in prompt:
        return several(prompt["messages"])
    if IDS not in prompt:
        raise _no_prompt(prompt)
    rows, mask = several(prompt[IDS]), prompt.get("attention_mask")
    if mask is None:
        return rows
    keep = several(mask)
    return [
        [token for token, is_kept in zip(row, kept, strict=True) if is_kept]
        for row, kept in zip(rows, keep, strict=True)
    ]


def _of_array(array: Any) -> list[Any]:
    """One prompt of a row of ids, several of a matrix."""
    is_whole = (
        not str(array.dtype).removeprefix("torch.").startswith(("float", "bfloat", "complex"))
    )
    if array.ndim not in (1, 2) or not is_whole or str(array.dtype).endswith("bool"):
        raise _no_prompt(array)
    ids = array.tolist()
    return [ids] if array.ndim == 1 else ids


def _is_id(value: Any) -> bool:
    """An integer, of NumPy or a tensor of no dimension as well."""
    if isinstance(value, Integral):
        return not isinstance(value, bool)
    return getattr(value, "ndim", None) == 0 and hasattr(value, "__index__")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _no_prompt(found: Any) -> SpecctlError:
    kind = type(found).__name__
    if hasattr(found, "dtype") and hasattr(found, "shape"):
        kind += f" of {found.dtype}, shape {list(found.shape)}"
    return SpecctlError(
        "a prompt is no text",
        where="prompts",
        found=f"{kind}: {found!r}"[:120],
        expected="a string, token ids (a list, or a tensor or array of whole numbers), or messages "
        'such as {"role": "user", "content": "..."}',
        do='specctl.generate(target, "import os")',
    )


def _encoded(target: Target, prompt: Any, chat: bool) -> EncodedPrompt:
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, str):
        if not chat:
            check_room(target, prompt.strip())
            return EncodedPrompt(tuple(target.encode(prompt)), prompt)
        prompt = [{"role": "user", "content": prompt}]
    if messages := messages_of(prompt):
        text = str(messages[-1].get("content") or "")
        check_room(target, text.strip())  # templates may leave out blanks at either end
        ids = tuple(target.encode_chat(messages))
        return EncodedPrompt(ids, text, is_chat=True, messages=tuple(messages))
    if not all(map(_is_id, prompt)):
        raise _no_prompt(prompt)
    ids = tuple(int(token) for token in prompt)
    outside = [token for token in ids if not 0 <= token < target.spec.vocab_size]
    if outside:
        raise SpecctlError(
            "a prompt has a token outside the target's vocabulary",
            where="prompts",
            found=str(outside[0]),
            expected=f"0 to {target.spec.vocab_size - 1}",
            do="encode the prompt with the target's own tokenizer",
        )
    return EncodedPrompt(ids, "" if target.tokenizer is None else target.decode(ids))


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, each with its text in one piece; none of another prompt."""
    if isinstance(prompt, (list, tuple)) and prompt and all(map(_is_message, prompt)):
        return [_plain_message(one) for one in prompt]
    return []


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text in one piece."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, (list, tuple)):
        raise _no_content(content)
    return {**message, "content": "".join(map(_text_of_part, parts))}


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text")
    if not is_text or not isinstance(part.get("text"), str):
        raise _no_content(part)
    return str(part["text"])


def _no_content(found: Any) -> SpecctlError:
    kind = found.get("type", type(found).__name__) if isinstance(found, Mapping) else type(found)
    return SpecctlError(
        "the content of a message is no text",
        where="prompts",
        found=f"{getattr(kind, '__name__', kind)}: {found!r}"[:120],
        expected='a string, or parts such as {"type": "text", "text": "..."}',
        do="leave out what is no text; an image is given as images=, and <image> in a text says "
        "where it stands",
    )
