"""The request of /v1/responses, as far as it can be served without storing anything; and the chat
request that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from specctl.server.requests.fields import (
    CAPS,
    Draft,
    Few,
    Ignored,
    Strict,
    Text,
    Unused,
    Word,
    typed,
)
from specctl.server.requests.form_fields import TextFormat
from specctl.server.requests.protocol import Reasoning, StandsForChat, Variables
from specctl.server.requests.tool_fields import MAX_TOOLS, CallId, FunctionName

MAX_ITEMS = 2048
Off = Annotated[Literal[False], BeforeValidator(typed(bool))]


class InputText(Strict):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Unused = None
    logprobs: Unused = None


class ReasoningText(Strict):
    """A piece of the model's thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


Pieces = Annotated[list[InputText], Field(max_length=1024, fail_fast=True), Few(1024)]
Thoughts = Annotated[list[ReasoningText], Field(max_length=1024, fail_fast=True), Few(1024)]


class InputMessage(Strict):
    """A turn of the conversation; those of the assistant may be sent back as they were got."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Pieces
    id: Unused = None
    status: Unused = None
    phase: Unused = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(piece.text for piece in self.content)


class CallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: Word
    arguments: Text
    id: Unused = None
    status: Unused = None
    parsed_arguments: Unused = None
    namespace: None = None


class CallOutput(Strict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text | Pieces
    id: Unused = None
    status: Unused = None

    @property
    def text(self) -> str:
        if isinstance(self.output, str):
            return self.output
        return "\n".join(piece.text for piece in self.output)


class ReasoningItem(Strict):
    """What the model thought."""

    type: Literal["reasoning"]
    content: Thoughts | None = None
    summary: Thoughts | None = None
    id: Unused = None
    status: Unused = None
    encrypted_content: Unused = None


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = ("function_call", "function_call_output", "reasoning")
    return str(kind) if kind in known else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class ResponseTool(Strict):
    """A function, the only kind of tool."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Off | None = None


class ResponseChoice(Strict):
    """That function must be called."""

    type: Literal["function"]
    name: FunctionName


class SchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: Word
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(Strict):
    """The form of the text."""

    format: Format | None = None
    verbosity: Ignored = None


def _form(value: Any) -> str:
    return "word" if isinstance(value, str) else "other"


class ResponsesRequest(StandsForChat):
    """A conversation that the model is to continue. Nothing is stored: every request holds all."""

    input: Annotated[
        Annotated[Text, Tag("word")]
        | Annotated[
            list[Item],
            Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
            Few(MAX_ITEMS),
            Tag("other"),
        ],
        Discriminator(_form),
    ]
    model: Word | None = None
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    tools: (
        Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True), Few(MAX_TOOLS)]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("word")]
            | Annotated[ResponseChoice, Tag("other")],
            Discriminator(_form),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: Unused = None
    store: Off | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Off | None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 63, description="Left out, null or -1: a random one."
    )
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    chat_template_kwargs: Variables | None = None
    draft: Draft = None
    prompt_cache_key: Word | None = None
    tenant: Word | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Few(16),
        ]
        | None
    ) = None
    include: Ignored = None
    max_tool_calls: Ignored = None
    top_logprobs: Annotated[int, Field(ge=0, le=CAPS.max_logprobs)] | None = Field(
        None, description="Accepted, ignored, and named in the header X-Specctl-Ignored."
    )
    user: Unused = None
    safety_identifier: Unused = None
    prompt_cache_retention: Unused = None
    service_tier: Unused = None

    def _chat_fields(self) -> dict[str, Any]:
        form = self.text.format if self.text is not None else None
        choice = self.tool_choice
        fields: dict[str, Any] = {
            "messages": _messages(self),
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice if isinstance(choice, str | None) else _choice(choice),
            "response_format": None if form is None else _response_format(form),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stream": self.stream,
        }
        for name in SAME:
            fields[name] = getattr(self, name)
        return fields


SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "parallel_tool_calls",
    "prompt_cache_key", "tenant", "chat_template_kwargs", "store", "draft",
)  # fmt: skip


def _tool(tool: ResponseTool) -> dict[str, Any]:
    about = tool.model_dump(exclude={"type", "defer_loading"})
    return {"type": "function", "function": about}


def _choice(choice: ResponseChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(form: TextFormat | ObjectFormat | SchemaFormat) -> dict[str, Any]:
    if not isinstance(form, SchemaFormat):
        return {"type": form.type}
    about = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": about}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items as messages: what the model thought, said and called in one turn is one message."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None
    for item in body.input:
        if isinstance(item, CallOutput):
            turn = None
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            turn = None
            found.append({"role": item.role, "content": item.text})
        else:
            if turn is None or _begins_anew(turn, item):
                turn = {"role": "assistant", "content": None}
                found.append(turn)
            _add(turn, item)
    return [turn for turn in found if len(turn) > 2 or turn["content"] is not None]


def _begins_anew(turn: dict[str, Any], item: Any) -> bool:
    """A text behind a text, or behind calls, is another turn."""
    return isinstance(item, InputMessage) and (turn["content"] is not None or "tool_calls" in turn)


def _add(turn: dict[str, Any], item: Any) -> None:
    if isinstance(item, InputMessage):
        turn["content"] = item.text
    elif isinstance(item, CallItem):
        call = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})
    else:
        text = "\n".join(_thoughts(item))
        if text:
            turn["reasoning_content"] = text


def _thoughts(item: ReasoningItem) -> Iterator[str]:
    for piece in item.content or item.summary or ():
        yield piece.text
