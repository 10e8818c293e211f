"""The drafter writes the answers that it will learn from, scored by the target: on-policy text.

A drafter that reads the target's text never meets the prefixes that its own words lead to. So every
`every` steps the drafter of that moment answers as many prompts of the training rows as the coming
steps will read, through the engine, many at once. What row n holds follows from (the weights when
it was written, data.seed, n) alone, and the rows that are still to be read travel with every
checkpoint, so a resumed run reads the very same. Letters: R rows, S sequence, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.recipes.schema import DataPart, DrafterPart, TrainPart
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.target.target import Target
from specctl.train.assemble import document_prompts
from specctl.train.data.preparation import LEAST_ANSWER
from specctl.train.data.prompts.answers import AnswerPlan, sampling_of
from specctl.train.data.rows.pack import Document, PackedRows, laid_out
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.rows.supply import Mixed, Order, Prepared, Text
from specctl.train.data.written.regenerate import slots_for
from specctl.train.distributed.ranks import Ranks
from specctl.train.saving.state import untouched_random_state

NAMES = ("ids_RS", "mask_RS", "document_RS", "position_RS")


@dataclass(frozen=True, slots=True)
class Writing:
    """How the drafter's text is made. `room` tokens are kept for a prompt and its answer, so that a
    row of `seq_len` holds `seq_len // room` documents."""

    plan: AnswerPlan
    order: Order
    every: int
    rows_per_step: int
    seq_len: int
    room: int
    pad_id: int
    train_on_prompt: bool


class OnPolicy(Text):
    """Rows that the drafter writes, numbered from 0 over the whole run. One writer: the loop."""

    def __init__(
        self, drafter: Drafter, target: Target, data: TokenData, writing: Writing, ranks: Ranks
    ) -> None:
        self.drafter, self.target, self.data = drafter, target, data
        self.writing, self.ranks = writing, ranks
        self._prompts = Order(writing.order.num_rows, writing.plan.seed + 1)
        self._written: dict[str, Tensor] = {}
        self._began, self._first = -1, 0

    def refresh(self, step: int, position: int) -> None:
        """Write all rows up to the next refresh, unless that was done."""
        every, order = self.writing.every, self.writing.order
        due = step - step % every
        if self._began == due:
            return
        until = position + (due + every - step) * self.writing.rows_per_step
        first, end = order.num_fresh(position), order.num_fresh(until)
        rows: PackedRows | None = None
        with self.drafter.whole() as drafter, self.ranks.together():
            if self.ranks.is_main:
                rows = self.write(drafter, range(first, end))
        rows = self.ranks.gather(rows)[0]
        assert rows is not None
        self._written = {name: torch.from_numpy(getattr(rows, name)) for name in NAMES}
        self._began, self._first = due, first

    def write(self, drafter: Drafter, numbers: range) -> PackedRows:
        """The rows of those numbers; training's random numbers and weights do not notice."""
        writing, module = self.writing, drafter.module
        lm = drafter.language_model()
        assert lm is not None, "text_of refuses a drafter that cannot write"
        assert module is not None
        each = writing.seq_len // writing.room
        drawn = range(numbers.start * each, numbers.stop * each)
        prompts = [self._prompt(number) for number in drawn]
        samplings = [
            replace(
                sampling_of(number, writing.plan),
                max_new_tokens=min(writing.plan.new_tokens, writing.room - len(prompt)),
            )
            for number, prompt in zip(drawn, prompts, strict=True)
        ]
        writer = replace(self.target, lm=lm, inflated=None)
        is_training = module.training
        module.eval()
        with untouched_random_state(self.ranks.device), torch.inference_mode():
            engine = Engine(writer, num_slots=slots_for(writer, writing.room))
            requests = [Request(p, s) for p, s in zip(prompts, samplings, strict=True)]
            done = engine.run(requests)
        module.train(is_training)
        documents = [_document(c, writing.train_on_prompt) for c in done]
        plan = [list(range(i, i + each)) for i in range(0, len(documents), each)]
        return laid_out([_opened(d) for d in documents], plan, writing.seq_len, writing.pad_id)

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Prompt of answer `number`: another document of a training row in every epoch."""
        (row,) = self._prompts.take(number, 1)
        most = self.writing.plan.prompt_tokens
        found = document_prompts(self.data, [row], self.data.seq_len, most)
        ids = found[number // self._prompts.num_rows % len(found)]
        return tuple(ids[-max(1, self.writing.room - LEAST_ANSWER) :])

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        row_B = torch.tensor(rows, dtype=torch.long) - self._first
        ids, mask, document, position = (self._written[name][row_B] for name in NAMES)
        return TrainBatch(ids.long(), mask.bool(), document.long(), position.long())

    def tensors(self) -> dict[str, Tensor]:
        if self._began < 0:
            return {}
        return {**self._written, "began_first": torch.tensor([self._began, self._first])}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            self._written = {name: tensors[name] for name in NAMES}
            self._began, self._first = tensors["began_first"].tolist()


def _document(completion: Completion, train_on_prompt: bool) -> Document:
    """An answer behind its prompt; only the answer is predicted, unless the prompt is wanted."""
    prompt, new = completion.request.tokens, completion.tokens
    mask = np.array([train_on_prompt] * len(prompt) + [True] * len(new))
    return Document(np.array([*prompt, *new], dtype=np.int32), mask, "")


def _opened(document: Document) -> Document:
    """The first token of a document has nothing before it and is never predicted."""
    mask = document.mask.copy()
    mask[:1] = False
    return replace(document, mask=mask)


def writing_of(part: DataPart, train: TrainPart, order: Order, pad_id: int) -> Writing | None:
    """How the drafter's text is made by the recipe; None where it writes none."""
    if part.on_policy == 0.0:
        return None
    room = train.seq_len // max(1, train.seq_len // (part.prompt_tokens + part.new_tokens))
    return Writing(
        plan=AnswerPlan(
            prompts=order.num_rows,
            prompt_tokens=part.prompt_tokens,
            new_tokens=part.new_tokens,
            temperature=part.temperature,
            greedy_share=part.greedy_share,
            seed=part.seed,
        ),
        order=order,
        every=part.on_policy_every,
        rows_per_step=train.rows * train.accumulate,
        seq_len=train.seq_len,
        room=room,
        pad_id=pad_id,
        train_on_prompt=part.train_on_prompt,
    )


def text_of(
    writing: Writing | None, target: Target, data: TokenData, drafter: Drafter, ranks: Ranks
) -> Text:
    """What the run reads: the prepared rows, mixed with the drafter's own if wanted."""
    prepared = Prepared(data)
    if writing is None:
        return prepared
    written = OnPolicy(drafter, target, data, writing, ranks)
    return Mixed(prepared, written, writing.order.num_rows)


def check_writer(part: DrafterPart, share: float, drafter: Drafter) -> None:
    """Refuse a drafter that shall write a share of the text, and cannot, or would learn from it
    nothing but its own words."""
    if share == 0.0:
        return
    with drafter.whole() as whole:
        can_write = whole.language_model() is not None
    if not can_write:
        raise RecipeError(
            f"{drafter.family} cannot write text by itself",
            found=f"data.on_policy: {share:g}",
            expected="an independent language model, such as small-lm",
            do="--set data.on_policy=0",
            where="data.on_policy",
        )
    if part.options.get("loss") == "ce":
        raise RecipeError(
            "ce would teach the drafter its own words",
            found=f"drafter.options.loss: ce, data.on_policy: {share:g}",
            expected="a loss that reads the target: kl, rkl, jsd, tv, lk_alpha, lk_hybrid",
            do="--set drafter.options.loss=kl",
            where="drafter.options.loss",
        )
