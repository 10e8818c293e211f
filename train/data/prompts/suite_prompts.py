"""A public suite in a training run: the questions that tau is also measured on, and how many of its
questions stand in the training data."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.messages.printable import counted
from specctl.recipes.schema import TrainPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.suites import SuiteQuestion, SuiteQuestions, evenly, read_suite
from specctl.train.data.records.records import Message, Sample

FIELD = "train.tau_suite"
MOST_TOKENS = 2048  # of a question: a measurement stands between two steps


@dataclass(frozen=True, slots=True)
class SuitePrompts:
    """First questions of a suite as token ids, of so many categories. `too_long`: how many more
    were left out."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    num_categories: int
    too_long: int

    def text(self) -> str:
        """What a run says of them."""
        said = f"tau is also measured on {counted(len(self.prompts), 'question')} of {self.name}, "
        said += counted(self.num_categories, "category", "categories")
        return said + (f"; {self.too_long:,} left out as too long" if self.too_long else "")


def read_run_suite(word: str) -> SuiteQuestions:
    """The suite that a recipe names; its errors name the recipe's field."""
    try:
        return read_suite(word)
    except SpecctlError as error:
        raise type(error)(
            error.what,
            where=f"{FIELD}: {word}",
            found=error.found,
            expected=error.expected,
            do=error.do.replace("--suite ", f"--set {FIELD}="),
        ) from error


def suite_prompts(train: TrainPart, target: Target) -> SuitePrompts | None:
    """About `tau_prompts` questions, equally many of every category and at least one; of a
    conversation the first. None where the recipe names no suite, or the target cannot be run.
    RecipeError if none has room."""
    if train.tau_suite is None or not target.can_run:
        return None
    suite = read_run_suite(train.tau_suite)
    num_categories = len({question.category for question in suite.questions})
    chosen = evenly(suite.questions, max(1, train.tau_prompts // num_categories))
    most = min(MOST_TOKENS, target.spec.max_positions - train.tau_tokens)
    found = [(one.category, _encoded(target, one)) for one in chosen]
    fitting = [(category, ids) for category, ids in found if 0 < len(ids) <= most]
    if not fitting:
        raise RecipeError(
            f"no question of suite {suite.name} fits the target",
            where=FIELD,
            found=f"{min(len(ids) for _, ids in found):,} tokens in the shortest",
            expected=f"at most {most:,}",
            do=f"another suite, or leave {FIELD} out",
        )
    return SuitePrompts(
        suite.name,
        tuple(ids for _, ids in fitting),
        len({category for category, _ in fitting}),
        len(found) - len(fitting),
    )


def _encoded(target: Target, question: SuiteQuestion) -> tuple[int, ...]:
    """As `bench --suite` reads it: a conversation for a chat model, else a text."""
    if target.is_chat:
        return tuple(target.encode_chat(list(question.turns[0])))
    return tuple(target.encode(question.text))


def warn_of_suite(word: str | None, samples: Sequence[Sample], reporter: Reporter) -> None:
    """Warn of training data that hold questions of the suite that tau is measured on."""
    if word is None:
        return
    suite = read_run_suite(word)
    count = num_in_suite(samples, suite)
    if count:
        reporter.warn(
            f"data: {counted(count, 'record')} with a question of {suite.name}, word for word: its "
            "tau will be higher than that of other text; take them out of the data"
        )


def num_in_suite(samples: Iterable[Sample], suite: SuiteQuestions) -> int:
    """How many samples have a user's turn, or are a text, that is a first question of the suite;
    case and white space do not count. What was tokenized before is not looked into."""
    questions = {plain(text) for question in suite.questions for text in _texts(question)}
    return sum(any(plain(text) in questions for text in _said(sample)) for sample in samples)


def plain(text: str) -> str:
    """A text without what differs from copy to copy: width and case of letters, white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _texts(question: SuiteQuestion) -> Iterator[str]:
    yield question.text
    yield from _users(question.turns[0])


def _said(sample: Sample) -> Iterator[str]:
    if sample.text:
        yield sample.text
    yield from _users(sample.messages)


def _users(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            yield message["content"]
