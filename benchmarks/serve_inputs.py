"""Inputs that no client should send: bytes that are no HTTP, bodies that are no JSON or too much
of it, clients that dribble."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from serve_common import CHAT, TEXT
from serve_wire import request_bytes

GIVE_UP_SECONDS = 45.0  # longer than any head or body may take
Make = Callable[[random.Random], bytes]
REFUSED = (400, 413, 415, 431)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input. `statuses`: what it may be answered with, () for anything but 5xx.
    `is_ended`: the client hangs up behind it; `may_be_silent`: no answer is right, too."""

    name: str
    make: Make
    statuses: tuple[int, ...] = REFUSED
    is_ended: bool = False
    may_be_silent: bool = False


def _post(content: bytes, *headers: str, path: str = TEXT) -> bytes:
    return request_bytes(path, content, headers=headers)


def _text(rng: random.Random, length: int) -> str:
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x20000)))) for _ in range(length)
    )


def _valid(rng: random.Random) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    return {**rng.choice((chat, {"prompt": "x"})), "max_tokens": rng.randint(1, 4)}


def _broken(rng: random.Random) -> bytes:
    """A valid body that was cut, or changed in a byte."""
    body = bytearray(json.dumps(_valid(rng)).encode())
    if rng.random() < 0.5:
        return bytes(body[: rng.randrange(1, len(body))])
    body[rng.randrange(len(body))] = rng.randrange(128, 256)
    return bytes(body)


def _changed(rng: random.Random) -> bytes:
    """A valid body with a field of another type or size."""
    body = _valid(rng)
    names = (
        "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs",
        "logit_bias", "stream", "stream_options", "grammar", "response_format", "messages",
        "prompt", "model", "frequency_penalty", "repetition_penalty", "prompt_cache_key", "user",
    )  # fmt: skip
    values: Sequence[Any] = (
        None, True, 0, -1, 1, 8, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.0, 5e-324, 1e308, "", "x",
        "\x00", "\u2028", "9" * 300, [], [[]], [0], [[0]], [None], ["", ""], {}, {"": {}}, {"0": 1},
        {"type": "regex", "pattern": "("}, {"type": "text"}, {"type": "json_object"},
        {"type": "regex", "pattern": "(a|a)*" * rng.randint(1, 40)},
        {"type": "json_schema", "schema": {"$ref": "#"}},
        {"type": "lark", "grammar": "start: start"},
    )  # fmt: skip
    for name in rng.sample(names, rng.randint(1, 4)):
        body[name] = rng.choice(values)
    return _post(json.dumps(body).encode(), path=rng.choice((TEXT, CHAT)))


def _grammar(rng: random.Random) -> bytes:
    """Grammars that have killed engines: deep groups, quantifiers on nothing, endless rules."""
    size = rng.choice((1, 100, 1000, 20_000))
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(20):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    patterns = ("(" * size, "(" * size + ")" * size, "*", "a{100000}{100000}", "[z-a]", "\\")
    regexes = [{"type": "regex", "pattern": pattern} for pattern in patterns]
    others = [
        {"type": "lark", "grammar": "start: " + '"a" ' * size},
        {"type": "lark", "grammar": "start: start start"},
        {"type": "json_schema", "schema": deep},
        {"type": "json_schema", "schema": {"type": "no such type"}},
        {"type": "json_schema", "schema": {"enum": list(range(size))}},
        {"type": "json_schema", "schema": {"minItems": 10**9, "type": "array"}},
    ]
    body = {"prompt": "x", "max_tokens": 2, "grammar": rng.choice([*regexes, *others])}
    return _post(json.dumps(body).encode())


def _garbage(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            rng.randbytes(rng.randrange(1, 4000)) + b"\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
            b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\r\n" * rng.randrange(1, 2000),
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n",
        )
    )


def _head(rng: random.Random) -> bytes:
    """Endless headers, or a very long address."""
    many = tuple(f"X-{i}: {'v' * rng.randrange(100)}" for i in range(rng.randrange(1000, 2000)))
    one = f"X-Long: {'v' * (70 << 10)}"
    return rng.choice(
        (
            request_bytes("/health", headers=many),
            request_bytes("/health", headers=(one,)),
            request_bytes("/" + "a" * (70 << 10)),
        )
    )


def _address(rng: random.Random) -> bytes:
    words = ("..", "%2e%2e", "%00", "%ff", "v1", "models", "page", "\\", "%", "%zz", "//", "etc")
    path = "/" + "/".join(rng.choices(words, k=rng.randint(1, 6)))
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW", "HEAD"))
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


def _chunks(rng: random.Random) -> bytes:
    bad = (
        b"zz\r\nxx\r\n",
        b"-1\r\n\r\n",
        b"fffffffffffffffffffff\r\nx",
        b"1\r\nxxxxx\r\n0\r\n\r\n",
        b"0" * 70_000,
    )
    return _post(rng.choice(bad), "Transfer-Encoding: chunked")


def _twice(rng: random.Random) -> bytes:
    key = rng.choice(("prompt", "max_tokens", "model", "\\u0070rompt"))
    return _post(b'{"prompt": "x", "model": null, "max_tokens": 1, "%s": null}' % key.encode())


def _number(rng: random.Random) -> bytes:
    word = rng.choice((b"NaN", b"Infinity", b"-Infinity", b"1e309", b"-1e999", b"9" * 5000))
    return _post(b'{"prompt": "x", "max_tokens": 1, "temperature": %s}' % word)


def _many(rng: random.Random) -> bytes:
    """Within the body's bound, and yet a lot."""
    big: Sequence[Any] = (
        {f"k{i}": 0 for i in range(60_000)},
        {"prompt": [[1]] * 100_000},
        {"prompt": "x", "stop": ["x" * 256] * 3000},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(50_000)}},
        {"messages": [{"role": "user", "content": ""}] * 20_000},
        {"prompt": "x" * 1_000_000},
        {"prompt": [7] * 300_000},
    )
    body = json.dumps(rng.choice(big), separators=(",", ":")).encode()
    return _post(body, path=rng.choice((TEXT, CHAT)))


def _smuggled(rng: random.Random) -> bytes:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    lengths = rng.choice(
        (
            ("Content-Length: 4", "Content-Length: 40"),
            ("Content-Length: -1",),
            ("Content-Length: 4x",),
            ("Content-Length: 4", "Transfer-Encoding: chunked"),
        )
    )
    return _post(b"0\r\n\r\n" + inner, *lengths)


def _pipelined(rng: random.Random) -> bytes:
    one = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    return one * rng.randint(2, 50) + request_bytes("/ready")


def _encoded(rng: random.Random) -> bytes:
    body = json.dumps(_valid(rng))
    return rng.choice(
        (
            _post(gzip.compress(body.encode()), "Content-Encoding: gzip"),
            _post(body.encode("utf-16"), "Content-Type: application/json; charset=utf-16"),
            _post(body.encode("utf-16")),
            _post(b"\xef\xbb\xbf" + body.encode()),
            _post(body.encode(), "Content-Type: text/plain"),
            _post(body.encode(), "Content-Type: application/x-www-form-urlencoded"),
            _post(body.encode(), "Content-Type: \xff"),
        )
    )


def _value(rng: random.Random) -> bytes:
    return _post(rng.choice((b"", b"null", b"[]", b"3", b'"x"', b"{}", b"true", b" ", b"{}{}")))


def _surrogate(rng: random.Random) -> bytes:
    half = rng.choice((b"\\ud800", b"\\udfff", b"\\ud83dx", b"\\udc00\\ud800"))
    return _post(b'{"prompt": "%s", "max_tokens": 1}' % half)


INPUTS = (
    Kind("JSON cut or with a byte that is no UTF-8", lambda rng: _post(_broken(rng))),
    Kind("half of a surrogate pair", _surrogate),
    Kind("fewer bytes than announced",
         lambda rng: _post(b'{"prompt": "x"', f"Content-Length: {rng.randrange(15, 10**12)}"),
         is_ended=True, may_be_silent=True),
    Kind("more bytes than announced",
         lambda rng: _post(b'{"prompt": "x"}', f"Content-Length: {rng.randrange(14)}")),
    Kind("nesting a million deep",
         lambda rng: _post(rng.choice((b"[", b'{"a":', b"[{")) * (1_000_000 // 6) + b"1")),
    Kind("a million brackets", lambda rng: _post(rng.choice((b"[", b"{", b"[]")) * 500_000)),
    Kind("a key twice", _twice),
    Kind("numbers that are none", _number),
    Kind("another encoding or type", _encoded),
    Kind("no object", _value),
    Kind("a lot of everything", _many),
    Kind("fields changed", _changed, ()),
    Kind("grammars that kill", _grammar, ()),
    Kind("bytes that are no HTTP", _garbage, (400, 403, 404, 405), True, True),
    Kind("an endless head", _head, (), may_be_silent=True),
    Kind("strange addresses and methods", _address, (), may_be_silent=True),
    Kind("bad chunks", _chunks, (), True, True),
    Kind("two lengths", _smuggled, (400, 413)),
    Kind("requests in one packet", _pipelined, (200,)),
    Kind("a body of 10 MiB", lambda rng: _post(b'{"prompt": "' + b"x" * (10 << 20)), (413,)),
)  # fmt: skip


async def drip(url: str, at: int) -> str | None:
    """A client that sends a byte now and then, of a head or of a body. It must be hung up on."""
    place, began = urlsplit(url), time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    data = head + (b"X-Slow: " if at % 2 else b"Content-Length: 100000\r\n\r\n")
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    reading = asyncio.create_task(reader.read())
    try:
        writer.write(data)
        while not reading.done() and time.monotonic() - began < GIVE_UP_SECONDS:
            writer.write(b" ")
            await asyncio.wait({reading}, timeout=0.25)
        return None if reading.done() else f"held for {GIVE_UP_SECONDS:.0f} s"
    finally:
        reading.cancel()
        writer.close()
