"""What a benchmark measures on: prompts as token ids, or questions that follow each other.

As in Spec-Bench, a later question follows the answer that was given to the one before it,
so every way to generate text speaks its own conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.runtime.target.target import Target

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """`ids` of the first prompt, and of a conversation the messages that stand before each answer:
    `turns[k]` are those between answer k - 1 and answer k."""

    ids: tuple[int, ...]
    category: str = ""
    turns: tuple[tuple[Turn, ...], ...] = ()

    @property
    def num_turns(self) -> int:
        return max(1, len(self.turns))

    def prompt(self, target: Target, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Token ids of what is read before the next answer, given the answers so far."""
        if not answers:
            return self.ids
        spoken = list[Turn]()
        for turn, answer in zip(self.turns, answers, strict=False):
            spoken += [*turn, {"role": "assistant", "content": target.decode(answer)}]
        return tuple(target.encode_chat([*spoken, *self.turns[len(answers)]]))


def question_of(target: Target, turns: Sequence[Sequence[Turn]], category: str) -> Question:
    """A conversation to be had with the target."""
    first = tuple(target.encode_chat(list(turns[0])))
    return Question(first, category, tuple(map(tuple, turns)))
