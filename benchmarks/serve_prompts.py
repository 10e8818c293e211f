"""Prompts of every length, and stop strings, with what must come of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from serve_common import TEXT, Server

from specctl_testing.runtime.serving import stub_target

MIXED = "ab \n\u4f60\U0001f600"


@cache
def _encode(text: str) -> tuple[int, ...]:
    return tuple(stub_target().encode(text))


def prompt_cases(rng: random.Random, context: int, count: int) -> Iterator[dict[str, Any]]:
    """Bodies of requests: token ids and texts of every length, special tokens, stop strings."""
    makes: Sequence[Callable[[], dict[str, Any]]] = (
        lambda: _of_length(rng, context, rng.randrange(1, context)),
        lambda: _of_length(rng, context, context + rng.randrange(-3, 3)),
        lambda: _of_length(rng, context, rng.randrange(context, 4 * context)),
        lambda: {"prompt": "".join(rng.choices(MIXED, k=rng.randrange(3 * context)))},
        lambda: {"prompt": rng.choice(("", " ", "\x00", "\u2028", "\U0010ffff"))},
        lambda: {"prompt": rng.choices((0, 1, 2), k=rng.randint(1, 20))},
        lambda: {"prompt": "def f(x):\n", "max_tokens": 48, "stop": rng.randint(1, 8)},
    )  # fmt: skip
    for at in range(count):
        drawn = {"temperature": rng.choice((0.0, 1.0)), "seed": rng.randrange(1000)}
        yield {"max_tokens": 2, **drawn, **makes[at % len(makes)]()}


def _of_length(rng: random.Random, context: int, length: int) -> dict[str, Any]:
    """Token ids, and an answer that just fits, just does not, or is short."""
    tokens = [rng.randrange(10, 5000) for _ in range(length)]
    new = max(1, context - length + rng.choice((0, 1)))
    return {"prompt": tokens, "max_tokens": new if new < 20 else rng.randint(1, 3)}


def prompt_fault(server: Server, body: dict[str, Any]) -> str | None:
    """What is wrong with the answer to one of those."""
    if "stop" in body:
        return _stop_fault(server, body, body.pop("stop"))
    given, context = body["prompt"], server.count("/v1/status")["context"]
    length = len(_encode(given) if isinstance(given, str) else given)
    heard = server.hear(TEXT, body)
    if fault := heard.fault():
        return fault
    if length == 0:
        return None if heard.status == 400 else f"no tokens: {heard.status}"
    if length + body["max_tokens"] > context:
        said = heard.json()["error"] if heard.status == 400 else {}
        is_told = all(f"{n:,}" in said.get("message", "") for n in (length, context))
        is_refused = said.get("code") == "context_length_exceeded" and is_told
        return None if is_refused else f"{length} tokens of {context}: {heard.body[:200]!r}"
    read = heard.json().get("usage", {}).get("prompt_tokens")
    return None if read == length else f"{length} tokens: {heard.status} {heard.body[:200]!r}"


def _stop_fault(server: Server, body: dict[str, Any], length: int) -> str | None:
    """A piece of the answer as its stop string: the answer ends before it, drafted or not."""
    whole = server.hear(TEXT, body).json()["choices"][0]["text"]
    at = random.Random(body["seed"]).randrange(max(len(whole) - length, 1))
    stop = whole[at : at + length] or "?"
    choice = server.hear(TEXT, {**body, "stop": stop}).json()["choices"][0]
    wanted = whole.split(stop)[0]
    is_right = choice["text"] == wanted and (choice["finish_reason"] == "stop") == (stop in whole)
    return None if is_right else f"stop {stop!r}: {choice!r}, of {whole!r}"
