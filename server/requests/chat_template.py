"""Messages of a request -> the turns that the target's template writes; and what kind of template
that is: which format it has for tool calls, whether the model thinks, which variables it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, TemplateError, meta

from specctl.core.errors import SpecctlError, unknown
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_turns import THOUGHTS, parsed_arguments, reads_key
from specctl.server.replies.message_parser import TAGS
from specctl.server.requests.protocol import (
    AnyMessage,
    AssistantMessage,
    ChatRequest,
    Message,
    ToolMessage,
)
from specctl.server.tools import TOOL_FORMATS, ToolFormat

ROLES = {"developer": "system"}  # what OpenAI calls a system message of late
OWN = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "raise_exception", "strftime_now", "bos_token", "eos_token",
})  # fmt: skip
BLOCKS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # a tag of transformers' own
Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as the template writes it, and what it was written from."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a target writes conversations. `tool_format`: None where tools are not supported;
    `knows_tools`: whether the template itself writes them; `think_tags`: around the thoughts of a
    thinking model; `variables`: what else the template reads; `added`: the tokenizer's added tokens
    by their spelling, of which the `special` ones are left out of texts; `thoughts`: the field in
    which the template reads what was thought in earlier turns, None where it reads none."""

    template: str = ""
    tool_format: ToolFormat | None = None
    knows_tools: bool = False
    think_tags: tuple[str, str] | None = None
    variables: frozenset[str] = frozenset()
    added: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    thoughts: str | None = None

    @classmethod
    def of(cls, target: Target, tool_parser: str = "auto", reasoning: bool = True) -> ChatStyle:
        """That of a target. `tool_parser`: a format by name, "auto" for what the template shows,
        "none"; `reasoning`: whether thoughts are kept apart where the template has them."""
        template = _template(target.tokenizer)
        added = dict(getattr(target.tokenizer, "added_tokens_decoder", {}))
        variables = _variables(template)
        knows = "tools" in variables
        tags = next((tags for tags in TAGS if tags[1] in template), None)
        return cls(
            template,
            _tool_format(tool_parser, template if knows else ""),
            knows,
            tags if reasoning else None,
            variables - OWN - _special_names(target.tokenizer),
            {str(token): int(id) for id, token in added.items()},
            frozenset(int(id) for id, token in added.items() if token.special),
            next((name for name in THOUGHTS if reads_key(template, name)), None),
        )

    def write(self, target: Target, body: ChatRequest) -> Written:
        """The conversation of a request; SpecctlError where the template refuses it."""
        tools = [tool.as_written() for tool in body.called]
        turns = turns_of(body.messages, self.thoughts)
        if self.tool_format is not None and not self.knows_tools:
            turns, tools = _spelled_out(turns, tools, self.tool_format), []
        variables = self.variables_of(body)[0]
        return Written(turns, tools, variables, written(target, turns, tools, variables))

    def variables_of(self, body: ChatRequest) -> tuple[dict[str, Any], list[str]]:
        """What the request sets of the template's variables; and the fields that set nothing."""
        given = dict(body.chat_template_kwargs or {})
        found = {name: value for name, value in given.items() if name in self.variables}
        ignored = [f"chat_template_kwargs.{name}" for name in given if name not in found]
        effort, name = body.reasoning_effort, "reasoning_effort"
        if body.reasoning is not None and body.reasoning.effort is not None:
            if effort is None:
                effort, name = body.reasoning.effort, "reasoning.effort"
            elif effort != body.reasoning.effort:
                ignored.append("reasoning.effort")
        if effort is not None and "reasoning_effort" in self.variables:
            found.setdefault("reasoning_effort", effort)
        elif effort is not None and "enable_thinking" in self.variables:
            found.setdefault("enable_thinking", effort != "none")
        elif effort is not None:
            ignored.append(name)
        return found, ignored

    def unread_thoughts(self, body: ChatRequest) -> list[str]:
        """The fields of earlier turns with thoughts that the template does not get."""
        found: list[str] = []
        for at, message in enumerate(body.messages):
            given = message.thoughts if isinstance(message, AssistantMessage) else {}
            first = next(iter(given.values()), "") if self.thoughts is not None else None
            found += [f"messages[{at}].{name}" for name, text in given.items() if text != first]
        return found


def turns_of(messages: Sequence[AnyMessage], thoughts: str | None = None) -> list[Turn]:
    """As templates know them. `thoughts`: the field in which the template reads them."""
    return [_turn(message, thoughts or THOUGHTS[0]) for message in messages]


def written(
    target: Target,
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the template writes it; SpecctlError where the template refuses."""
    try:
        return target.chat_text(turns, tools, variables)
    except (TemplateError, TypeError, ValueError) as error:
        raise SpecctlError(
            "the chat template of the target does not take these messages",
            where="messages",
            found=str(error)[:200],
            do="change the order of the roles, or use /v1/completions with a prompt of your own",
        ) from error


def _turn(message: AnyMessage, thoughts: str) -> Turn:
    content: Any = message.text
    if isinstance(message, Message) and message.has_images:
        content = message.parts
    turn: Turn = {"role": ROLES.get(message.role, message.role), "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        for text in [*message.thoughts.values()][:1]:
            turn[thoughts] = text
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": parsed_arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
    return turn


def _spelled_out(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Turn]:
    """Tools, calls and results as plain text, for a template that knows none of them."""
    found: list[Turn] = []
    if tools:
        found.append({"role": "system", "content": form.describe(tools)})
    for turn in turns:
        turn = dict(turn)
        calls = [call["function"] for call in turn.pop("tool_calls", ())]
        lines = [form.write(call["name"], call["arguments"]) for call in calls]
        if lines or not isinstance(turn["content"], list):  # a list: a user's turn with images
            said = [turn["content"], *lines] if turn["content"] else lines or [""]
            turn["content"] = "\n".join(said)
        if turn["role"] == "tool":
            turn = {"role": "user", "content": turn["content"]}
        if turn["role"] == "system" and len(found) == 1 and found[0]["role"] == "system":
            found[0]["content"] = turn["content"] + "\n\n" + found[0]["content"]
        else:
            found.append(turn)
    return found


def _template(tokenizer: Any) -> str:
    """All templates of a tokenizer, as one text."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(map(str, dict(found).values()))


def _variables(template: str) -> frozenset[str]:
    """The names that a template reads and does not set."""
    extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    try:
        parsed = Environment(extensions=extensions).parse(BLOCKS.sub("", template))
    except TemplateError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed))


def _special_names(tokenizer: Any) -> frozenset[str]:
    """bos_token and the like."""
    return frozenset(getattr(tokenizer, "special_tokens_map", {}))


def _tool_format(name: str, template: str) -> ToolFormat | None:
    if name == "none":
        return None
    if name == "auto":
        known = TOOL_FORMATS.working().values()
        shown = [one for one in known if any(s in template for s in one.signs)]
        return shown[0] if shown else None
    if name not in TOOL_FORMATS:
        raise unknown("tool parser", name, ("auto", "none", *TOOL_FORMATS), "--set api.tool_parser")
    return TOOL_FORMATS[name]
