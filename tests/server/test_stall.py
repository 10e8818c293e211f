"""No body of 1 MiB stalls the server: the event loop goes on, whatever the body is made of.

Measured over a real socket, by the CPU time that this process spends between two turns of the
server's loop: a loaded machine makes turns late, not dear. A thread that keeps the interpreter to
itself is found as well as a callback that takes long.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from specctl_testing.runtime.serving import StubService, stub_target, target_around
from specctl_testing.runtime.web import Running, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
BLOCKED = 0.1  # CPU seconds; 0.01 to 0.05 were seen, and 0.13 to 2.8 before bodies were counted
SPOKEN = b'{"messages":[{"role":"user","content":'
SCHEMA = b'{"prompt":"x","grammar":{"type":"json_schema","schema":{'


def filled(head: bytes, item: bytes, tail: bytes, most: int = MIB) -> bytes:
    """As many items as fit into 1 MiB."""
    count = min(most, (MIB - len(head) - len(tail) + 1) // (len(item) + 1))
    return head + b",".join([item] * count) + tail


def named(head: bytes, item: bytes, tail: bytes, most: int = MIB) -> bytes:
    """The same with a number in every item."""
    count = min(most, (MIB - len(head) - len(tail)) // (len(item) + 6))
    return head + b",".join(item % at for at in range(count)) + tail


def chunked(body: bytes, size: int) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


BODIES = {
    "bad ids": (TEXT, filled(b'{"prompt":[', b"-1", b"]}")),
    "as many bad ids as are read": (TEXT, filled(b'{"prompt":[', b"-1", b"]}", 262_000)),
    "a bad id behind good ones": (TEXT, filled(b'{"prompt":[', b"7", b",-1]}", 262_000)),
    "ids": (TEXT, filled(b'{"prompt":[', b"700", b"]}", 262_000)),
    "ids that are fractions": (TEXT, filled(b'{"prompt":[7,', b"1.5", b"]}")),
    "ids that are texts": (TEXT, filled(b'{"prompt":[7,', b'"x"', b"]}")),
    "lists of bad ids": (
        TEXT,
        filled(b'{"prompt":[', b"[" + b",".join([b"-1"] * 32_000) + b"]", b"]}"),
    ),
    "lists": (TEXT, filled(b'{"prompt":[', b"[]", b"]}")),
    "as many lists as are read": (TEXT, filled(b'{"prompt":[', b"[]", b"]}", 16_000)),
    "nested lists": (TEXT, filled(b'{"prompt":[', b"[" * 60 + b"]" * 60, b"]}")),
    "depth": (TEXT, b'{"prompt":' + b"[" * 520_000 + b"]" * 520_000 + b"}"),
    "objects": (TEXT, filled(b'{"prompt":[', b"{}", b"]}")),
    "objects that nobody uses": (TEXT, filled(b'{"prompt":"x","metadata":[', b'{"a":0}', b"]}")),
    "texts that nobody uses": (
        TEXT,
        filled(b'{"prompt":"x","metadata":[', b'"abcdefgh"', b"]}", 65_000),
    ),
    "messages": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":""}', b"]}")),
    "messages that are none": (CHAT, filled(b'{"messages":[', b"{}", b"]}")),
    "parts": (CHAT, filled(SPOKEN + b"[", b'{"type":"text","text":""}', b"]}]}")),
    "keys": (TEXT, named(b'{"prompt":"x",', b'"k%d":0', b"}", 4_000)),
    "keys of messages": (
        CHAT,
        filled(b'{"messages":[', named(b"{", b'"k%d":0', b"}", 3_000), b"]}", 16),
    ),
    "stop strings": (TEXT, filled(b'{"prompt":"x","stop":[', b'""', b"]}")),
    "biases": (TEXT, named(b'{"prompt":"x","logit_bias":{', b'"%d":0', b"}}")),
    "as many biases as are read": (
        TEXT,
        named(b'{"prompt":"x","logit_bias":{', b'"%d":0', b"}}", 4_000),
    ),
    "a schema": (TEXT, filled(SCHEMA + b'"allOf":[', b"{}", b"]}}}")),
    "as large a schema as is read": (TEXT, filled(SCHEMA + b'"allOf":[', b"{}", b"]}}}", 16_000)),
    "a wide schema": (TEXT, named(SCHEMA + b'"enum":[', b'"%d"', b"]}}}", 60_000)),
    "a grammar of brackets": (
        TEXT,
        b'{"prompt":"x","grammar":{"type":"lark","grammar":"' + b"()" * 32_000 + b'"}}',
    ),
    "a text": (TEXT, b'{"prompt":"' + b"the end " * 130_000 + b'"}'),
    "a word": (TEXT, b'{"prompt":"' + b"x" * 1_000_000 + b'"}'),
    "escapes": (TEXT, b'{"prompt":"' + b'\\"' * 500_000 + b'"}'),
    "half characters": (TEXT, b'{"prompt":"' + b"\\ud800" * 170_000 + b'"}'),
    "control tokens": (CHAT, SPOKEN + b'"' + b"<|end|>" * 20_000 + b'"}]}'),
    "what is no JSON": (TEXT, b"x" * 1_000_000),
}


class Pulse:
    """The most CPU time of this process between two turns of an event loop."""

    def __init__(self) -> None:
        self.worst, self._last = 0.0, time.process_time()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.worst, self._last = max(self.worst, now - self._last), now


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Running, Pulse]]:
    """A server with room for every text that fits into a body, so that all of it is read."""
    target = target_around(stub_target().tokenizer, 1 << 20)
    gc.collect()
    gc.freeze()  # as a server does that is alone in its process
    with running(StubService(target=target)) as found:
        pulse = Pulse()
        assert found.listener._loop is not None
        beating = asyncio.run_coroutine_threadsafe(pulse.beat(), found.listener._loop)
        answered(found, TEXT, b'{"prompt": "x", "grammar": {"type": "regex", "pattern": "a"}}')
        yield found, pulse
        beating.cancel()


def answered(server: Running, path: str, body: bytes, coding: str | None = None) -> int:
    """The status of a POST, or of a GET where there is no body."""
    head = (
        f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    )
    size = f"Content-Length: {len(body)}" if coding is None else f"Transfer-Encoding: {coding}"
    head += f"Content-Type: application/json\r\n{size}\r\n\r\n"
    with server.connect() as connection:
        connection.settimeout(60)
        connection.sendall(head.encode())
        connection.sendall(body)
        answer = b""
        while data := connection.recv(65_536):
            answer += data
    return int(answer[9:12])


@pytest.mark.parametrize("name", BODIES)
def test_health_is_answered_beside_any_body(server: tuple[Running, Pulse], name: str) -> None:
    found, pulse = server
    path, body = BODIES[name]
    assert len(body) <= MIB
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(answered(found, path, body)))
    pulse.worst = 0.0
    asking.start()
    while asking.is_alive():
        assert answered(found, "/health", b"") == 200
        time.sleep(0.01)
    asking.join()
    assert statuses[0] in (200, 400)
    assert pulse.worst < BLOCKED


@pytest.mark.parametrize("size", [1, 60])
def test_health_is_answered_beside_a_body_in_small_chunks(
    server: tuple[Running, Pulse], size: int
) -> None:
    found, pulse = server
    body = chunked(b'{"max_tokens": 1, "prompt": "x"' + b" " * 900_000 + b"}", size)
    pulse.worst, began = 0.0, time.process_time()
    try:
        assert answered(found, TEXT, body, "chunked") == (400 if size == 1 else 200)
    except ConnectionError:
        assert size == 1, "hung up on while it was sending"
    assert pulse.worst < BLOCKED
    assert time.process_time() - began < 3.0, "12 s for single bytes before they were counted"
