"""Pace: seconds of each piece of a run, from which the time of the whole run follows.

A calibration measures a few of each piece, a rehearsal runs the whole run small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from specctl.core.messages.printable import counted
from specctl.recipes.schema import DataPart, TrainPart
from specctl.train.features.stored_rows import StoredRows
from specctl.train.planning.work import (
    ANSWERS,
    QUESTION_TOKENS,
    QUESTIONS,
    READING,
    Part,
    num_measures,
    num_questions,
    num_saves,
)
from specctl.train.step.selective import reference_part


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: `once` whatever the size, `answer` a prompt, `step`, `tau` a measurement, `save` a
    checkpoint, `write` a time that the drafter writes, `read` a token of features kept on disk.
    `stored`: the rows whose features lie there already; None: none."""

    once: float
    answer: float
    step: float
    tau: float
    save: float
    write: float = field(default=0.0, kw_only=True)
    read: float = field(default=0.0, kw_only=True)
    stored: StoredRows | None = field(default=None, kw_only=True)

    def seconds(self, data: DataPart, train: TrainPart, row_tokens: int = 0) -> float:
        """Of the whole run over `row_tokens` tokens of text."""
        return sum(seconds for _, _, seconds in self._spent(data, train, row_tokens))

    def parts(
        self, data: DataPart, train: TrainPart, row_tokens: int, within: tuple[float, float]
    ) -> list[Part]:
        """The parts of the whole run, between these shares of the seconds that were found."""
        low, high = within
        return [
            Part(name, amount, (low * seconds, high * seconds))
            for name, amount, seconds in self._spent(data, train, row_tokens)
            if seconds or (self.stored is not None and name == READING)
        ]

    def _spent(
        self, data: DataPart, train: TrainPart, row_tokens: int
    ) -> Iterator[tuple[str, str, float]]:
        prompts = data.prompts if data.regenerate and data.endpoint is None else 0
        yield "start, text, package", "once", self.once
        questions = num_questions(data)
        each = self.answer * QUESTION_TOKENS / (data.prompt_tokens + data.new_tokens)
        yield QUESTIONS, counted(questions, "question"), questions * each
        yield ANSWERS, counted(prompts, "prompt"), prompts * self.answer
        if data.features == "offline":
            yield READING, self._rows(row_tokens), self.read_once * row_tokens
        first = reference_part(train)
        if first is not None:
            for name, amount, seconds in self._training(data, first):
                yield f"reference: {name}", amount, seconds
        yield from self._training(data, train)

    @property
    def read_once(self) -> float:
        """Seconds of a token on average, those whose features are there included."""
        return self.read * (1.0 if self.stored is None else self.stored.missing)

    def _rows(self, tokens: int) -> str:
        if self.stored is None:
            return f"{tokens:,} tokens"
        left = round(self.stored.missing * tokens)
        return self.stored.text() + (f", {left:,} tokens to read" if left else "")

    def _training(self, data: DataPart, train: TrainPart) -> Iterator[tuple[str, str, float]]:
        writes = 0
        if data.on_policy:
            writes = math.ceil(train.steps / data.on_policy_every)
        yield "the drafter writes", counted(writes, "time"), writes * self.write
        yield "training", counted(train.steps, "step"), train.steps * self.step
        measures, saves = num_measures(train), num_saves(train)
        yield "measuring tau", counted(measures, "time"), measures * self.tau
        yield "saving", counted(saves, "time"), saves * self.save
