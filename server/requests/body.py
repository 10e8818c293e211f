"""Reading a request's body: bounded in size, time, depth and count, and JSON in the strict sense.

What JSON leaves open is refused here, so that nothing behind reads it in two ways: duplicate keys,
NaN and infinities, numbers that overflow, half surrogate pairs. Bodies of some size are parsed and
validated in a thread, and so that this thread never holds the interpreter for long either, they are
counted before they are parsed, lists before their items, and the first wrong item ends the work.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from specctl.server.errors import ApiError
from specctl.server.requests.unread_fields import ignored_header, take_unread

BODY_SECONDS = 30.0  # a body that takes longer is given up
MAX_DEPTH = 64  # of nested arrays and objects
MAX_KEYS = 4096  # of one object; the report on each unknown one takes time
MAX_VALUES, MAX_STRINGS, MAX_LISTS = 1 << 18, 1 << 16, 1 << 14  # of a body; lists and objects
MAX_ERRORS = 16  # looked at, of a body with more
SMALL = 16 << 10  # bytes that are read in less time than a thread takes to begin
DRAINED = 16  # bodies' worth of bytes read and dropped, so that a client hears why it was refused
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A body as it came and as its fields, and the names of those that change nothing."""

    raw: bytes
    fields: BaseModel
    unread: list[str]


class BodyReader:
    """From the bytes of a request to its checked fields; the large ones one by one, in a thread.
    `is_strict`: unknown fields are refused."""

    def __init__(self, max_body: int, is_strict: bool = False) -> None:
        self.max_body, self.is_strict = max_body, is_strict
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specctl-bodies")

    async def read(self, request: Request, model: type[BaseModel]) -> CheckedBody:
        """The body. ApiError and RequestValidationError say what is wrong with it."""
        check_content_type(request)
        body = await read_body(request, self.max_body)
        if len(body) <= SMALL:
            return checked(body, model, self.is_strict)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, checked, body, model, self.is_strict)


class StrictRoute(APIRoute):
    """A route whose body is read by the app's `BodyReader`; FastAPI gets the checked fields, and
    lets them pass as they are. What the answer did not use (`request.state.ignored`, to which the
    route's function adds) is named in its header."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            own = Request(request.scope, request.receive)
            body = await request.app.state.bodies.read(request, model)
            own._body, own._json = body.raw, body.fields
            own.state.ignored = body.unread
            response = await handle(own)
            response.headers.update(ignored_header(own.state.ignored))
            return response

        return strict


def checked(body: bytes, model: type[BaseModel], is_strict: bool = False) -> CheckedBody:
    """The fields that these bytes stand for."""
    value = parse(body)
    try:
        fields = model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        errors = [{**one, "loc": ("body", *one["loc"])} for one in found[:MAX_ERRORS]]
        raise RequestValidationError(errors, body=value) from None
    return CheckedBody(body, fields, take_unread(fields, is_strict))


def check_content_type(request: Request) -> None:
    """JSON in UTF-8, neither compressed nor something else."""
    kind, *rest = request.headers.get("content-type", "").lower().split(";")
    charsets = [word.strip() for word in rest if word.strip().startswith("charset=")]
    is_json = kind.strip() == "application/json" or (
        kind.strip().startswith("application/") and kind.strip().endswith("+json")
    )
    if not is_json or any(c.removeprefix("charset=").strip('"') != "utf-8" for c in charsets):
        given = ascii(request.headers.get("content-type", "")[:100])
        message = "the body must be sent as application/json in UTF-8, found the header "
        message += f"Content-Type {given} (curl: -H 'Content-Type: application/json')"
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")


async def read_body(request: Request, max_body: int) -> bytes:
    """The body, if it is no larger than `max_body` bytes and comes in time."""
    announced = request.headers.get("content-length", "0")
    too_large = announced.isdecimal() and int(announced[:20]) > max_body
    if too_large and "expect" in request.headers:
        raise _too_large(max_body)  # the client waits for our word before it sends
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > DRAINED * max_body:
                    break
                if size <= max_body:
                    parts.append(part)
    except TimeoutError:
        message = f"the body did not come within {BODY_SECONDS:.0f} s"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
    if too_large or size > max_body:
        raise _too_large(max_body)
    return b"".join(parts)


def _too_large(max_body: int) -> ApiError:
    message = f"the body is larger than {max_body:,} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse(body: bytes) -> Any:
    """The one value that these bytes stand for."""
    if not body:
        raise ApiError(400, "the body is empty; a JSON object was expected", code="invalid_json")
    _check_counts(body)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_number,
            parse_constant=_constant,
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid("a string holds half of a surrogate pair") from error
    except ValueError as error:
        raise _invalid(str(error).splitlines()[0][:200]) from error
    return value


def _check_counts(body: bytes) -> None:
    """Refuse what would take long to parse, and deep nesting; what stands in strings does not
    count. The first count is at least the number of strings: no string begins behind a backslash,
    though one may end there."""
    _check_most(body.count(b'"') - body.count(b'\\"'), 2 * MAX_STRINGS, "quotes")
    bare = _STRING.sub(b"", body)
    _check_most(bare.count(b","), MAX_VALUES, "values")
    _check_most(bare.count(b"[") + bare.count(b"{"), MAX_LISTS, "lists and objects")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _invalid(f"it is nested more than {MAX_DEPTH} deep")


def _check_most(found: int, most: int, what: str) -> None:
    if found > most:
        message = f"the body has {found:,} {what}; at most {most:,} are read"
        raise ApiError(400, message, code="body_too_complex")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has more than {MAX_KEYS:,} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:64]!a} occurs twice")
    return found


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:32]} is out of range")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")
