"""What a derived run can do in its time: the seconds that there are, and those that answers and
steps take."""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.core.errors import RecipeError
from specctl.recipes.schema import DataPart, TrainPart
from specctl.train.data.sources.self_source import uses_self
from specctl.train.planning.data_facts import DataFacts
from specctl.train.planning.other_programs import OtherPrograms
from specctl.train.planning.pace import Pace
from specctl.train.planning.stand_in import now
from specctl.train.planning.work import QUESTION_TOKENS

USUAL_SECONDS = 40 * 60.0  # of a run whose length nobody has given
EPOCHS = 4.0  # times that a row is read, see docs/training.md
MOST_EPOCHS = 10.0  # where there are too few prompts for the time
FILL = 0.95  # of a row that holds tokens
SPENT = 0.92  # of the time; the rest is for what no calibration sees
LEAST_ANSWERS, LEAST_STEPS = 40, 40  # of which a drafter learns anything
MEASURES = 4  # of tau, before the last one
SAVE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class AmountCosts:
    """Seconds of a run: `fixed` whatever the amounts, `answer` of a prompt (it is answered, and
    both are read once where features are kept), `question` more of one that the target writes, past
    the first `held`; `step`, in which `step_answers` prompts are learned."""

    fixed: float
    answer: float
    question: float
    held: int
    step: float
    step_answers: float

    @classmethod
    def of(
        cls, data: DataPart, train: TrainPart, facts: DataFacts, pace: Pace, seconds: float
    ) -> AmountCosts:
        saves = max(1, round(seconds / SAVE_SECONDS))
        writing = pace.answer if data.regenerate and data.endpoint is None else 0.0
        read = pace.read_once * facts.document_tokens if data.features == "offline" else 0.0
        questions = QUESTION_TOKENS / facts.answer_tokens if uses_self(data.source) else 0.0
        tokens = FILL * train.rows * train.accumulate * train.seq_len
        return cls(
            fixed=pace.once + (MEASURES + 1) * pace.tau + saves * pace.save,
            answer=writing + read,
            question=questions * writing,
            held=facts.prompts or 0,
            step=pace.step,
            step_answers=tokens / facts.document_tokens,
        )

    def written(self, prompts: int) -> float:
        """Of so many prompts."""
        return prompts * self.answer + max(0, prompts - self.held) * self.question

    def prompts(self, seconds: float, learned: float = 0.0) -> int:
        """How many there is time for, if `learned` seconds more go to each."""
        each = max(self.answer + learned, 1e-6)
        if self.question and seconds > self.held * each:
            seconds += self.held * self.question
            each += self.question
        return max(0, int(seconds / each))

    def most_steps(self, prompts: int) -> int:
        """Past which so many prompts are learned by heart."""
        return max(LEAST_STEPS, int(prompts * MOST_EPOCHS / self.step_answers))


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """The seconds that there are, when the deriving began, which is a part of them, and what other
    work before the run takes of them."""

    seconds: float
    began: float
    taken: float = 0.0
    others: OtherPrograms = field(default_factory=OtherPrograms)

    def left(self) -> float:
        """Seconds of the run itself: what nobody has spent yet, less what no calibration sees."""
        return SPENT * max(0.0, self.seconds - self.taken - (now() - self.began))

    def check(self, least: float = 0.0, is_all: bool = False) -> None:
        """RecipeError where a run of at least so many seconds does not fit into what is left.
        `is_all`: more is not needed; else it is what is known so far."""
        if least < self.left():
            return
        need = now() - self.began + self.taken + least / SPENT
        expected, do = f"at least {minutes(need + 60)}", _whole_minutes(need)
        if not is_all:
            expected = f"more than {minutes(need)}, which the pieces measured first need alone"
            do = f"{_whole_minutes(max(USUAL_SECONDS, 2 * need))}, to leave room for the others"
        busy = self.others.note()
        raise RecipeError(
            "the time is too short for a drafter of this target",
            where="--time",
            found=minutes(self.seconds) + (f"; {busy}" if busy else ""),
            expected=expected,
            do=f"--time {do}" + ("; or the same again when those have ended" if busy else ""),
        )


def _whole_minutes(seconds: float) -> str:
    return f"{int(seconds / 60) + 2}m"


def minutes(seconds: float) -> str:
    """A time in words: "45 s", "13 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
