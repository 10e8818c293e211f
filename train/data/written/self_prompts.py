"""Questions that a chat target writes itself, for the data source `self`.

The chat template is written up to where the words of a user begin, and the target goes on by
sampling until it ends that turn: what comes is a user's turn out of the target's own distribution
(Magpie, https://arxiv.org/abs/2406.08464, section 2.1). It is answered like the prompts of a file.

Attempt i has a seed of its own, so it says the same in any batch; every attempt is kept when it
ends (`journal.py`), and the file is made of them in the order of their numbers. What it holds
depends on the target, the count, the seed and the settings alone.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted
from specctl.core.storage.files import digest_of, write_bytes
from specctl.runtime.measure.reporter import Advance, Reporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_tokens import control_ids
from specctl.runtime.target.templates.ends import ASK
from specctl.train.data.prompts.answers import OVER, AnswerJob, AnswerPlan, Turn
from specctl.train.data.prompts.prompts import longest_prompt
from specctl.train.data.records.chat import answerable, render
from specctl.train.data.sources.self_source import BY_FILE, FILE
from specctl.train.data.sources.sources import SELF
from specctl.train.data.written.journal import AnswerJournal
from specctl.train.data.written.regenerate import EngineWriter

# The paper samples an 8B model at 1.0. Ours: models of 135M parameters write nonsense more often
# there, and at 0.8 questions of large models still differ.
TEMPERATURE = 0.8
MOST_TOKENS = 200  # of a question; what is longer has mostly lost its thread
LEAST_TOKENS = 16  # that there must be room for
MOST_ATTEMPTS = 4  # for each question wanted
FEW = 32  # attempts that are made at most for however few questions
LEAST_SHARE = 0.1  # of the questions wanted, below which the target cannot write them
FIRST_WORDS = 8  # questions that begin with the same ones count as the same
COMMON = 0.02  # share of the questions from which on their first words are a category
OTHER = "other"
SHOWN = 4  # beginnings that are named
QUESTION_SEEDS = 1 << 60  # before those of the answers, whose noise shall be another

ENDLESS, CONTROL, SHORT, REPEATED = (
    "did not end",
    "with control tokens",
    "of less than two words",
    "said before",
)
WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


def write_self_prompts(
    target: Target,
    count: int,
    plan: AnswerPlan,
    folder: Path,
    console: Reporter,
    batch: int | None = None,
) -> Path:
    """The file of `count` questions that the target writes, in `folder`; attempts that lie there
    are read, not made again. `batch`: rows written together, None for what suits the device."""
    path = folder / FILE
    if Path(SELF).exists():
        console.warn(f"data: {SELF} is what the target writes; what lies here is ./{SELF}")
    if count == 0:
        console.warn(
            f"data: {SELF} writes nothing, the other sources hold as many prompts as are answered; "
            "raise data.prompts to have questions beside them"
        )
        return _written(path, Questions())
    opening = opening_of(target, plan)
    digest = _digest(target, opening, plan.seed)
    with AnswerJournal(folder / f"questions-{digest[:12]}", digest) as journal:
        desk = _Desk(target, opening, plan.seed, count, journal)
        first = desk.next_job()
        if first is not None:
            writer = EngineWriter(target, len(opening.ids) + opening.most, batch)
            before = min(count - 1, desk.num_before())
            if before:
                console.say(f"self: {before:,} of {count:,} questions are written")
            with console.task("the target writes questions", count - before, "questions") as task:
                desk.write(writer, first, task)
    questions = desk.in_order()
    _check_yield(questions, count, opening.most, console)
    if first is not None or not path.is_file():
        console.say(questions.summary())
    return _written(path, questions)


def _digest(target: Target, opening: Opening, seed: int) -> str:
    """Names the attempts: who writes them, behind what, and how. Their count is no part of it: a
    larger one goes on from those that are there."""
    return digest_of(
        {
            "format": 1,
            "target": target.fingerprint,
            "inflated": target.inflated,
            "dtype": target.dtype_name,
            "opening": list(opening.ids),
            "ends": [list(opening.stop_ids), list(opening.stop)],
            "sampling": [TEMPERATURE, opening.most, seed],
        }
    )


def _written(path: Path, questions: Questions) -> Path:
    """The file with a line for each question; one that says the same stays as it is."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in questions.records())
    body = "".join(lines).encode()
    if not path.is_file() or path.read_bytes() != body:
        write_bytes(path, body)
    return path


# -- where a user speaks ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opening:
    """What stands before the words of a user, as token ids; what ends them besides the target's
    own ends; and the most tokens that they may have."""

    ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    most: int

    def sampling(self, index: int, seed: int) -> Sampling:
        """How an attempt is drawn."""
        return Sampling(
            temperature=TEMPERATURE,
            seed=(QUESTION_SEEDS + seed * 1_000_003 + index) % (1 << 63),
            max_new_tokens=self.most,
            stop=self.stop,
            stop_token_ids=self.stop_ids,
        )


def opening_of(target: Target, plan: AnswerPlan) -> Opening:
    """Where the target's chat template lets a user speak. The question, its template and an answer
    fit into a row of the `plan`."""
    turn = [{"role": "user", "content": ASK}]
    variables = plan.variables(target.tokenizer)
    try:
        text = str(render(target.tokenizer, turn, (), variables, tokenize=False, return_dict=False))
        whole = answerable(target.tokenizer, turn, (), variables)
    except ValueError as error:
        raise _no_opening(target, str(error)) from error
    before, mark, behind = text.partition(ASK)
    # A blank before the words is part of their first token ("[INST] What").
    ids = tuple(target.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])
    if not mark or not ids:
        raise _no_opening(target, f"the template writes {text[:80]!r}")
    most = min(MOST_TOKENS, longest_prompt(target, plan) - len(whole))
    if most < LEAST_TOKENS:
        raise RecipeError(
            "rows have no room for a question and its answer",
            where="train.seq_len",
            found=f"{most + len(whole):,} tokens for a prompt, {len(whole):,} of them the template",
            expected=f"at least {LEAST_TOKENS} for the words of a question",
            do=f"--set train.seq_len with at least {MOST_TOKENS - most:,} tokens more",
        )
    stop_ids, stop = _stops(target, behind)
    return Opening(ids, stop_ids, stop, most)


def _stops(target: Target, behind: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What the template writes behind a user's words, where it is no end of the target's: a control
    token, or words such as [/INST]."""
    behind = behind.strip()
    ids = target.tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
    if not ids or ids[0] in target.eos_ids:
        return (), ()
    if ids[0] in control_ids(target.tokenizer):
        return (ids[0],), ()
    return (), (behind.splitlines()[0],)


def _no_opening(target: Target, found: str) -> RecipeError:
    return RecipeError(
        f"the chat template of target {target.name} shows no place where a user speaks",
        where="data.source",
        found=found,
        expected="a template that writes a user's words as they are",
        do=BY_FILE,
    )


# -- attempts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the target wrote as a user's turn, and why it is no question; "" where it is one."""

    text: str
    why_not: str


@dataclass(slots=True)
class Questions:
    """The questions among attempts that come one by one, and how many were dropped, by reason.
    Which attempt of several alike is kept depends on their order; how many are kept does not. One
    writer: who adds."""

    texts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    _said: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, attempt: Attempt) -> bool:
        """Whether it is kept."""
        key = tuple(words_of(attempt.text)[:FIRST_WORDS])
        why_not = attempt.why_not or (REPEATED if key in self._said else "")
        if why_not:
            self.dropped[why_not] += 1
            return False
        self._said.add(key)
        self.texts.append(attempt.text)
        return True

    def records(self) -> Iterator[dict[str, object]]:
        """The questions as records; their category is how they begin, if several do."""
        beginnings = [" ".join(words_of(text)[:2]) for text in self.texts]
        times = Counter(beginnings)
        for text, begin in zip(self.texts, beginnings, strict=True):
            category = begin if times[begin] >= COMMON * len(self.texts) else OTHER
            yield {"category": category, "messages": [{"role": "user", "content": text}]}

    def summary(self) -> str:
        """In a line: how many, what was dropped, how most begin."""
        begin = Counter(" ".join(words_of(text)[:2]) for text in self.texts).most_common(SHOWN)
        shown = ", ".join(f'"{words}" {n / len(self.texts):.0%}' for words, n in begin)
        dropped = f" ({self.why_dropped()})" if self.dropped else ""
        number = counted(len(self.texts), "question")
        written = f"self: {number} written by the target{dropped}"
        return f"{written}; most begin: {shown}"

    def why_dropped(self) -> str:
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.dropped.most_common())
        return f"{self.dropped.total():,} dropped: {reasons}"


def questions_of(attempts: Iterable[Attempt]) -> Questions:
    """The questions among attempts in that order."""
    questions = Questions()
    for attempt in attempts:
        questions.add(attempt)
    return questions


def words_of(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return WORD.findall(text.casefold())


class _Desk:
    """Hands out attempts until as many questions as wanted are kept or being written, and takes in
    what was written. One writer: the process that writes."""

    def __init__(
        self, target: Target, opening: Opening, seed: int, count: int, journal: AnswerJournal
    ) -> None:
        self.target, self.opening, self.seed, self.count = target, opening, seed, count
        self.journal, self.most = journal, max(FEW, MOST_ATTEMPTS * count)
        self.controls = control_ids(target.tokenizer)
        spelled = target.tokenizer.convert_ids_to_tokens(sorted(self.controls))
        self.spelled = tuple(map(str, spelled))
        turns = journal.read().turns
        self.attempts = {index: self._read(found[0]) for index, found in turns.items() if found}
        self.found = Questions()  # in the order in which attempts ended
        self.next, self.num_open = 0, 0

    def write(self, writer: EngineWriter, first: AnswerJob, advance: Advance) -> None:
        """Have attempts made, `first` and those after it."""

        def done(job: AnswerJob, new_ids: Sequence[int], reason: str) -> AnswerJob | None:
            turn = Turn(array("i"), array("i", new_ids), reason)
            self.journal.append(job.index, 0, None, turn)
            self.attempts[job.index] = self._read(turn)
            self.num_open -= 1
            if self.found.add(self.attempts[job.index]):
                advance(1)
            return self.next_job()

        writer.write(chain([first], iter(self.next_job, None)), done)

    def next_job(self) -> AnswerJob | None:
        """The next attempt that is not in the journal; None where no more are needed, or allowed.
        So the attempts are numbered without a gap, up to the one that gives the last question."""
        while len(self.found.texts) + self.num_open < self.count and self.next < self.most:
            index, self.next = self.next, self.next + 1
            if index not in self.attempts:
                self.num_open += 1
                sampling = self.opening.sampling(index, self.seed)
                return AnswerJob(index, 0, self.opening.ids, sampling)
            self.found.add(self.attempts[index])
        return None

    def in_order(self) -> Questions:
        """The questions, of the attempts by their numbers."""
        return questions_of(self.attempts[index] for index in range(self.next))

    def num_before(self) -> int:
        """Questions among all attempts of the journal."""
        return len(questions_of(self.attempts.values()).texts)

    def _read(self, turn: Turn) -> Attempt:
        text = self.target.decode(turn.new_ids)
        for stop in self.opening.stop:
            text = text.partition(stop)[0]
        text = text.strip()
        return Attempt(text, self._why_not(turn, text))

    def _why_not(self, turn: Turn, text: str) -> str:
        if turn.finish_reason not in (OVER, "stop"):
            return ENDLESS
        is_spelled = any(token in text for token in self.spelled)
        if is_spelled or not self.controls.isdisjoint(turn.new_ids[:-1]):
            return CONTROL
        return "" if is_long_enough(text) else SHORT


def is_long_enough(text: str) -> bool:
    """Whether a text has two words; where words stand without blanks, four letters."""
    num_unspaced = sum(unicodedata.category(letter) == "Lo" for letter in text)
    return len(words_of(text)) >= 2 or num_unspaced >= 4


def _check_yield(questions: Questions, count: int, most: int, console: Reporter) -> None:
    """RecipeError where hardly any attempt gave a question; a warning where fewer did than were
    wanted."""
    kept = len(questions.texts)
    if kept == count:
        return
    attempts = kept + questions.dropped.total()
    found = f"{kept:,} of {attempts:,} attempts; {questions.why_dropped()}"
    if kept < LEAST_SHARE * count:
        raise RecipeError(
            "the target does not write questions from its chat template",
            where="data.source",
            found=found,
            expected=f"{count:,} questions that end within {most} tokens, or a tenth of them",
            do=f"{BY_FILE}; a smaller data.prompts asks for fewer",
        )
    console.warn(f"self: {kept:,} of {count:,} questions were found ({found})")
