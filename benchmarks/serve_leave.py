"""Clients that leave: before they have asked, while they are answered, at the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from urllib.parse import urlsplit

from serve_common import TEXT
from serve_wire import request_bytes

MOMENTS = (
    "connected", "in the head", "in the body", "while the prompt is read", "at the first byte",
    "between two events", "at the last event", "before the whole answer",
)  # fmt: skip
LINGER_NONE = struct.pack("ii", 1, 0)  # closing resets the connection


async def leave(url: str, moment: str, rng: random.Random) -> None:
    """One client that leaves then, by a reset or politely."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 22)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(30):
            await _until(moment, reader, writer, rng)
    if rng.random() < 0.5:
        held: socket.socket = writer.get_extra_info("socket")
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _until(
    moment: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    """Behave until the moment has come."""
    prompt = [rng.randrange(10, 5000) for _ in range(rng.choice((3, 3, 500)))]
    body = {
        "prompt": prompt,
        "max_tokens": 8 if "last" in moment else rng.choice((8, 400)),
        "stream": moment != "before the whole answer",
        "n": rng.choice((1, 1, 3)),
        "seed": rng.randrange(1000),
    }
    data = request_bytes(TEXT, body)
    ends = {"connected": 0, "in the head": rng.randrange(1, 60)}
    ends["in the body"] = data.index(b"\r\n\r\n") + 4 + rng.randrange(10)
    writer.write(data[: ends.get(moment, len(data))])
    await writer.drain()
    if moment == "at the first byte":
        await reader.readexactly(1)
    elif moment == "between two events":
        for _ in range(rng.randint(1, 6)):
            await reader.readuntil(b"data: ")
    elif moment == "at the last event":
        await reader.readuntil(b'"finish_reason":"')
    else:
        await asyncio.sleep(rng.random() * 0.05)
