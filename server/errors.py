"""Every error leaves in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; those of
Anthropic's API in theirs: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from specctl.core.errors import NumbersError, SpecctlError, alike
from specctl.server.docs_page import DOCS
from specctl.server.engine_thread.contract import Busy, TooLong, Unavailable

Path = tuple[int | str, ...]  # keys and places that lead through a body
TOO_SHORT = re.compile(r"List should have (at least \d+ items?) after validation, not (\d+)")
RETRY_SECONDS = 5  # sent with a 503: the server loads, or another one takes over
TOO_LONG = "context_length_exceeded"
MESSAGES, MODELS, CHAT = "/v1/messages", "/v1/models", "/v1/chat/completions"
VERSION = "anthropic-version"  # a header that clients of Anthropic's API always send
MESSAGES_KINDS = {"server_error": "api_error"}  # Anthropic's words where they are others
MESSAGES_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
UNSUPPORTED = {
    "echo": "echo is not supported: the prompt's own log-probabilities are not computed",
    "suffix": "suffix is not supported: the target continues a prompt, it does not fill a gap",
    "use_beam_search": "use_beam_search is not supported: beams are not samples of the target; "
    "leave it out",
    "truncate_prompt_tokens": "truncate_prompt_tokens is not supported: a prompt that does not fit "
    "is refused, never cut",
    "add_generation_prompt": "add_generation_prompt is not supported: the template always opens "
    "the answer; leave it out",
    "continue_final_message": "continue_final_message is not supported: the template always opens "
    "a new answer; leave it out",
    "chat_template": "chat_template is not supported: the target's own writes the conversation; "
    "chat_template_kwargs sets its variables",
    "documents": "documents are not supported: put their text into a message",
    "allowed_token_ids": "allowed_token_ids is not supported: ask for a grammar",
    "bad_words": "bad_words are not supported: ban tokens with logit_bias",
    "logits_processors": "logits_processors are not supported",
    "prompt_embeds": "prompt_embeds are not supported: send text or token ids",
    "prompt_logprobs": "prompt_logprobs is not supported: the prompt's own log-probabilities are "
    "not computed",
    "best_of": "best_of is not supported: ask for n choices and choose among them",
    "functions": "functions are not supported: send them as tools",
    "function_call": "functions are not supported: send tools and tool_choice",
    "store": "store is not supported: no response is kept; send store: false",
    "previous_response_id": "previous_response_id is not supported: no response is kept; send the "
    "whole conversation as input",
    "conversation": "conversation is not supported: none is kept; send all of it as input",
    "background": "background is not supported: an answer ends with its connection",
    "truncation": "truncation is not supported: an input that does not fit is refused, never cut",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "container": "containers are not supported: this server runs no code",
    "thread": "threads are not supported: no conversation is kept; send all of it as messages",
    "outline": "outline is not supported so: it is skeleton or skeleton-graph, beside messages of "
    "/v1/chat/completions",
    "mcp_servers": "mcp_servers are not supported: connect them on your side and send their tools",
}


def is_for_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API: by its route, or, of /v1/models, which both APIs
    have, by the header that their clients always send."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(MODELS + "/"):
        return VERSION in Headers(scope=scope)
    return path == MESSAGES or path.startswith(MESSAGES + "/")


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every answer of /v1/messages that is no success."""

    type: Literal["error"]
    error: MessagesErrorDetail


class ApiError(HTTPException):
    """An answer that is no success. The kind follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        kinds = {403: "permission_error", 429: "rate_limit_error"}
        other = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = kinds.get(self.status_code, other)
        about = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.detail, **about}}

    def messages_body(self) -> dict[str, Any]:
        """In the shape of Anthropic's Messages API."""
        about = self.body()["error"]
        kind = MESSAGES_KINDS.get(about["type"], about["type"])
        kind = MESSAGES_STATUS.get(self.status_code, kind)
        message = about["message"]
        if self.code == TOO_LONG:
            message = f"prompt is too long: {message}"  # by these words agents know it
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, scope: Scope) -> JSONResponse:
        """In the shape that the client of that request reads."""
        body = self.messages_body() if is_for_anthropic(scope) else self.body()
        return JSONResponse(body, self.status_code, self.headers)


def api_error(error: SpecctlError) -> ApiError:
    """What a refusal of the service means to an HTTP client."""
    parts = [f"found: {error.found}", f"expected: {error.expected}", f"do: {error.do}"]
    message = "; ".join([error.what, *(part for part in parts if not part.endswith(": "))])
    if isinstance(error, Busy):
        later = {"Retry-After": str(error.retry_after)}
        return ApiError(429, message, code="server_busy", headers=later)
    if isinstance(error, Unavailable):
        later = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(503, message, code=error.state, headers=later)
    if isinstance(error, NumbersError):
        return ApiError(500, message, code="target_not_finite")
    code = TOO_LONG if isinstance(error, TooLong) else None
    return ApiError(400, message, code=code)


def broken() -> ApiError:
    """A fault of ours; the log says which, under the request's id."""
    return ApiError(500, "the server failed on this request", code="internal_error")


def outgrown() -> ApiError:
    """An answer broke off inside its form. What was streamed of it is not of that form."""
    message = "the answer broke off: its grammar could not be followed within the server's limits"
    do = "make the grammar smaller: fewer optional properties, less repetition, less ambiguity"
    return ApiError(400, f"{message}; do: {do}", code="grammar_exceeded")


def install(app: FastAPI) -> None:
    """Answer every error of `app` in that shape."""

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response(request.scope)
        what = f"{request.method} {request.url.path[:200]}"
        allowed = (error.headers or {}).get("Allow", "")
        if error.status_code == 404:
            what += f"; {_route_instead(request)}"
        found = {404: f"there is no {what}", 405: f"this route does not answer {what}"}
        found[405] += f", but {allowed}" if allowed else ""
        message = found.get(error.status_code, str(error.detail))
        answer = ApiError(error.status_code, message, headers=error.headers)
        if error.status_code == 404 and VERSION in request.headers:  # a client of Anthropic's
            return JSONResponse(answer.messages_body(), 404, answer.headers)
        return answer.response(request.scope)

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return invalid_field(error.errors(), error.body).response(request.scope)

    def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, SpecctlError)
        return api_error(error).response(request.scope)

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(SpecctlError, refused)


def _route_instead(request: Request) -> str:
    """What to request where there is no such route: one that is spelled alike, or the usual ones
    and where all are listed."""
    paths = [str(getattr(route, "path", "")) for route in request.app.routes]
    known = [path for path in paths if path.startswith("/v1/") and "{" not in path]
    path = request.url.path[:200]
    whole = path if path.startswith("/v1") else f"/v1{path}"
    close = [whole] if whole in known else alike(whole, known, cutoff=0.75)
    if close:
        return f"did you mean {close[0]}?"
    return f"a chat is posted to {CHAT}, and {DOCS} lists every route"


def invalid_field(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """What is wrong with a request, naming its field: of several errors (a field may be one type or
    another) the one that follows the body deepest."""
    first = max(errors, key=lambda error: len(_path(error, body)))
    path, message = _path(first, body), _said(first)
    where, names = written_path(path), [part for part in path if isinstance(part, str)]
    if not path:
        text = message if first["type"] == "value_error" else "the body must be a JSON object"
        return ApiError(400, text, code="invalid_value")
    unsupported = UNSUPPORTED.get(names[-1]) if names else None
    if unsupported is not None:
        return ApiError(400, unsupported, param=where, code="unsupported_parameter")
    return ApiError(400, f"{where}: {message}", param=where, code="invalid_value")


def _said(error: Mapping[str, Any]) -> str:
    """What pydantic says of a value, in words for those who do not know pydantic."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return "this field is required"
    if (short := TOO_SHORT.match(message)) is not None:
        return f"{short[1]} needed, found {short[2]}"
    return message


def unknown_field(path: Path, known: Sequence[str]) -> ApiError:
    """A field that the object at its place does not have; `known`: those that it may have."""
    where = written_path(path)
    close = "".join(f"; did you mean {name!r}?" for name in alike(str(path[-1]), known))
    return ApiError(400, f"unknown field {where!r}{close}", param=where, code="unknown_parameter")


def _path(error: Mapping[str, Any], body: Any) -> Path:
    """Where an error is: the keys that lead through the body, the names of alternative types left
    out; of a parameter of the address, its name."""
    if error["loc"][0] == "query":
        return (str(error["loc"][-1]),)
    path: list[int | str] = []
    location = error["loc"][1:]
    for at, part in enumerate(location, start=1):
        is_missing = error["type"] == "missing" and at == len(location)
        if isinstance(body, Mapping) and (part in body or is_missing):
            path.append(part)
            body = body.get(part)
        elif isinstance(part, int) and isinstance(body, list) and part < len(body):
            path.append(part)
            body = body[part]
    return tuple(path)


def written_path(path: Path) -> str:
    """`messages[0].content`, cut where a client sends endless names."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in path)
    return text.removeprefix(".")[:200]
