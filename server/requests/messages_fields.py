"""The request of Anthropic's Messages API (/v1/messages), and the chat request that it stands for.

Blocks of a turn become what chat templates know: texts and thoughts of the assistant and its calls
are one message, each result of a tool a message of its own, in the order in which they stand. Turns
of one speaker that follow each other are one, as in that API: many templates know no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from specctl.server.requests.fields import (
    CAPS,
    Draft,
    Few,
    Ignored,
    Stop,
    Strict,
    Text,
    Unused,
    Word,
    one_or_many,
)
from specctl.server.requests.image_fields import ImageBlock
from specctl.server.requests.protocol import StandsForChat
from specctl.server.requests.tool_fields import MAX_TOOLS, CallId, FunctionName

MAX_TURNS, MAX_BLOCKS = 2048, 1024
EFFORTS = {"max": "xhigh"}  # our word for it; the others are the same


class TextBlock(Strict):
    """A piece of a text."""

    type: Literal["text"]
    text: Text
    cache_control: Unused = None
    citations: Unused = None


TextOrBlocks = Annotated[
    Annotated[Text, Tag("one")]
    | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Few(MAX_BLOCKS), Tag("many")],
    Discriminator(one_or_many),
]


class ThinkingBlock(Strict):
    """What the model thought, sent back."""

    type: Literal["thinking"]
    thinking: Text
    signature: Unused = None


class RedactedBlock(Strict):
    """Thoughts that only another server can read."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: CallId
    name: Word
    input: dict[str, Any]
    cache_control: Unused = None
    caller: Unused = None
    toolset_name: Unused = None


class ToolResultBlock(Strict):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrBlocks | None = None
    is_error: Ignored = None
    cache_control: Unused = None
    toolset_name: Unused = None

    @property
    def text(self) -> str:
        return _text_of(self.content or "")


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
ModelBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(Strict):
    """What the user, or a tool, says."""

    role: Literal["user"]
    content: Annotated[
        Annotated[Text, Tag("one")]
        | Annotated[
            list[UserBlock],
            Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True),
            Few(MAX_BLOCKS),
            Tag("many"),
        ],
        Discriminator(one_or_many),
    ]


class ModelTurn(Strict):
    """What the model said, sent back as it was got."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[Text, Tag("one")]
        | Annotated[
            list[ModelBlock],
            Field(max_length=MAX_BLOCKS, fail_fast=True),
            Few(MAX_BLOCKS),
            Tag("many"),
        ],
        Discriminator(one_or_many),
    ]


class SystemTurn(Strict):
    """What the system says in the middle of a conversation."""

    role: Literal["system"]
    content: TextOrBlocks


class MessagesTool(Strict):
    """A function of the client, the only kind of tool: this server runs none itself."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Unused = None
    allowed_callers: Unused = None
    defer_loading: Ignored = None
    input_examples: Ignored = None
    eager_input_streaming: Unused = None


class MessagesChoice(Strict):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> MessagesChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to type: tool, and is needed there")
        return self


class Thinking(Strict):
    """Whether the model thinks first; how long is `output_config.effort`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Ignored = None
    display: Ignored = None


class MessagesSchema(Strict):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """How long the model thinks, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessagesSchema | None = None


class MessagesMetadata(Strict):
    """`user_id`: whose request it is. What a drafter remembers of answers is kept apart by it."""

    user_id: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def tenant(self) -> str | None:
        """Clients put several ids into one; any length names somebody, nothing names nobody."""
        if not self.user_id:
            return None
        return hashlib.sha256(self.user_id.encode()).hexdigest()


class CountRequest(StandsForChat):
    """A conversation whose tokens are to be counted."""

    messages: Annotated[
        list[Annotated[UserTurn | ModelTurn | SystemTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_TURNS, fail_fast=True),
        Few(MAX_TURNS),
    ]
    model: Word | None = None
    system: TextOrBlocks | None = None
    tools: (
        Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True), Few(MAX_TOOLS)]
        | None
    ) = None
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessagesSchema | None = Field(
        None, description="What `output_config.format` is called by earlier clients."
    )
    cache_control: Unused = None
    user_profile_id: Unused = None
    workspace_id: Unused = None
    speed: Ignored = None

    def _chat_fields(self) -> dict[str, Any]:
        given = self.tool_choice
        choice: Any = None if given is None else CHOICES.get(given.type)
        if given is not None and given.type == "tool":
            choice = {"type": "function", "function": {"name": given.name}}
        fields: dict[str, Any] = {
            "messages": _combined(_messages(self)),
            "model": self.model,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "reasoning_effort": self._effort(),
        }
        if given is not None and given.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.thinking is not None and self.thinking.type == "enabled":
            fields["chat_template_kwargs"] = {"enable_thinking": True}
        form = self.output_format
        if self.output_config is not None and self.output_config.format is not None:
            form = self.output_config.format
        if form is not None:
            about = {"name": "answer", "schema": form.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": about}
        return fields

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = None if self.output_config is None else self.output_config.effort
        return None if effort is None else EFFORTS.get(effort, effort)


class MessagesRequest(CountRequest):
    """A conversation that the model is to continue."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    stop_sequences: (
        Annotated[list[Stop], Field(max_length=CAPS.max_stop), Few(CAPS.max_stop)] | None
    ) = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 63, description="Left out, null or -1: a random one."
    )
    draft: Draft = None
    prompt_cache_key: Word | None = Field(
        None, description="Names a conversation: its requests reuse what was read before."
    )
    store: bool | None = Field(
        None, description="false: prompt and answer are not kept, where the server keeps any."
    )
    service_tier: Unused = None
    inference_geo: Unused = None
    diagnostics: Unused = None
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0), Few(0)] | None = None
    thread: None = None
    context_management: Ignored = None

    @model_validator(mode="after")
    def _opens_an_answer(self) -> MessagesRequest:
        if isinstance(self.messages[-1], ModelTurn):
            raise ValueError(
                "the conversation ends with the assistant's words, which are not gone on with: the "
                "template always opens a new answer; end with a user's turn"
            )
        return self

    def _chat_fields(self) -> dict[str, Any]:
        fields = super()._chat_fields()
        fields |= {name: getattr(self, name) for name in SAME}
        fields["stop"] = [stop for stop in self.stop_sequences or () if stop] or None
        fields["tenant"] = None if self.metadata is None else self.metadata.tenant
        return fields


SAME = (
    "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "draft", "store",
    "prompt_cache_key",
)  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tool(tool: MessagesTool) -> dict[str, Any]:
    about = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {**about, "description": tool.description}}


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _messages(body: CountRequest) -> Iterator[dict[str, Any]]:
    """The turns as messages of a chat request."""
    if body.system:
        yield {"role": "system", "content": _text_of(body.system)}
    for turn in body.messages:
        if isinstance(turn, SystemTurn):
            yield {"role": turn.role, "content": _text_of(turn.content)}
        elif isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif isinstance(turn, UserTurn):
            yield from _of_user(turn.content)
        else:
            yield _of_model(turn.content)


def _combined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one speaker that follow each other as one; results of tools stay apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] == "tool" or message["role"] != last.get("role"):
            found.append(message)
            continue
        for name in ("content", "reasoning_content"):
            both = [one[name] for one in (last, message) if one.get(name)]
            if any(isinstance(each, list) for each in both):
                last[name] = [part for each in both for part in _as_parts(each)]
            elif both:
                last[name] = "\n".join(both)
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last["tool_calls"] = calls
    return found


def _of_user(blocks: list[UserBlock]) -> Iterator[dict[str, Any]]:
    said: list[str | dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if said:
                yield {"role": "user", "content": _said(said)}
                said = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        else:
            said.append(block.text if isinstance(block, TextBlock) else block.as_part())
    if said:
        yield {"role": "user", "content": _said(said)}


def _said(pieces: list[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Words in one piece, or, where there are images, in parts."""
    words = [piece for piece in pieces if isinstance(piece, str)]
    if len(words) == len(pieces):
        return "\n".join(words)
    return [part for piece in pieces for part in _as_parts(piece)]


def _as_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else [content]


def _of_model(blocks: list[ModelBlock]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn
