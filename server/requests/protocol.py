"""The requests of the API: every field with its type and range.

Fields that OpenAI's clients send as a matter of course and that change nothing here are accepted
and not used (`Unused`); fields of vLLM that would change something and do not are named in a header
of the answer (`Ignored`), as are those that are not named here at all (`unread_fields.py`); fields
that change the answer are accepted only where they change nothing, and refused in words
otherwise (`errors.UNSUPPORTED`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from specctl.runtime.outline.answer import MOST_POINTS
from specctl.runtime.target.templates.chat_turns import THOUGHTS
from specctl.server.requests.fields import (
    CAPS,
    Bias,
    Draft,
    Few,
    Ignored,
    Nothing,
    Stop,
    Strict,
    Text,
    Token,
    TokenList,
    TokenName,
    Unused,
    Word,
    one_or_many,
    typed,
)
from specctl.server.requests.form_fields import FormFields
from specctl.server.requests.image_fields import ImagePart
from specctl.server.requests.tool_fields import (
    CallId,
    NamedChoice,
    ToolCalls,
    ToolChoice,
    Tools,
)

MAX_STOP_TOKENS = 128
Scalar = bool | int | Annotated[float, Field(allow_inf_nan=False)] | Word | None
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Variables = Annotated[dict[VariableName, Scalar], Field(max_length=32), Few(32)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _kind(value: Any) -> str:
    """Which of several types a value is meant to be, so that errors speak of that one."""
    if not isinstance(value, list):
        return "one"
    first = value[0] if value else None
    return "tokens" if isinstance(first, int) else "lists" if isinstance(first, list) else "many"


class StreamOptions(Strict):
    """`include_usage`: one more event at the end that counts tokens."""

    include_usage: bool | None = None
    include_obfuscation: Unused = None
    continuous_usage_stats: Ignored = None


class Reasoning(Strict):
    """How long the model thinks."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class Common(FormFields):
    """What both kinds of requests share; null is the same as leaving a field out."""

    model: Word | None = None
    n: int | None = Field(None, ge=1, le=CAPS.max_n)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int | None = Field(
        None, ge=0, lt=1 << 31, description="So many tokens before the text may end by itself."
    )
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1 switch it off.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024), Few(1024)] | None = None
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 63, description="Left out, null or -1: a random one."
    )
    stop: (
        Annotated[
            Annotated[Stop, Tag("one")]
            | Annotated[
                list[Stop], Field(max_length=CAPS.max_stop), Few(CAPS.max_stop), Tag("many")
            ],
            Discriminator(one_or_many),
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS), Few(MAX_STOP_TOKENS)] | None
    ) = Field(None, description="Tokens that end the text; their own text is left out.")
    ignore_eos: bool | None = Field(None, description="Go on behind the end of a text.")
    skip_special_tokens: bool | None = Field(
        None, description="false: control tokens are spelled in the text, not left out."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="true: the text ends with the stop string or the token that ended it."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Word | None = Field(
        None, description="Names a conversation: its requests reuse what was read before."
    )
    specctl: bool | None = Field(
        None, description="Say with every piece of text which tokens were drafted and accepted."
    )
    draft: Draft = None
    tenant: Word | None = Field(
        None,
        description="Whose request it is, among those of one API key: what a drafter remembers of "
        "answers is kept apart by it. Else all of a key's requests are of one tenant.",
    )
    user: Unused = None
    safety_identifier: Unused = None
    prompt_cache_retention: Unused = None
    store: bool | None = Field(
        None, description="false: prompt and answer are not kept, where the server keeps any."
    )
    metadata: Unused = None
    service_tier: Unused = None
    request_id: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None
    length_penalty: Ignored = None
    spaces_between_special_tokens: Ignored = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Ignored = None
    return_tokens_as_token_ids: Ignored = None
    return_token_ids: Ignored = None

    @model_validator(mode="after")
    def _fits_together(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.min_tokens and self.form_field is not None:
            raise ValueError(f"give either min_tokens or {self.form_field}")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens is more than max_tokens")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """An empty string stops nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(stop for stop in given if stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Common):
    """A text, or token ids, to be continued as they are; several make several choices."""

    prompt: Annotated[
        Annotated[Text, Tag("one")]
        | Annotated[
            list[Text], Field(min_length=1, max_length=CAPS.max_n), Few(CAPS.max_n), Tag("many")
        ]
        | Annotated[TokenList, Tag("tokens")]
        | Annotated[
            list[TokenList],
            Field(min_length=1, max_length=CAPS.max_n, fail_fast=True),
            Few(CAPS.max_n),
            Tag("lists"),
        ],
        Discriminator(_kind),
    ]
    logprobs: int | None = Field(None, ge=0, le=CAPS.max_logprobs)
    echo: Annotated[Literal[False], BeforeValidator(typed(bool))] | None = None
    suffix: Literal[""] | None = None
    best_of: Annotated[Literal[1], BeforeValidator(typed(int))] | None = None


class TextPart(Strict):
    """A piece of a message; a bare string is one, too."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Strict):
    """What the model said in place of an answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"refusal": "a refusal", "image_url": "an image"}.get(str(kind), "a text")


def _as_part(value: Any) -> Any:
    return {"type": "text", "text": value} if isinstance(value, str) else value


Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[ImagePart, Tag("an image")],
    Discriminator(_part_kind),
    BeforeValidator(_as_part),
]
Content = Annotated[
    Annotated[Text, Tag("one")]
    | Annotated[
        list[Part],
        Field(max_length=1024, fail_fast=True),
        Few(1024),
        Tag("many"),
    ],
    Discriminator(one_or_many),
]


def _joined(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content if not isinstance(part, ImagePart))


def _has_images(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(part, ImagePart) for part in content)


class Message(Strict):
    """What the system or the user says."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Word | None = None

    @model_validator(mode="after")
    def _shows_as_user(self) -> Message:
        if self.role != "user" and self.has_images:
            raise ValueError("images stand in a user's turn")
        return self

    @property
    def text(self) -> str:
        return _joined(self.content)

    @property
    def has_images(self) -> bool:
        return _has_images(self.content)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Words and images in order, as chat templates know them."""
        given = [self.content] if isinstance(self.content, str) else self.content
        return [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part if isinstance(part, str) else part.text}
            for part in given
        ]


class AssistantMessage(Strict):
    """A turn of the model. It may be sent back as it was got, empty fields included; its thoughts
    by any of the names that servers have for them."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Word | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None
    tool_calls: ToolCalls | None = None
    refusal: Unused = None
    annotations: Unused = None
    audio: None = None
    function_call: None = None
    parsed: Unused = None
    provider_specific_fields: Unused = None

    @model_validator(mode="after")
    def _says_or_calls(self) -> AssistantMessage:
        if _has_images(self.content):
            raise ValueError("images stand in a user's turn")
        is_given = "content" in self.model_fields_set or isinstance(self.refusal, str)
        if not is_given and not self.tool_calls and not self.thoughts:
            raise ValueError("content is missing, and there are no tool_calls")
        return self

    @property
    def text(self) -> str:
        if self.content is None and isinstance(self.refusal, str):
            return self.refusal
        return _joined(self.content)

    @property
    def thoughts(self) -> dict[str, str]:
        """What it thought, by the fields that say it; most often by one of them, or by none."""
        given = {name: getattr(self, name) for name in THOUGHTS}
        return {name: text for name, text in given.items() if text}


class ToolMessage(Strict):
    """What a tool returned for a call of the turn before; null where that is nothing."""

    role: Literal["tool"]
    content: Content | None
    tool_call_id: CallId
    name: Word | None = None

    @model_validator(mode="after")
    def _says_words(self) -> ToolMessage:
        if _has_images(self.content):
            raise ValueError("images stand in a user's turn")
        return self

    @property
    def text(self) -> str:
        return _joined(self.content)


def _speaker(value: Any) -> str:
    """Which kind of message it is, so that errors speak of that one."""
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return {"assistant": "assistant", "tool": "tool"}.get(str(role), "other")


AnyMessage = Annotated[
    Annotated[Message, Tag("other")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_speaker),
]


class ChatRequest(Common):
    """A conversation that the assistant is to continue."""

    messages: Annotated[
        list[AnyMessage], Field(min_length=1, max_length=2048, fail_fast=True), Few(2048)
    ]
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=CAPS.max_logprobs)
    outline: Literal["skeleton", "skeleton-graph"] | None = Field(
        None,
        description="Answer from an outline, whose points are written at once (approximate); with "
        "skeleton-graph each after those that it needs.",
    )
    outline_points: int | None = Field(None, ge=1, le=MOST_POINTS, description="Of an outline.")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = Field(None, description="`effort`: as reasoning_effort.")
    chat_template_kwargs: Variables | None = Field(
        None, description="Variables of the target's chat template, such as enable_thinking."
    )
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    audio: None = None
    verbosity: Ignored = None
    prediction: Ignored = None
    include_reasoning: Ignored = None

    @model_validator(mode="after")
    def _logprobs_fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("give either max_tokens or max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _outline_fits(self) -> ChatRequest:
        if self.outline is None:
            if self.outline_points is not None:
                raise ValueError("outline_points needs outline")
            return self
        others = {
            "tools": self.tools,
            self.form_field or "": self.form_field,
            "logprobs": self.logprobs,
            "n": self.n is not None and self.n > 1,
            "min_tokens": self.min_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "an image": self.has_images,
        }
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"{given[0]} does not go with outline: leave out one of them")
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise ValueError(f"two tools are called {twice!r}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        named = self.named_tool
        if named is not None and named not in names:
            raise ValueError(f"tool_choice names {named!r}, which is not among the tools")
        if self.min_tokens and self.must_call:
            raise ValueError("give either min_tokens or a tool_choice that must call")
        return self

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedChoice) else None

    @property
    def must_call(self) -> bool:
        return self.named_tool is not None or self.tool_choice == "required"

    @property
    def has_tools(self) -> bool:
        """Whether tools are spoken of anywhere."""
        said = (
            isinstance(m, ToolMessage) or (isinstance(m, AssistantMessage) and bool(m.tool_calls))
            for m in self.messages
        )
        return bool(self.tools) or any(said)

    @property
    def has_images(self) -> bool:
        """Whether any turn of the user holds an image."""
        return any(isinstance(m, Message) and m.has_images for m in self.messages)

    @property
    def called(self) -> Tools:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class StandsForChat(Strict, ABC):
    """A request of another API that says the same as a chat request, by which it is checked."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            self.as_chat()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(str(first["msg"]).removeprefix("Value error, ")) from None
        return self

    def as_chat(self) -> ChatRequest:
        """The chat request that says the same."""
        return ChatRequest.model_validate(self._chat_fields())

    @abstractmethod
    def _chat_fields(self) -> dict[str, Any]:
        """The fields of that request."""
