"""Four workloads that differ in how much the text repeats itself, the same for every benchmark.

    copy-heavy  a held-out piece of code twice, then its beginning: the answer is there to be copied
    code        held-out Python code
    prose       the reference texts of the Python language (`pydoc_data.topics` of this Python)
    random      token ids drawn uniformly: nothing was ever seen before

Prompts are token ids of one length, always the same for a target and a Python version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

PROMPT_TOKENS = 64
COPY_TOKENS, COPY_AGAIN = 48, 8


def copy_heavy(target: Target, count: int) -> list[list[int]]:
    pieces = [prompt[:COPY_TOKENS] for prompt in code(target, count)]
    return [piece + piece + piece[:COPY_AGAIN] for piece in pieces]


def code(target: Target, count: int) -> list[list[int]]:
    return [list(p.ids)[:PROMPT_TOKENS] for p in heldout_prompts(target, count, domain="code")]


def prose(target: Target, count: int) -> list[list[int]]:
    """The beginnings of the longest texts, in alphabetical order."""
    longest = sorted(sorted(topics), key=lambda name: -len(topics[name]))[:count]
    return [target.encode(_flowing(topics[name]))[:PROMPT_TOKENS] for name in sorted(longest)]


def noise(target: Target, count: int) -> list[list[int]]:
    draw = random.Random(0)
    size = target.spec.vocab_size
    return [[draw.randrange(size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _flowing(text: str) -> str:
    """The text without its heading."""

    def paragraphs() -> Iterator[str]:
        for paragraph in text.split("\n\n"):
            if len(paragraph) > 120:
                yield paragraph

    return "\n\n".join(paragraphs())


WORKLOADS: dict[str, Callable[[Target, int], list[list[int]]]] = {
    "copy-heavy": copy_heavy,
    "code": code,
    "prose": prose,
    "random": noise,
}
