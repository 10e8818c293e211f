"""Pace: seconds of each piece of a run, from which the time of the whole run follows.

A calibration measures a few of each piece, a rehearsal runs the whole run small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from specctl.core.printable import counted
from specctl.recipes.schema import Recipe
from specctl.train.planning.work import (
    ANSWERS,
    QUESTION_TOKENS,
    QUESTIONS,
    Part,
    num_measures,
    num_questions,
    num_saves,
)
from specctl.train.selective import reference_stage


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: `once` whatever the size, `answer` a prompt, `step`, `tau` a measurement, `save` a
    checkpoint, `write` a time that the drafter writes, `read` a token of features kept on disk."""

    once: float
    answer: float
    step: float
    tau: float
    save: float
    write: float = field(default=0.0, kw_only=True)
    read: float = field(default=0.0, kw_only=True)

    def seconds(self, recipe: Recipe, row_tokens: int = 0) -> float:
        """Of the whole run over `row_tokens` tokens of text."""
        return sum(seconds for _, _, seconds in self._spent(recipe, row_tokens))

    def parts(self, recipe: Recipe, row_tokens: int, within: tuple[float, float]) -> list[Part]:
        """The parts of the whole run, between these shares of the seconds that were found."""
        low, high = within
        return [
            Part(name, amount, (low * seconds, high * seconds))
            for name, amount, seconds in self._spent(recipe, row_tokens)
            if seconds
        ]

    def _spent(self, recipe: Recipe, row_tokens: int) -> Iterator[tuple[str, str, float]]:
        data = recipe.data
        prompts = data.prompts if data.regenerate and data.endpoint is None else 0
        yield "start, text, package", "once", self.once
        questions = num_questions(data)
        each = self.answer * QUESTION_TOKENS / (data.prompt_tokens + data.new_tokens)
        yield QUESTIONS, counted(questions, "question"), questions * each
        yield ANSWERS, counted(prompts, "prompt"), prompts * self.answer
        if data.features == "offline":
            read = self.read * row_tokens
            yield "the target reads the rows once", f"{row_tokens:,} tokens", read
        first = reference_stage(recipe)
        if first is not None:
            for name, amount, seconds in self._training(first):
                yield f"reference: {name}", amount, seconds
        yield from self._training(recipe)

    def _training(self, recipe: Recipe) -> Iterator[tuple[str, str, float]]:
        train, writes = recipe.train, 0
        if recipe.data.on_policy:
            writes = math.ceil(train.steps / recipe.data.on_policy_every)
        yield "the drafter writes", counted(writes, "time"), writes * self.write
        yield "training", counted(train.steps, "step"), train.steps * self.step
        measures, saves = num_measures(train), num_saves(train)
        yield "measuring tau", counted(measures, "time"), measures * self.tau
        yield "saving", counted(saves, "time"), saves * self.save
