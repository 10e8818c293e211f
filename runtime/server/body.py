"""Reading a request's body: bounded in size, time and depth, and JSON in the strict sense.

What JSON leaves open is refused here, so that nothing behind reads it in two ways: duplicate keys,
NaN and infinities, numbers that overflow, half surrogate pairs.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from specctl.runtime.server.errors import ApiError

BODY_SECONDS = 30.0  # a body that takes longer is given up
MAX_DEPTH = 64  # of nested arrays and objects
MAX_KEYS = 4096  # of one object; what is told about each unknown one takes time
DRAINED = 16  # bodies' worth of bytes read and dropped, so that a client hears why it was refused
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class StrictRequest(Request):
    """A request whose JSON was read by `load`."""

    async def load(self, max_body: int) -> None:
        """Read and parse; ApiError says what is wrong with it."""
        check_content_type(self)
        self._body = await read_body(self, max_body)
        self._json = parse(self._body)


class StrictRoute(APIRoute):
    """A route whose body is read by us, before it is validated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def strict(request: Request) -> Response:
            own = StrictRequest(request.scope, request.receive)
            await own.load(request.app.state.limits.max_body)
            return await handle(own)

        return strict


def check_content_type(request: Request) -> None:
    """JSON in UTF-8, neither compressed nor something else."""
    kind, *rest = request.headers.get("content-type", "").lower().split(";")
    charsets = [word.strip() for word in rest if word.strip().startswith("charset=")]
    is_json = kind.strip() == "application/json" or (
        kind.strip().startswith("application/") and kind.strip().endswith("+json")
    )
    if not is_json or any(c.removeprefix("charset=").strip('"') != "utf-8" for c in charsets):
        raise ApiError(
            415, "the body must be sent as application/json in UTF-8", code="unsupported_media_type"
        )
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
    _check_depth(body)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_number,
            parse_constant=_constant,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid("a string holds half of a surrogate pair") from error
    except ValueError as error:
        raise _invalid(str(error).splitlines()[0][:200]) from error
    return value


def _check_depth(body: bytes) -> None:
    """Refuse deep nesting before it is parsed; brackets in strings do not count."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", body)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _invalid(f"it is nested more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has more than {MAX_KEYS:,} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
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
