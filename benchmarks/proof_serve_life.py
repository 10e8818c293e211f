"""From the door to the last byte: who is let in, how a server ends, and what it survives.

Every route of the application's own table is tried with every kind of key and in every spelling of
its path: nothing but /health and /ready answers without one. SIGTERM under load: every answer that
had begun is finished, /ready says 503 at once, the exit code is 0. Clients that people use work
unchanged. A drafter that breaks (exception, memory, NaN, damaged weights on disk) costs speed: the
answer is that of plain decoding, one row is counted, the next rows are drafted again.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from proof_common import Check, checked, parser, report
from serve_broken import BREAKS
from serve_clients import flow_faults
from serve_common import TEXT, Server, serve_process, tiny_server, tiny_target
from serve_damage import damage_checks
from serve_wire import Heard, error_fault, heard, request_bytes

from specctl_testing.runtime.keys import OFFERS, RIGHT, routes
from specctl_testing.runtime.web import make_app

OPEN = ("/health", "/ready")
READY_SECONDS = 0.1
GRACE = 60.0
Start = Callable[[], AbstractContextManager[Server]]


# -- who is let in ------------------------------------------------------------------------------


def spellings(path: str) -> Iterator[str]:
    """A path as it is, and as somebody writes it who wants past the guard."""
    yield from (path, path + "?x=1", path + "/", "/" + path, path.upper(), path + "%00")
    yield from ("/health/.." + path, "/health/%2e%2e" + path, path.replace("/", "/./"))
    yield from (path.replace("v1", "%76%31"), "http://127.0.0.1" + path, path + "#/health")


def prove_keys(server: Server, every: int = 1) -> list[Check]:
    """The matrix: every route, method, spelling and offer; or one case of so many."""
    assert server.key == RIGHT
    known = {name: offer for name, offer in OFFERS.items() if "other right" not in name}
    cases = [
        (method, path, spelled, name)
        for method, path in routes(make_app())
        for at, spelled in enumerate(spellings(path))
        for name in (known if at == 0 else ("none", "wrong"))
    ]
    faults: list[str | None] = []
    for method, path, spelled, name in cases[::every]:
        headers, is_right = known[name]
        is_in = is_right or (path in OPEN and _means(spelled, path))
        found = _knock(server, method, spelled, headers)
        fault = _let_in_fault(found, is_in, method, spelled)
        faults.append(None if fault is None else f"{method} {spelled} with {name}: {fault}")
    return [checked("routes x methods x spellings x keys", faults, 500 // every)]


def _means(spelled: str, path: str) -> bool:
    return spelled in (path, path + "?x=1")


def _knock(server: Server, method: str, path: str, headers: dict[str, str]) -> Heard:
    lines = tuple(f"{name}: {value}" for name, value in headers.items())
    data = request_bytes(path, headers=lines).replace(b"GET", method.encode(), 1)
    return asyncio.run(heard(server.url, data, seconds=20))


def _let_in_fault(found: Heard, is_in: bool, method: str, path: str) -> str | None:
    if found.status >= 500 or found.status == 0:
        return f"{found.status} {found.body[:100]!r}"
    if is_in:
        return "was not let in" if found.status in (401, 403) else None
    if found.status == 400:  # the path was no path
        return None
    if found.status != 401 or "www-authenticate" not in found.headers:
        return f"{found.status}, let in without a key: {found.body[:100]!r}"
    return None if method == "HEAD" else error_fault(found.body, path)


# -- how it ends --------------------------------------------------------------------------------


def prove_ending(start: Start, runs: int, streams: int, seed: int) -> list[Check]:
    """SIGTERM at a random moment, so many times."""
    rng, endings = random.Random(seed), []
    for _ in range(runs):
        with start() as server:
            endings.append(asyncio.run(_ended(server, streams, rng)))
    cut = [fault for one in endings for fault in one[0]]
    slowest = max(one[1] for one in endings)
    late = [None if one[1] <= READY_SECONDS else f"{one[1]:.3f} s" for one in endings]
    codes = [None if one[2] == 0 else f"exit code {one[2]}" for one in endings]
    told = [one[3] for one in endings]
    return [
        checked("streams that a SIGTERM met, all finished", cut, runs * max(streams // 2, 1)),
        checked(f"/ready said 503 within 100 ms (slowest {slowest * 1000:.0f} ms)", late, runs),
        checked("left with exit code 0", codes, runs),
        checked("new requests were refused with 503 and Retry-After", told, runs),
    ]


async def _ended(
    server: Server, streams: int, rng: random.Random
) -> tuple[list[str | None], float, int | None, str | None]:
    """What was wrong with the streams; seconds until /ready said no; exit code; refusal's fault."""
    body = {"prompt": "def f(", "max_tokens": 100, "stream": True}
    asked = [request_bytes(TEXT, {**body, "seed": i, "temperature": 1}) for i in range(streams)]
    running = [asyncio.create_task(heard(server.url, data)) for data in asked]
    await asyncio.sleep(0.3 + rng.random())
    began = time.monotonic()
    server.terminate()
    ready = request_bytes("/ready")
    while (await heard(server.url, ready)).status != 503 and time.monotonic() - began < 5:
        pass
    seconds = time.monotonic() - began
    refused = await _refusal(server)
    found = await asyncio.gather(*running)
    code = await asyncio.to_thread(server.exit_code, GRACE)
    faults = [_stream_fault(one) for one in found if one.status != 503]
    return faults, seconds, code, refused


async def _refusal(server: Server) -> str | None:
    """What is wrong with the answer to a request that comes too late; None if nobody is there."""
    try:
        late = await heard(server.url, request_bytes(TEXT, {"prompt": "x"}))
    except ConnectionError:
        return None
    is_right = late.status == 503 and "retry-after" in late.headers
    return None if is_right else f"{late.status} {late.headers} {late.body[:100]!r}"


def _stream_fault(one: Heard) -> str | None:
    if one.status != 200 or not one.is_whole:
        return f"cut: {one.status} {one.body[-100:]!r}"
    return None if one.events()[-1] == "[DONE]" else f"no [DONE]: {one.body[-100:]!r}"


# -- what it survives ---------------------------------------------------------------------------


def prove_breaking(at: int, breaks: Sequence[str] = tuple(BREAKS)) -> list[Check]:
    """Every kind of break, at the `at`-th draft of a served answer."""
    body = {"prompt": "def f(x):\n    return", "max_tokens": 24, "temperature": 0.9, "seed": 5}
    with tiny_server() as server:
        wanted = server.hear(TEXT, body).json()["choices"]
    found = [_break_fault(BREAKS[name], at, body, wanted) for name in breaks]
    told = [f and f"{name}: {f}" for name, f in zip(breaks, found, strict=True)]
    return [checked("breaking drafters: answers exact, one row counted", told, len(breaks))]


def _break_fault(make: Any, at: int, body: dict[str, Any], wanted: Any) -> str | None:
    """Two answers, the first of which loses its drafter."""
    with tiny_server(make(tiny_target(), at)) as server:
        answers = [server.hear(TEXT, body) for _ in range(2)]
        disabled = server.counters()["specctl:spec_disabled_total"]
        is_on = server.count("/v1/status")["speculation"] == "on"
    for one in answers:
        if one.status != 200 or one.json()["choices"] != wanted:
            return f"{one.status} {one.body[:200]!r} for {json.dumps(wanted)[:200]}"
    if disabled != 1:
        return f"{disabled:.0f} rows counted"
    later = answers[1].json()["specctl"]["stats"]["drafted"]
    return None if is_on and later > 0 else "nothing is drafted any more"


def prove(given: Any) -> list[Check]:
    """Everything, at the sizes of the options."""
    fast = ("--draft", "prompt-lookup", "--batching", "fixed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve_process(folder, *fast, key=RIGHT) as server:
            checks = prove_keys(server)
            checks += [checked("flows of clients, unchanged", flow_faults(server), 14)]
        checks += prove_breaking(given.at)
        checks += damage_checks(folder)
        checks += prove_ending(
            lambda: serve_process(folder, *fast), given.runs, given.streams, given.seed
        )
    return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=20, help="servers that are ended")
    options.add_argument("--streams", type=int, default=24, help="streams that each has")
    options.add_argument("--at", type=int, default=3, help="the draft at which drafters break")
    given = options.parse_args()
    report(prove(given), given.json)


if __name__ == "__main__":
    main()
