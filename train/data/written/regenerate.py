"""The target writes the answers: a drafter must match the target's own words, not a data set's.

Partly greedily, partly by sampling, each turn with its own seed; kept as the exact token ids that
the target drew (text would not always encode back to them). What the answers are depends on the
plan alone. Every process writes its share of those that are missing, and keeps each when it is
written (`journal.py`).
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from specctl.core.errors import SpecctlError
from specctl.core.forward.slot_state import PENDING
from specctl.core.storage.files import digest_of
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.image_rows import with_images
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import Advance, Reporter, SilentReporter
from specctl.runtime.target.placement.device import PACKED
from specctl.runtime.target.target import Target
from specctl.train.data.images.shown_images import ImageReader, stored
from specctl.train.data.prompts.answers import (
    OVER,
    AnswerJob,
    AnswerPlan,
    AnswerWriter,
    Done,
    PromptCut,
    Turn,
    WrittenAnswer,
    sampling_of,
)
from specctl.train.data.prompts.prompts import longest_prompt, prompt_key
from specctl.train.data.written.journal import AnswerJournal
from specctl.train.distributed.ranks import Ranks

GPU_ROWS, HOST_ROWS = 64, 32  # that are written together at most
HOST_BYTES = 2 << 30  # of their KV cache on the host


class EngineWriter:
    """The target in this process, in one run of the engine: a row that has ended makes room for the
    next prompt at once. `batch` rows together; None takes what suits the device and its memory."""

    name = "engine"

    def __init__(self, target: Target, longest: int, batch: int | None = None) -> None:
        slots = slots_for(target, longest) if batch is None else batch
        self.longest = min(longest, target.spec.max_positions)
        self.engine = Engine(target, num_slots=max(1, slots))

    def write(self, jobs: Iterator[AnswerJob], done: Done) -> None:
        engine, waiting = self.engine, deque[AnswerJob]()
        engine.open(self.longest)
        open_jobs: dict[int, AnswerJob] = {}
        while True:
            while len(open_jobs) < engine.num_slots:
                job = waiting.popleft() if waiting else next(jobs, None)
                if job is None:
                    break
                open_jobs[job.index] = job
                request = Request(tuple(job.prompt_ids), job.sampling)
                engine.submit(job.index, with_images(self.engine.target, request, job.images))
            if not open_jobs:
                return
            for emission in engine.step():
                row = emission.row
                if row.finished is None:
                    continue
                ended = row.completion()
                more = done(open_jobs.pop(row.index), ended.tokens, ended.finish_reason)
                if more is not None:
                    waiting.append(more)


def slots_for(target: Target, longest: int, budget: int | None = None) -> int:
    """Rows whose caches fit a quarter of the free GPU memory, or `HOST_BYTES` (`budget`)."""
    is_cuda = target.device.type == "cuda"
    if budget is None:
        budget = torch.cuda.mem_get_info(target.device)[0] // 4 if is_cuda else HOST_BYTES
    most = GPU_ROWS if is_cuda else HOST_ROWS
    position = sum(layer.size for layer in target.lm.kv_layers) * target.dtype.itemsize
    of_row = position * longest, target.lm.state_bytes, target.lm.pending_bytes
    return rows_within(budget, most, *of_row)


def rows_within(budget: int, most: int, keys: int, states: int = 0, pending: int = 0) -> int:
    """How many rows so many bytes hold, of `keys` for keys and values and `states` for recurrent
    layers each, beside what is `pending` of each prompt token that is read at once."""
    return max(1, min(most, (budget - PENDING * pending) // max(1, keys + states)))


def answers_digest(
    target: Target, prompts: Sequence[PromptCut], plan: AnswerPlan, writer: str
) -> str:
    """Names the answers: the target, its precision and its chat template, the prompts, how they are
    answered. What a server's precision is, and where it is, is not known here and does not count;
    nor does the day that a template writes."""
    is_here = writer == EngineWriter.name
    how = {**asdict(plan), "date": None}
    if not plan.first:
        del how["first"]  # as in answers that were written before it was known
    return digest_of(
        {
            "format": 4,
            "target": target.fingerprint,
            "template": target.template_digest,
            "inflated": target.inflated,
            "writer": _precision(target) if is_here else writer,
            "plan": how,
            "prompts": digest_of({"all": [[prompt_key(p).hex(), p.domain] for p in prompts]}),
        }
    )


def _precision(target: Target) -> str:
    return PACKED if target.dtype_name == PACKED else str(target.dtype)


def regenerate(
    target: Target,
    prompts: Sequence[PromptCut],
    plan: AnswerPlan,
    folder: Path,
    *,
    batch: int | None = None,
    console: Reporter | None = None,
    writer: AnswerWriter | None = None,
    ranks: Ranks | None = None,
    reader: ImageReader | None = None,
) -> list[WrittenAnswer]:
    """The target's answers to the prompts, in their order; those in `folder` are read, not redone.
    They are written by `writer`, else by the engine, each rank its share. Prompts that a server
    could not answer are left out. `reader`: of the images of prompts that have some."""
    console = console if console is not None else SilentReporter()
    ranks = ranks if ranks is not None else Ranks()
    if not prompts:
        raise SpecctlError("there are no prompts to answer", do="give data.source more text")
    if writer is None:
        writer = EngineWriter(target, _longest(target, prompts, plan), batch)
    digest = answers_digest(target, prompts, plan, writer.name)
    home = folder / f"answers-{digest[:12]}"
    with AnswerJournal(home, digest, ranks.rank) as journal:
        with ranks.together():  # nobody appends before all have read
            found = journal.read()
        desk = _Desk(target, prompts, plan, journal, found.turns, reader)
        missing = [i for i in range(len(prompts)) if desk.next_job(i) is not None]
        if found.num_damaged:
            console.warn(f"regenerate: {found.num_damaged:,} damaged records, answered anew")
        if len(missing) < len(prompts):
            done = f"{len(prompts) - len(missing):,} of {len(prompts):,} prompts are answered"
            console.say(f"regenerate: {done}, {len(missing):,} are left to write")
        mine = missing[ranks.rank :: ranks.size]
        label = "the target writes answers" + (f" (1 of {ranks.size})" if ranks.size > 1 else "")
        with ranks.together(), console.task(label, len(mine), "prompts") as advance:
            if mine:
                desk.write(writer, mine, advance)
    turns = desk.turns if ranks.size == 1 else AnswerJournal(home, digest).read().turns
    answers = [
        WrittenAnswer(prompt, tuple(turns[i]), sampling_of(i, plan).temperature == 0.0)
        for i, prompt in enumerate(prompts)
        if turns.get(i)
    ]
    if answers:
        console.say(_summary(answers))
    return answers


def _longest(target: Target, prompts: Sequence[PromptCut], plan: AnswerPlan) -> int:
    """Positions of the longest row: later prompts of a conversation are yet unknown."""
    if any(prompt.num_turns > 1 for prompt in prompts):
        return longest_prompt(target, plan) + plan.new_tokens
    return max(len(prompt.ids) for prompt in prompts) + plan.new_tokens


class _Desk:
    """Hands out the turns that are missing and takes in those that are written. One writer: the
    process that answers."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[PromptCut],
        plan: AnswerPlan,
        journal: AnswerJournal,
        turns: dict[int, list[Turn]],
        reader: ImageReader | None = None,
    ) -> None:
        self.reader = reader
        self.target, self.prompts, self.plan = target, prompts, plan
        self.journal, self.turns = journal, turns

    def write(self, writer: AnswerWriter, indices: Sequence[int], advance: Advance) -> None:
        """Have these prompts answered."""
        started, num_tokens = time.perf_counter(), 0

        def jobs() -> Iterator[AnswerJob]:
            for index in indices:
                job = self.next_job(index)
                if job is not None:
                    yield self._shown(job)

        def done(job: AnswerJob, new_ids: Sequence[int], reason: str) -> AnswerJob | None:
            nonlocal num_tokens
            turn = Turn(array("i", job.prompt_ids), array("i", new_ids), reason)
            turns = self.turns.setdefault(job.index, [])
            self.journal.append(job.index, job.turn, turns[-1] if turns else None, turn)
            turns.append(turn)
            num_tokens += len(new_ids)
            more = self.next_job(job.index)
            if more is None:
                advance(1, f"{num_tokens / (time.perf_counter() - started):,.0f} tok/s")
            return None if more is None else self._shown(more)

        writer.write(jobs(), done)

    def _shown(self, job: AnswerJob) -> AnswerJob:
        """The job with what stands at the placeholders of its images, read by the tower now."""
        prompt = self.prompts[job.index]
        if not prompt.images:
            return job
        assert self.reader is not None, "prompts with images come with their reader"
        images = stored(job.prompt_ids, prompt.images)
        return replace(job, images=self.reader.seen(job.prompt_ids, images)) if images else job

    def next_job(self, index: int) -> AnswerJob | None:
        """The next turn of a prompt; None where it has all its answers. A conversation also ends
        with an answer that was cut off, and where its next prompt would not fit."""
        prompt, turns = self.prompts[index], self.turns.get(index, [])
        number = len(turns)
        if number == 0:
            return AnswerJob(index, 0, prompt.ids, sampling_of(index, self.plan))
        if number >= prompt.num_turns or turns[-1].finish_reason != OVER:
            return None
        assert prompt.dialogue is not None, "a text is answered once"
        answers = [self.target.decode(turn.new_ids) for turn in turns]
        try:
            variables = self.plan.variables(self.target.tokenizer)
            ids = prompt.dialogue.prompt(self.target.tokenizer, variables, answers)
            if prompt.images and self.reader is not None:
                places = self.reader.places(prompt.dialogue.said(answers), self.target.tokenizer)
                ids = self.reader.expanded(ids, prompt.images, places)
        except ValueError:
            return None
        fits = len(ids) <= longest_prompt(self.target, self.plan)
        is_known = max(ids) < self.target.spec.vocab_size
        sampling = sampling_of(index, self.plan, number)
        return AnswerJob(index, number, ids, sampling) if fits and is_known else None


def _summary(answers: Sequence[WrittenAnswer]) -> str:
    num_tokens = sum(a.num_tokens for a in answers)
    num_turns = sum(len(a.turns) for a in answers)
    ended = sum(turn.finish_reason == OVER for a in answers for turn in a.turns) / num_turns
    greedy = sum(a.is_greedy for a in answers) / len(answers)
    turns = f" in {len(answers):,} conversations" if num_turns > len(answers) else ""
    return (
        f"answers: {num_turns:,}{turns} with {num_tokens:,} tokens "
        f"(mean {num_tokens / num_turns:.0f}, {ended:.0%} ended by themselves, "
        f"{greedy:.0%} greedy)"
    )
