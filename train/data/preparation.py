"""What the rows of a run are made with, as far as its data decide them."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.recipes.schema import DataPart, TargetPart
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.answers import AnswerPlan
from specctl.train.data.records.chat import thinking_switch
from specctl.train.data.written.writing_target import writing_target

LEAST_ANSWER = 16  # tokens of an answer for which a prompt must leave room in its row


@dataclass(frozen=True, slots=True)
class Preparation:
    """The recipe's data, the tokens of a row, the target and how the recipe names it, and the day
    that its chat template writes (None: it writes none, or nothing is written yet)."""

    data: DataPart
    seq_len: int
    target: Target
    part: TargetPart
    day: str | None = None

    def plan(self, prompts: int | None = None) -> AnswerPlan:
        """How prompts are cut and answered: so many of them, or as many as the recipe says."""
        data = self.data
        return AnswerPlan(
            data.prompts if prompts is None else prompts,
            data.prompt_tokens,
            data.new_tokens,
            data.temperature,
            data.greedy_share,
            data.seed,
            data.top_p,
            data.top_k,
            self.seq_len - min(LEAST_ANSWER, self.seq_len // 2),
            thinking_switch(self.target.tokenizer, data.thinking),
            self.day,
        )

    def writer(self) -> Target:
        """The target as it writes text, which may be read from its file for that."""
        return writing_target(self.part, self.target)
