"""A client without manners or library: bytes go to the server, what comes back is taken apart.

It sends what no HTTP library would, leaves whenever it likes, and tells an answer that broke off
from a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as it came over the wire. `status` 0: none came. `is_whole`: it did not break off.
    Times in seconds since the request was begun."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool
    first_seconds: float = 0.0
    seconds: float = 0.0

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of server-sent events, [DONE] as a string."""
        blocks = [block for block in self.body.split(b"\n\n") if block]
        found = [block.removeprefix(b"data: ") for block in blocks]
        return ["[DONE]" if one == b"[DONE]" else json.loads(one) for one in found]

    def fault(self) -> str | None:
        """What is wrong with an answer that is no success, or of which kind it must not be."""
        if not self.is_whole:
            return f"it broke off: {self.status} {self.body[:200]!r}"
        if self.status >= 500:
            return f"status {self.status}: {self.body[:200]!r}"
        return error_fault(self.body) if self.status >= 400 else None


def error_fault(body: bytes, path: str = "") -> str | None:
    """What keeps a body from being an error in OpenAI's shape; of an answer to /v1/messages, in
    Anthropic's."""
    try:
        told = json.loads(body)
    except ValueError:
        return f"the error is not JSON: {body[:200]!r}"
    if is_of_messages(path):
        is_known = _is_messages_error(json.loads(body))
        return None if is_known else f"the error has another shape: {body[:200]!r}"
    error = told.get("error") if isinstance(told, dict) and len(told) == 1 else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"the error has another shape: {body[:200]!r}"
    kinds = {"message": (str,), "type": (str,), "param": (str, type(None))}
    if not all(isinstance(error[name], kind) for name, kind in kinds.items()):
        return f"the error has fields of other types: {body[:200]!r}"
    return None if error["message"] else "the error has no message"


def is_of_messages(path: str) -> bool:
    """Whether a path, as the server decodes it, is of Anthropic's API."""
    plain = unquote(path.partition("?")[0])  # a fragment would be part of it
    return plain == "/v1/messages" or plain.startswith("/v1/messages/")


def _is_messages_error(found: Any) -> bool:
    if not isinstance(found, dict) or set(found) != {"type", "error"} or found["type"] != "error":
        return False
    error = found["error"]
    if not isinstance(error, dict) or set(error) != {"type", "message"}:
        return False
    return all(isinstance(text, str) and text for text in error.values())


def request_bytes(
    path: str, body: Any = None, *, key: str | None = None, headers: tuple[str, ...] = ()
) -> bytes:
    """A request, GET without a body and POST with one (JSON, or bytes as they are)."""
    content = body if isinstance(body, bytes) else b"" if body is None else _json(body)
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    named = {line.partition(":")[0].lower() for line in headers}
    if body is not None and "content-type" not in named:
        lines.append("Content-Type: application/json")
    if body is not None and not named & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(content)}")
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if "connection" not in named:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def parsed(raw: bytes, is_closed: bool = True) -> Heard:
    """What these bytes say. `is_closed`: the server hung up behind them."""
    head, found, rest = raw.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")
    if not found or not words[0].startswith(b"HTTP/1."):
        return Heard(0, {}, raw, False)
    status = int(words[0].split()[1])
    if status == 100:
        return parsed(rest, is_closed)
    pairs = [word.decode("latin-1").partition(":") for word in words[1:]]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        return Heard(status, headers, *_dechunked(rest))
    if "content-length" in headers:
        length = int(headers["content-length"])
        return Heard(status, headers, rest[:length], len(rest) >= length)
    return Heard(status, headers, rest, is_closed)


def _dechunked(raw: bytes) -> tuple[bytes, bool]:
    """The bytes of all chunks, and whether the last one came."""
    parts: list[bytes] = []
    while raw:
        word, found, raw = raw.partition(b"\r\n")
        if not found:
            break
        size = int(word, 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(raw[:size])
        raw = raw[size + 2 :]
    return b"".join(parts), False


async def heard(
    url: str, data: bytes, *, seconds: float = LIMIT_SECONDS, is_ended: bool = False
) -> Heard:
    """What comes back for these bytes until the server hangs up. `is_ended`: the client says that
    nothing follows them. A server that says nothing for so long is given up: status 0."""
    began, found, first = time.monotonic(), bytearray(), 0.0
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 22)
    is_closed = False
    try:
        async with asyncio.timeout(seconds):
            sending = asyncio.create_task(_send(writer, data, is_ended))
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(1 << 20):
                    first = first or time.monotonic() - began
                    found += part
            is_closed = True
            sending.cancel()
    except TimeoutError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1.0)
    one = parsed(bytes(found), is_closed)
    total, is_whole = time.monotonic() - began, one.is_whole or data.startswith(b"HEAD ")
    return Heard(one.status, one.headers, one.body, is_whole and is_closed, first, total)


async def _send(writer: asyncio.StreamWriter, data: bytes, is_ended: bool) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        if is_ended:
            writer.write_eof()


def hear(url: str, path: str, body: Any = None, **how: Any) -> Heard:
    """The answer to one request, in a loop of its own."""
    timed = {"seconds": how.pop("seconds", LIMIT_SECONDS)}
    return asyncio.run(heard(url, request_bytes(path, body, **how), **timed))


async def hear_all(url: str, asked: list[bytes], at_once: int) -> list[Heard]:
    """The answers to many requests, so many of them on their way at any time."""
    turn = asyncio.Semaphore(at_once)

    async def one(data: bytes) -> Heard:
        async with turn:
            return await heard(url, data)

    return list(await asyncio.gather(*map(one, asked)))
