"""Conversations -> token ids and loss masks: what is learned is what the target would be asked for.

An answer is learned behind the prompt that the chat template writes for it (the turns before, and
the mark behind which the assistant speaks), as the target reads it when it answers. Where the
template writes the conversation up to an answer as that prompt and something more, the something is
the answer; `{% generation %}` markers say which of it. Elsewhere (templates that open the thoughts
in the prompt, or leave out what was thought) the answer's own words stand behind the prompt, and
end as answers end in that template. Where a later prompt does not begin with what stands before it,
another document begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.core.errors import RecipeError, SpecctlError
from specctl.runtime.target.templates.chat_turns import as_taken, call_form, template_text
from specctl.train.data.records.records import Message, Sample

THINKING = ("enable_thinking", "thinking")  # Qwen3, GLM and others; DeepSeek, Granite
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
ANSWER = "specctl-answer"  # where an answer stands, in a conversation of ours

Variables = Mapping[str, Any]  # what else a template reads: enable_thinking, the day


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each whether it is to be predicted. `starts`: where documents begin that
    are read on their own; most conversations are one."""

    ids: list[int]
    mask: list[bool]
    starts: tuple[int, ...] = (0,)

    def documents(self) -> list[Encoded]:
        """Its documents, each for itself."""
        ends = (*self.starts[1:], len(self.ids))
        return [
            Encoded(self.ids[a:b], self.mask[a:b]) for a, b in zip(self.starts, ends, strict=True)
        ]


def has_markers(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's words with `{% generation %}`."""
    template = tokenizer.chat_template
    return isinstance(template, str) and "generation %}" in template


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any],
    variables: Variables | None = None,
    **more: Any,
) -> Any:
    """The conversation as the template writes it; ValueError when the template refuses it."""
    from jinja2.exceptions import TemplateError

    from specctl.runtime.target.templates.bounded_templates import written

    try:
        return written(
            tokenizer,
            as_taken(tokenizer, messages),
            tools=list(tools) or None,
            **{"tokenize": True, "return_dict": True, **more, **(variables or {})},
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def encode_sample(
    tokenizer: Any,
    sample: Sample,
    eos_ids: Sequence[int],
    variables: Variables | None = None,
) -> Encoded:
    """Ids and mask of a conversation; ValueError says why it cannot be used.

    A template that marks nothing although the assistant speaks is an error of the run, not of the
    sample: SpecctlError with a preview.
    """
    spoken = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if not spoken:
        raise ValueError("no assistant turn")
    if sample.unanswered:
        raise ValueError("the record holds questions without answers")
    if tokenizer.chat_template is None:
        return _encode_pair(tokenizer, sample, eos_ids)
    turns = [turn for turn in spoken if turn and turn not in sample.given]
    if not turns:
        raise ValueError("nothing stands before the assistant's turn")
    chat = _Chat(tokenizer, sample, tuple(eos_ids), dict(variables or {}))
    encoded = chat.encoded(turns)
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


@dataclass(frozen=True, slots=True)
class _Answer:
    """Ids that stand behind a prompt, and which of them the assistant says."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True, slots=True)
class _Chat:
    """One conversation and the template that writes it."""

    tokenizer: Any
    sample: Sample
    eos_ids: tuple[int, ...]
    variables: dict[str, Any]

    def encoded(self, turns: Sequence[int]) -> Encoded:
        """The answers of these turns behind their prompts, joined where one prompt goes on from
        what stands before it."""
        ids, mask, starts = list[int](), list[bool](), [0]
        for turn in turns:
            prompt = self._prompt(turn)
            answer = self._answer(turn, prompt)
            before = ids[starts[-1] :]
            if prompt.ids[: len(before)] != before:
                starts.append(len(ids))
                before = []
            ids += prompt.ids[len(before) :] + answer.ids
            mask += [False] * (len(ids) - len(mask) - len(answer.ids)) + answer.mask
        whole = self._ids(self._text(len(self.sample.messages)))
        before = ids[starts[-1] :]
        if whole[: len(before)] == before:  # what the template writes behind the last answer
            ids += whole[len(before) :]
            mask += [False] * (len(ids) - len(mask))
        return Encoded(ids, mask, tuple(starts))

    def _prompt(self, turn: int) -> _Prompt:
        text = self._text(turn, add_generation_prompt=True)
        return _Prompt(text, self._ids(text))

    def _answer(self, turn: int, prompt: _Prompt) -> _Answer:
        """What is learned behind a prompt: its end marker included, not what follows that (often a
        newline), which the template writes and the model never does."""
        if self.sample.messages[turn].get("tool_calls"):
            self._check_calls()
        through = self._text(turn + 1)
        ids = self._ids(through)
        n = len(prompt.ids)
        if ids[:n] != prompt.ids:
            tail = self._tail(turn, prompt, through)
            return _Answer(tail, [True] * len(tail))
        marks = self._marked(turn)[n:] if has_markers(self.tokenizer) else [True] * (len(ids) - n)
        ends = [at for at, token in enumerate(ids[n:]) if token in self.eos_ids]
        if not has_markers(self.tokenizer) and ends:
            marks = marks[: ends[-1] + 1]
        said = [at for at, mark in enumerate(marks) if mark]
        stop = said[-1] + 1 if said else 0
        return _Answer(ids[n : n + stop], marks[:stop])

    def _tail(self, turn: int, prompt: _Prompt, through: str) -> list[int]:
        """Ids of an answer that the template does not write right behind its prompt."""
        if through.startswith(prompt.text):  # only the tokens differ where the two meet
            written = through[len(prompt.text) :]
            return self._cut(self._ids(written))
        message = self.sample.messages[turn]
        text = self._calls_text(turn, through) if message.get("tool_calls") else _words(message)
        text = self._behind(prompt.text, text)
        end = self._end() if not message.get("tool_calls") else []
        return self._cut(self._continuing(prompt, text)) + end

    def _behind(self, prompt: str, text: str) -> str:
        """An answer without the thoughts, or the mark of them, that its prompt has already."""
        for begin, end in TAGS:
            thoughts, closed, rest = text.partition(end)
            if prompt.rstrip().endswith(begin):
                if not closed:
                    raise ValueError(
                        f"the chat template opens {begin} in the prompt, and the answer has no "
                        f"thoughts that end in {end}"
                    )
                text = thoughts.lstrip().removeprefix(begin)
                text = text.removeprefix("\n") if prompt.endswith("\n") else text
                return text + closed + rest
            if prompt.rstrip().endswith(end) and thoughts.lstrip().startswith(begin) and closed:
                return rest.lstrip("\n")
        return text

    def _calls_text(self, turn: int, through: str) -> str:
        """Calls as the template writes them: what follows the assistant's header."""
        before = self._text(turn)
        header = self._rendered_answer()[0]
        if not through.startswith(before + header):
            raise ValueError("the chat template rewrites what stands before a call of a tool")
        return through[len(before + header) :]

    def _check_calls(self) -> None:
        if not call_form(self.tokenizer, template_text(self.tokenizer)).is_written:
            raise ValueError("the chat template does not write calls of tools")

    def _rendered_answer(self) -> tuple[str, str]:
        """What the template writes before and behind the words of an answer."""
        asked: list[Message] = [{"role": "user", "content": "x"}]
        answer: Message = {"role": "assistant", "content": ANSWER}
        before = self._render(asked)
        whole = self._render([*asked, answer])
        head, _, rest = whole.partition(ANSWER)
        return head.removeprefix(before), rest

    def _end(self) -> list[int]:
        """The ids that end an answer in this template."""
        rest = self._ids(self._rendered_answer()[1])
        ends = [at for at, token in enumerate(rest) if token in self.eos_ids]
        return rest[: ends[0] + 1] if ends else list(self.eos_ids[:1])

    def _continuing(self, prompt: _Prompt, text: str) -> list[int]:
        """Ids of a text as it is read behind the prompt."""
        whole = self._ids(prompt.text + text)
        n = len(prompt.ids)
        return whole[n:] if whole[:n] == prompt.ids else self._ids(text)

    def _cut(self, ids: list[int]) -> list[int]:
        """The ids up to the last that ends a text."""
        ends = [at for at, token in enumerate(ids) if token in self.eos_ids]
        return ids[: ends[-1] + 1] if ends else ids

    def _marked(self, turn: int) -> list[bool]:
        """Which tokens the template marks as the assistant's, up to that turn's answer."""
        found = render(
            self.tokenizer,
            self.sample.messages[: turn + 1],
            self.sample.tools,
            self.variables,
            return_assistant_tokens_mask=True,
        )
        return [bool(mark) for mark in found["assistant_masks"]]

    def _text(self, until: int, **more: Any) -> str:
        return self._render(self.sample.messages[:until], **more)

    def _render(self, messages: Sequence[Message], **more: Any) -> str:
        more = {"tokenize": False, "return_dict": False, **more}
        text = render(self.tokenizer, messages, self.sample.tools, self.variables, **more)
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    ids: list[int]


def _words(message: Message) -> str:
    """All that an answer says: its thoughts, where they stand beside it, in the usual tags."""
    content, thoughts = str(message.get("content", "")), message.get("reasoning_content")
    begin, end = TAGS[0]
    return f"{begin}\n{thoughts}\n{end}\n\n{content}" if thoughts else content


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


def answerable(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    variables: Variables | None = None,
) -> list[int]:
    """Ids of these messages and of the mark behind which the assistant speaks."""
    if not messages:
        raise ValueError("nothing stands before the assistant's turn")
    if tokenizer.chat_template is None:
        if len(messages) == 1:
            return list(tokenizer(str(messages[0]["content"]))["input_ids"])
        raise ValueError("the tokenizer has no chat template")
    out = render(tokenizer, messages, tools, variables, add_generation_prompt=True)
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
