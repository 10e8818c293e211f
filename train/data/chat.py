"""Conversations -> token ids and loss masks, by the chat template's own boundaries.

Two ways to find what the assistant said, both on token ids, never by searching text:
`{% generation %}` markers in the template, which say it exactly; or, without markers, the prefix
difference: the ids of everything up to a turn, rendered with the generation prompt, must be a
prefix of the ids of the whole conversation, so the answer begins where that prefix ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import RecipeError, SpecctlError
from specctl.train.data.records import Message, Sample

THINKING = ("enable_thinking", "thinking")  # Qwen3, GLM and others; DeepSeek, Granite


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each whether it is to be predicted."""

    ids: list[int]
    mask: list[bool]


def has_markers(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's words with `{% generation %}`."""
    template = tokenizer.chat_template
    return isinstance(template, str) and "generation %}" in template


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any], **more: Any) -> Any:
    """The conversation as the template writes it; ValueError when the template refuses it."""
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=True, return_dict=True, **more
        )
    except (TemplateError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def encode_sample(tokenizer: Any, sample: Sample, eos_ids: Sequence[int]) -> Encoded:
    """Ids and mask of a conversation; ValueError says why it cannot be used.

    A template that marks nothing although the assistant speaks is an error of the run, not of the
    sample: SpecctlError with a preview.
    """
    if not any(message["role"] == "assistant" for message in sample.messages):
        raise ValueError("no assistant turn")
    if tokenizer.chat_template is None:
        return _encode_pair(tokenizer, sample, eos_ids)
    if has_markers(tokenizer):
        out = render(tokenizer, sample.messages, sample.tools, return_assistant_tokens_mask=True)
        encoded = Encoded(list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]])
    else:
        encoded = _encode_by_prefix(tokenizer, sample, eos_ids)
    if not any(encoded.mask):
        raise SpecctlError(
            "the loss mask of a conversation is empty although the assistant speaks",
            where=sample.where,
            found=preview(tokenizer, encoded),
            expected="the assistant's words in [[ ]]",
            do="put {% generation %} ... {% endgeneration %} around the assistant's content in the "
            "tokenizer's chat template",
        )
    return encoded


def _encode_pair(tokenizer: Any, sample: Sample, eos_ids: Sequence[int]) -> Encoded:
    """A base model without a template: prompt, response, end, as plain text."""
    roles = [message["role"] for message in sample.messages]
    if roles != ["user", "assistant"]:
        raise SpecctlError(
            "the target's tokenizer has no chat template, so conversations cannot be written",
            where=sample.where,
            found="roles " + ", ".join(roles),
            expected="raw text, or one prompt with one response",
            do="use a chat model's tokenizer, or data with prompt/response or text",
        )
    ask, answer = (str(message["content"]) for message in sample.messages)
    prompt = list(tokenizer(ask)["input_ids"])
    response = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    response += list(eos_ids[:1])
    return Encoded(prompt + response, [False] * len(prompt) + [True] * len(response))


def _encode_by_prefix(tokenizer: Any, sample: Sample, eos_ids: Sequence[int]) -> Encoded:
    messages, tools = sample.messages, sample.tools
    ids: list[int] = list(render(tokenizer, messages, tools)["input_ids"])
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant" and turn:
            start, end = _answer_span(tokenizer, sample, turn, ids, eos_ids)
            mask[start:end] = [True] * (end - start)
    return Encoded(ids, mask)


def _answer_span(
    tokenizer: Any, sample: Sample, turn: int, ids: list[int], eos_ids: Sequence[int]
) -> tuple[int, int]:
    """First and last+1 index of what the assistant says in that turn, its end marker included.

    What follows the end marker (often a newline) is written by the template, never by the model.
    """
    before = render(tokenizer, sample.messages[:turn], sample.tools, add_generation_prompt=True)
    prefix = list(before["input_ids"])
    if ids[: len(prefix)] != prefix:
        raise ValueError("the chat template rewrites what stands before an answer")
    start = len(prefix)
    through = list(render(tokenizer, sample.messages[: turn + 1], sample.tools)["input_ids"])
    if ids[: len(through)] == through:
        ends = [i for i in range(start, len(through)) if ids[i] in eos_ids]
        return start, ends[-1] + 1 if ends else len(through)
    for i in range(start, len(ids)):  # a template that shortens old turns: up to the end marker
        if ids[i] in eos_ids:
            return start, i + 1
    raise ValueError("the end of an answer cannot be told from the chat template")


def thinking_switch(tokenizer: Any, wanted: bool | None) -> dict[str, bool]:
    """What a chat template is told so that its model thinks before it answers, or does not (the
    names that templates have for it); RecipeError for a template without such a switch."""
    if wanted is None:
        return {}
    template = tokenizer.chat_template
    known = [name for name in THINKING if re.search(rf"\b{name}\b", str(template or ""))]
    if not known:
        raise RecipeError(
            "the target's chat template has no switch for thinking",
            where="data.thinking",
            found=f"{str(wanted).lower()}, and a template without " + " or ".join(THINKING),
            expected="null",
            do="leave data.thinking out",
        )
    return dict.fromkeys(known, wanted)


def conversation_prompt(tokenizer: Any, sample: Sample) -> list[int]:
    """Ids of the conversation up to its last assistant turn, ready to be answered."""
    messages = sample.messages
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    cut = messages[: spoken[-1]] if spoken else messages
    return answerable(tokenizer, cut, sample.tools)


def answerable(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    switch: Mapping[str, bool] | None = None,
) -> list[int]:
    """Ids of these messages and of the mark behind which the assistant speaks."""
    if not messages:
        raise ValueError("nothing stands before the assistant's turn")
    if tokenizer.chat_template is None:
        if len(messages) == 1:
            return list(tokenizer(str(messages[0]["content"]))["input_ids"])
        raise ValueError("the tokenizer has no chat template")
    out = render(tokenizer, messages, tools, add_generation_prompt=True, **(switch or {}))
    return list(out["input_ids"])


def preview(tokenizer: Any, encoded: Encoded, width: int = 320) -> str:
    """The text with what is to be predicted in [[ ]], shortened in the middle."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(encoded.ids) + 1):
        if i == len(encoded.ids) or encoded.mask[i] != encoded.mask[start]:
            text = tokenizer.decode(encoded.ids[start:i])
            parts.append(f"[[{text}]]" if encoded.mask[start] else text)
            start = i
    whole = "".join(parts).replace("\n", "\\n")
    half = width // 2
    return whole if len(whole) <= width else f"{whole[:half]} ... {whole[-half:]}"
