"""What the target answers, and what it answered: plan, prompts, turns.

A prompt is a stretch of text, or a conversation of which every assistant turn is written anew: the
first from what the data say before it, each later one from the target's own earlier answers and the
data's next question. Ids are kept as arrays of 32-bit numbers: half a million answers must fit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specctl.core.forward.prompt_images import PromptImages, StoredImage
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.templates.chat_turns import written_on
from specctl.train.data.images.shown_images import ShownImage, stored
from specctl.train.data.records.chat import answerable
from specctl.train.data.records.records import Message, Sample
from specctl.train.data.rows.pack import Document, without_image_loss

OVER = "eos"  # the finish reason of an answer that came to its own end
TURN_SEEDS = 1 << 40  # between the seeds of a conversation's turns


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How prompts are cut and answered. No prompt is longer than `longest` tokens (None: than the
    target's context leaves room for); a conversation ends where its next one would be. `switch`:
    what the chat template is told of thinking; `date`: the day that it writes, where it writes one
    (the answers are kept without it: another day asks for none anew); `first`: the number of the
    first prompt, where earlier ones were answered before, so that its noise is another."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    greedy_share: float
    seed: int
    top_p: float | None = None
    top_k: int | None = None
    longest: int | None = None
    switch: Mapping[str, bool] | None = None
    date: str | None = None
    first: int = 0

    def variables(self, tokenizer: Any) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        dated = written_on(tokenizer, self.date) if self.date else {}
        return {**(self.switch or {}), **dated}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation and the places of the assistant's turns that are written anew. A turn that
    calls a tool whose result follows stays as the data have it (the result answers that call), and
    so does one that is marked as given."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...]
    turns: tuple[int, ...]

    @classmethod
    def of(cls, sample: Sample) -> Dialogue:
        messages = sample.messages
        roles = [message["role"] for message in messages] + ["end"]
        turns = [
            i
            for i, role in enumerate(roles[:-1])
            if role == "assistant" and roles[i + 1] != "tool" and i not in sample.given
        ]
        if roles[-2] != "assistant":
            turns.append(len(messages))  # it waits for its answer
        return cls(messages, sample.tools, tuple(turn for turn in turns if turn > 0))

    def said(self, answers: Sequence[str]) -> list[Message]:
        """The messages before the turn behind those answers, with the answers in their places."""
        written = dict(zip(self.turns, answers, strict=False))
        until = self.turns[len(answers)] if len(answers) < len(self.turns) else None
        whole = [*self.messages, {}] if self.turns[-1] == len(self.messages) else self.messages
        return [
            {"role": "assistant", "content": written[i]} if i in written else message
            for i, message in enumerate(whole[:until])
            if message or i in written
        ]

    def prompt(
        self, tokenizer: Any, variables: Mapping[str, Any] | None, answers: Sequence[str]
    ) -> list[int]:
        """Ids behind which the turn after those answers is written; ValueError where the chat
        template refuses the conversation."""
        return answerable(tokenizer, self.said(answers), self.tools, variables)


@dataclass(frozen=True, slots=True)
class PromptCut:
    """A prompt made from a sample of the data: of a conversation, all before the first turn that is
    answered. `is_question`: the target wrote it itself; `images`: those of the whole conversation,
    of which `ids` may hold the first alone."""

    ids: Sequence[int]
    domain: str
    dialogue: Dialogue | None = None
    is_question: bool = False
    images: tuple[ShownImage, ...] = ()

    @property
    def num_turns(self) -> int:
        """Answers that it asks for at most."""
        return 1 if self.dialogue is None else len(self.dialogue.turns)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: what the target read, what it wrote after it (an ending EOS included), why it
    ended."""

    prompt_ids: array[int]
    new_ids: array[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """A prompt with what the target wrote after it."""

    prompt: PromptCut
    turns: tuple[Turn, ...]
    is_greedy: bool

    @property
    def new_ids(self) -> array[int]:
        """The ids of the first answer."""
        return self.turns[0].new_ids

    @property
    def finish_reason(self) -> str:
        return self.turns[-1].finish_reason

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.new_ids) for turn in self.turns)

    def documents(self, train_on_prompt: bool = False) -> list[Document]:
        """As training text: only the answers are predicted, unless the prompts are wanted too. Each
        answer stands behind exactly what the target read; where the chat template writes an earlier
        turn otherwise (it leaves out what was thought), another document begins."""
        spans: list[tuple[array[int], list[tuple[int, int]]]] = []
        for turn in self.turns:
            before = spans[-1][0] if spans else None
            if before is None or turn.prompt_ids[: len(before)] != before:
                spans.append((array("i"), []))
            ids, answers = spans[-1]
            ids.extend(turn.prompt_ids[len(ids) :])
            answers.append((len(ids), len(ids) + len(turn.new_ids)))
            ids.extend(turn.new_ids)
        return [self._document(ids, answers, train_on_prompt) for ids, answers in spans]

    def _document(
        self, ids: array[int], answers: Sequence[tuple[int, int]], train_on_prompt: bool
    ) -> Document:
        mask = np.full(len(ids), train_on_prompt)
        for start, end in answers:
            mask[start:end] = True
        images: tuple[StoredImage, ...] = stored(ids, self.prompt.images)
        document = Document(
            np.array(ids, dtype=np.int32), mask, self.prompt.domain, self.prompt.is_question, images
        )
        return without_image_loss(document)


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """A turn to be written: of which prompt, behind what (ids, and the images among them), and
    how."""

    index: int
    turn: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    images: PromptImages | None = None


# done(job, new ids, finish reason) -> the next turn of the same conversation, if there is one.
Done = Callable[[AnswerJob, Sequence[int], str], AnswerJob | None]


class AnswerWriter(Protocol):
    """Who writes the answers: the target in this process, or a server that has it."""

    name: str  # a part of what the answers are kept under

    def write(self, jobs: Iterator[AnswerJob], done: Done) -> None:
        """Answer every job, in any order, and whatever `done` asks for besides."""


def sampling_of(index: int, plan: AnswerPlan, turn: int = 0) -> Sampling:
    """How prompt `index` is answered: greedy ones are spread evenly, every prompt and every turn
    has a seed of its own."""
    index += plan.first
    share = plan.greedy_share
    is_greedy = int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
    return Sampling(
        temperature=0.0 if is_greedy else plan.temperature,
        top_p=None if is_greedy else plan.top_p,
        top_k=None if is_greedy else plan.top_k,
        seed=(plan.seed * 1_000_003 + index + turn * TURN_SEEDS) % (1 << 63),
        max_new_tokens=plan.new_tokens,
    )
