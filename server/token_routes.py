"""/tokenize and /detokenize, as vLLM has them: what the target makes of a text, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import ConfigDict, Field, JsonValue, model_validator

from specctl.server.errors import ApiError, ErrorBody
from specctl.server.requests.fields import TEXT, Few, Strict, Text, Token, Word
from specctl.server.requests.generate_request import RequestReader
from specctl.server.requests.protocol import AnyMessage, ChatRequest, Variables
from specctl.server.requests.tool_fields import Tools

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 503)
}


_HAS_PROMPT: JsonValue = {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
_HAS_MESSAGES: JsonValue = {"required": ["messages"], "properties": {"messages": {"type": "array"}}}


class TokenizeRequest(Strict):
    """A text, or a conversation as the chat template writes it."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_HAS_PROMPT, _HAS_MESSAGES]})

    model: Word | None = None
    prompt: Text | None = None
    messages: (
        Annotated[list[AnyMessage], Field(min_length=1, max_length=2048, fail_fast=True), Few(2048)]
        | None
    ) = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeAnswer(Strict):
    """Token ids, and how many a request may have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: Word | None = None
    tokens: Annotated[list[Token], Field(max_length=TEXT, fail_fast=True)]


class DetokenizeAnswer(Strict):
    """Their text, control tokens included."""

    prompt: str


def token_routes(
    app: FastAPI, desk: RequestReader, check_model: Callable[[str | None], None]
) -> None:
    """Add both to an app; the work is done in the thread that has the tokenizer."""

    @app.post("/tokenize", responses=REFUSALS)
    async def tokenize(body: TokenizeRequest) -> TokenizeAnswer:
        """The tokens of a text or of a conversation."""
        check_model(body.model)
        return await desk.in_thread(_tokenized, desk, body)

    @app.post("/detokenize", responses=REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> DetokenizeAnswer:
        """The text of tokens."""
        check_model(body.model)
        return await desk.in_thread(_detokenized, desk, body.tokens)


def _tokenized(desk: RequestReader, body: TokenizeRequest) -> TokenizeAnswer:
    tokens = _tokens(desk, body)
    tokenizer, context = desk.service.target.tokenizer, desk.service.status().context
    names = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return TokenizeAnswer(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=names)


def _tokens(desk: RequestReader, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        fields = ("messages", "tools", "chat_template_kwargs")
        chat = ChatRequest.model_construct(
            **{name: getattr(body, name) for name in fields}, _fields_set=set(fields)
        )
        return list(desk.prompts(chat).tokens[0])
    assert body.prompt is not None, "one of the two is given"
    desk.check_room(body.prompt, "prompt")
    special = body.add_special_tokens is not False
    target = desk.service.target
    return [int(i) for i in target.tokenizer.encode(body.prompt, add_special_tokens=special)]


def _detokenized(desk: RequestReader, tokens: list[int]) -> DetokenizeAnswer:
    target = desk.service.target
    size = target.spec.vocab_size
    if tokens and max(tokens) >= size:
        message = f"tokens: token ids are below {size:,}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    text = target.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return DetokenizeAnswer(prompt=str(text))
