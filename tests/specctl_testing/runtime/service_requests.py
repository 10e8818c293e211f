"""Asks of a service on a small random target, and the answers that they should get."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from functools import cache

from specctl.drafters import families
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.server.engine_thread.service import (
    GenerateRequest,
    Limits,
    Service,
)
from specctl_testing.runtime.serving import stub_target


def small_target(make_model):
    """A random target with the alphabet of the stub."""
    tokenizer = stub_target().tokenizer
    return Target.from_model(
        make_model(num_layers=2, vocab=len(tokenizer), max_position_embeddings=512), tokenizer
    )


def drafter_of(target, name="prompt-lookup"):
    found = families()[name]
    return found.build(found.options(), target.spec, None)


@asynccontextmanager
async def served(target, *given, **limits):
    service = Service(target, *given, limits=Limits(**limits))
    service.start()
    while service.status().state == "loading":
        await asyncio.sleep(0.005)
    try:
        yield service
    finally:
        service.stop()


async def collect(service, ask):
    return [piece async for piece in await service.submit(ask)]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces):
    return tuple(token for piece in pieces for token in piece.tokens)


def prompts_of(count, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(10, 300) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def requests_of(count, new=24):
    """Greedy and seeded asks of different lengths."""
    return [
        GenerateRequest(
            prompt,
            Sampling(
                temperature=0.0 if i % 2 else 0.9,
                seed=i,
                max_new_tokens=3 + (7 * i) % new,
                ignore_eos=True,
            ),
        )
        for i, prompt in enumerate(prompts_of(count))
    ]


def alone(target, ask):
    """The answer of the plain engine, one row, no drafter."""
    return _alone(target, ask.tokens, ask.sampling)


@cache
def _alone(target, tokens, sampling):
    return generate(target, [tokens], sampling=sampling).outputs[0]
