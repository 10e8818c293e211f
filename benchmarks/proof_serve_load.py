"""Many at once, too many at once, and for long.

A thousand streams are open together on a stub of the engine, each gets all its events; 200 users
ask the embedded target together and again, each answer is that of the same ask alone, memory stays.
Ten times the queue comes at once: exactly what fits is answered, everybody else hears 429 with
Retry-After at once, and who got in waits no longer than without the crowd. Then requests for as
long as asked, one in twenty given up: files, threads, tasks, rows and memory end where they began.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof_common import Check, checked, parser, report
from serve_common import CHAT, TEXT, Server, Size, serve_process, stub_server, until
from serve_leave import MOMENTS, leave
from serve_wire import Heard, hear_all, heard, request_bytes

from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService

CHUNKS = 64
SLOWER = 1.2  # how much longer who is let in may wait because of who is not
FLAT = 16 << 20  # bytes of memory that may come and go
IDLE_SECONDS = 10.0


# -- many at once -------------------------------------------------------------------------------


def prove_streams(streams: int) -> list[Check]:
    """So many streams open together on a stub."""
    text = "word " * CHUNKS
    limits = Limits(max_batch=streams, max_queue=0)
    service = StubService(text=text, chunk=1, delay=0.05, limits=limits)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    data = request_bytes(CHAT, {**body, "max_tokens": CHUNKS})
    with stub_server(service) as server:
        began = time.monotonic()
        found = asyncio.run(hear_all(server.url, [data] * streams, streams))
        seconds = time.monotonic() - began
    chunks = sum(len(one.events()) - 1 for one in found if one.status == 200)
    first = quantile([one.first_seconds for one in found], 0.99)
    told = f"{chunks / seconds:,.0f} chunks/s, first byte p99 {first:.2f} s"
    faults = [_stream_fault(one) for one in found]
    return [checked(f"streams open together: {told}", faults, streams)]


def _stream_fault(one: Heard) -> str | None:
    if one.status != 200 or not one.is_whole:
        return f"{one.status} {one.body[-200:]!r}"
    *chunks, last = one.events()
    is_right = last == "[DONE]" and len(chunks) >= CHUNKS
    return None if is_right else f"{len(chunks)} chunks, {last!r}"


def prove_users(server: Server, users: int, seconds: float, seed: int) -> list[Check]:
    """So many users, each with a request on its way all the time; each answer as it is alone."""
    rng = random.Random(seed)
    bodies = [
        {
            "prompt": rng.choice(("def f(x):\n", "class A:\n", "import os\n", "for i in range(")),
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice((0.0, 1.0)),
            "seed": rng.randrange(1000),
        }
        for _ in range(users)
    ]
    asked = [request_bytes(TEXT, body) for body in bodies]
    alone = [one.json()["choices"] for one in asyncio.run(hear_all(server.url, asked[:20], 1))]
    asyncio.run(hear_all(server.url, asked, users))  # warm: as much memory as it ever needs
    before, began, found = server.size(), time.monotonic(), list[Heard]()
    while not found or time.monotonic() - began < seconds:
        found += asyncio.run(hear_all(server.url, asked, users))
    grown = server.size().memory - before.memory
    faults: list[str | None] = []
    for at, one in enumerate(found):
        same = (
            at % users >= len(alone)
            or one.status != 200
            or one.json()["choices"] == alone[at % users]
        )
        faults.append(
            one.fault() or (None if one.status == 200 and same else f"{one.body[:200]!r}")
        )
    wait = quantile([one.seconds for one in found], 0.99)
    flat = None if grown <= FLAT else f"memory grew by {grown / (1 << 20):.1f} MiB"
    return [
        checked(f"answers to {users} users at once, p99 {wait:.1f} s", faults, users),
        checked(f"memory is flat ({grown / (1 << 20):+.1f} MiB)", [flat]),
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so great a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


# -- too many at once ---------------------------------------------------------------------------


def prove_overload(times: int, limits: Limits, delay: float) -> list[Check]:
    """`times` the queue at once, against just what fits."""
    fits = limits.max_batch + limits.max_queue
    quiet, _ = _crowd(fits, fits, limits, delay)
    crowded, refused = _crowd(fits, fits + times * limits.max_queue, limits, delay)
    before, after = (quantile(each, 0.99) for each in (quiet, crowded))
    exact = None if len(crowded) == fits else f"{len(crowded)} answered, {fits} fit"
    slow = None if after <= SLOWER * before else f"p99 {after:.2f} s, {before:.2f} s without"
    return [
        checked(f"answered: exactly the {fits} that fit", [exact]),
        checked("refused with 429, Retry-After and the error's shape", refused),
        checked(f"who got in waited {after:.2f} s at p99, {before:.2f} s without a crowd", [slow]),
    ]


def _crowd(
    fits: int, count: int, limits: Limits, delay: float
) -> tuple[list[float], list[str | None]]:
    """Seconds of those who were answered; what was wrong with each refusal."""
    service = StubService(delay=delay, limits=limits, text="one two", chunk=9)
    asked = [request_bytes(TEXT, {"prompt": "x", "max_tokens": 2})] * count
    with stub_server(service) as server:
        found = asyncio.run(hear_all(server.url, asked, count))
        if not server.is_idle():
            return [], ["rows are left behind"]
    refused = [one for one in found if one.status != 200]
    return [one.seconds for one in found if one.status == 200], [_busy_fault(r) for r in refused]


def _busy_fault(one: Heard) -> str | None:
    is_busy = one.status == 429 and one.headers.get("retry-after", "").isdecimal()
    return one.fault() if is_busy else f"{one.status} {one.headers} {one.body[:200]!r}"


# -- for long -----------------------------------------------------------------------------------


def prove_soak(server: Server, count: int, at_once: int, seed: int, warm: int) -> list[Check]:
    """So many requests, one in twenty given up: what was held before is held afterwards. `warm`: so
    many come first, in which kernels are made for the shapes of rounds."""
    rng = random.Random(seed)
    asyncio.run(_soak(server, warm, at_once, rng))
    before = _settled(server)
    faults = asyncio.run(_soak(server, count, at_once, rng))
    after = _settled(server)
    kept = [
        None if after.files <= before.files else f"{after.files} files, {before.files} before",
        None if after.threads <= before.threads else f"{after.threads} threads",
        None if after.tasks <= before.tasks else f"{after.tasks} tasks, {before.tasks} before",
        None if after.memory - before.memory <= FLAT else "memory grew",
    ]
    grown = (after.memory - before.memory) / (1 << 20)
    idle = None if server.is_idle() else f"{server.count('/v1/status')}"
    return [
        checked(f"requests, {faults.count('left')} of them given up",
                [None if fault == "left" else fault for fault in faults], count),
        checked(f"files, threads, tasks and memory ({grown:+.1f} MiB) are those of before", kept),
        checked("nobody is served, nobody waits", [idle]),
    ]  # fmt: skip


def _settled(server: Server) -> Size:
    until(server.is_idle, IDLE_SECONDS)
    time.sleep(0.2)
    return server.size()


async def _soak(server: Server, count: int, at_once: int, rng: random.Random) -> list[str | None]:
    """None for an answer, "left" for a client that left, or what was wrong."""
    turn, chances = asyncio.Semaphore(at_once), [rng.random() for _ in range(count)]

    async def one(at: int) -> str | None:
        async with turn:
            if chances[at] < 0.05:
                await leave(server.url, MOMENTS[at % len(MOMENTS)], random.Random(at))
                return "left"
            body: dict[str, Any] = {"prompt": "def f(", "max_tokens": 1 + at % 4, "seed": at}
            found = await heard(server.url, request_bytes(TEXT, {**body, "stream": at % 2 == 0}))
            return None if found.status == 200 and found.is_whole else f"{found.body[:200]!r}"

    return list(await asyncio.gather(*map(one, range(count))))


def prove(given: Any) -> list[Check]:
    """Everything, at the sizes of the options."""
    checks = prove_streams(given.streams)
    checks += prove_overload(given.times, Limits(), given.delay)
    flags = ("--draft", "prompt-lookup", "--set", f"limits.max_queue={max(given.users, 64)}")
    flags += ("--set", "limits.queue_timeout=600")
    with tempfile.TemporaryDirectory() as folder, serve_process(Path(folder), *flags) as server:
        checks += prove_users(server, given.users, given.seconds, given.seed)
        checks += prove_soak(server, given.requests, 16, given.seed, given.warm)
    if given.stub_requests:
        with stub_server(StubService(text="so it goes")) as server:
            checks += prove_soak(server, given.stub_requests, 64, given.seed, given.warm)
    return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=1_000, help="streams open together")
    options.add_argument("--times", type=int, default=10, help="how many queues come at once")
    options.add_argument(
        "--delay", type=float, default=2.0, help="seconds of each of their answers"
    )
    options.add_argument("--users", type=int, default=200, help="users of the embedded target")
    options.add_argument("--seconds", type=float, default=1800.0, help="how long they stay")
    options.add_argument("--requests", type=int, default=100_000, help="of the soak")
    options.add_argument(
        "--warm",
        type=int,
        default=2_000,
        help="requests before it, in which kernels are made; memory is compared from there on",
    )
    options.add_argument("--stub-requests", type=int, default=0, help="of a soak on the stub")
    given = options.parse_args()
    report(prove(given), given.json)


if __name__ == "__main__":
    main()
