"""The requests of the API: every field with its type and range. What is not named here is refused.

Fields that OpenAI's clients send as a matter of course and that change nothing here are accepted
and not used (`Unused`); fields that would change the answer are accepted only where they ask for
nothing, and refused in words otherwise (`errors.UNSUPPORTED`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specctl.runtime.server.limits import Limits


class Few(BeforeValidator):
    """Refuses a list or an object with more than so many entries before it looks at one."""

    def __init__(self, most: int) -> None:
        def check(value: Any) -> Any:
            if isinstance(value, list | dict) and len(value) > most:
                about = {"most": most, "found": len(value)}
                raise PydanticCustomError("too_long", "at most {most} entries, not {found}", about)
            return value

        super().__init__(check)


CAPS = Limits()  # the widest that any server allows
TEXT = 1 << 20
Word = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=CAPS.max_stop_chars)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Nothing = Annotated[list[Any], Field(max_length=0), Few(0)]
TokenList = Annotated[list[Token], Field(min_length=1, max_length=TEXT, fail_fast=True)]
Unused = Annotated[Any, Field(description="Accepted and not used.")]


def _kind(value: Any) -> str:
    """Which of several types a value is meant to be, so that errors speak of that one."""
    if not isinstance(value, list):
        return "one"
    first = value[0] if value else None
    return "tokens" if isinstance(first, int) else "lists" if isinstance(first, list) else "many"


def _typed(kind: type) -> Callable[[Any], Any]:
    """Refuses what only equals the one value that is allowed, as true equals 1."""

    def check(value: Any) -> Any:
        if value is not None and type(value) is not kind:
            raise ValueError(f"not {kind.__name__}")
        return value

    return check


def _one_or_many(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


class Strict(BaseModel):
    """No guessing: a number is not a string, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """`include_usage`: one more event at the end that counts tokens."""

    include_usage: bool | None = None
    include_obfuscation: Unused = None


class JsonSchema(Strict):
    """A JSON schema with the name that OpenAI's API gives it."""

    name: Word
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexGrammar(Strict):
    """Text that a regular expression describes from its first to its last character."""

    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=1 << 16)]


class LarkGrammar(Strict):
    """Text of a context-free grammar in llguidance's dialect of Lark."""

    type: Literal["lark"]
    grammar: Annotated[str, Field(min_length=1, max_length=1 << 16)]


class SchemaGrammar(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
Grammar = Annotated[RegexGrammar | LarkGrammar | SchemaGrammar, Field(discriminator="type")]


class Common(Strict):
    """What both kinds of requests share; null is the same as leaving a field out."""

    model: Word | None = None
    n: int | None = Field(None, ge=1, le=CAPS.max_n)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024), Few(1024)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: (
        Annotated[
            Annotated[Stop, Tag("one")]
            | Annotated[
                list[Stop], Field(max_length=CAPS.max_stop), Few(CAPS.max_stop), Tag("many")
            ],
            Discriminator(_one_or_many),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | None = None
    prompt_cache_key: Word | None = Field(
        None, description="Names a conversation: its requests reuse what was read before."
    )
    specctl: bool | None = Field(
        None, description="Say with every piece of text which tokens were drafted and accepted."
    )
    user: Unused = None
    safety_identifier: Unused = None
    prompt_cache_retention: Unused = None
    store: Unused = None
    metadata: Unused = None
    service_tier: Unused = None

    @model_validator(mode="after")
    def _fits_together(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.grammar is not None and self.response_format is not None:
            raise ValueError("give either response_format or grammar")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

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
    echo: Annotated[Literal[False], BeforeValidator(_typed(bool))] | None = None
    suffix: Literal[""] | None = None
    best_of: Annotated[Literal[1], BeforeValidator(_typed(int))] | None = None


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn. An assistant's turn may be sent back as it was got, empty fields included."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("one")]
        | Annotated[
            list[TextPart],
            Field(min_length=1, max_length=1024, fail_fast=True),
            Few(1024),
            Tag("many"),
        ],
        Discriminator(_one_or_many),
    ]
    name: Word | None = None
    refusal: Unused = None
    annotations: Unused = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatRequest(Common):
    """A conversation that the assistant is to continue."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=2048, fail_fast=True), Few(2048)
    ]
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=CAPS.max_logprobs)
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Unused = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    audio: None = None

    @model_validator(mode="after")
    def _logprobs_fit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("give either max_tokens or max_completion_tokens")
        return self
