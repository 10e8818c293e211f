"""Timed comparisons of ways to generate the same text, interleaved in one process.

Every contender answers the same questions under the same sampling, in turn, `repeats` times;
tables give medians of tokens/s and ratios to specctl's own plain decoding on the same target. Each
row states tau and the repetition rate of the outputs (loops flatter n-gram drafters).
Letters: B rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specctl.core.drafter import Drafter
from specctl.models.compiled import CompiledLM
from specctl.models.native.threads import threads_used
from specctl.runtime.generate import default_policy, generate, mark_of
from specctl.runtime.measure.bench_report import BenchReport, BenchRow, CategoryFigures, Runs
from specctl.runtime.measure.cost import equip
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.doubt import doubts
from specctl.runtime.measure.questions import Question
from specctl.runtime.measure.reporter import Advance, Reporter, SilentReporter
from specctl.runtime.measure.roof import Roof
from specctl.runtime.measure.round_cost import RoundCost, Spent
from specctl.runtime.measure.stats import repetition_rate
from specctl.runtime.measure.timed import (
    AnswerCount,
    Timed,
    added,
    joined,
    speedup_error,
    tau_error,
)
from specctl.runtime.policies.base import Policy
from specctl.runtime.sampling.generation_config import described
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

Prompts = Sequence[Sequence[int]]
OnAnswers = Callable[[int], None]  # so many answers of the run are at their end
REPORT_SECONDS = 1.0  # between two reports of a run


def unread(report: BenchReport) -> None:
    """Nobody wants it before the end."""


def unreported(answers: int) -> None:
    """An OnAnswers for whoever does not want to know."""
    del answers


@dataclass(frozen=True, slots=True)
class Contender:
    """A named way to continue prompts: `run(prompts, sampling, on_answers) -> Timed`. `mark`: class
    and rule of what it emits (`verify/choice.py`); None of another program's."""

    name: str
    run: Callable[[Prompts, Sampling, OnAnswers], Timed]
    mark: Callable[[Sampling], str | None] = lambda sampling: None


def engine_contender(
    name: str,
    target: Target,
    drafter: Drafter | None = None,
    policy: Policy | None = None,
    *,
    rule: str = "auto",
    batch: int = 1,
    costs: Callable[[Sampling], CostTable | None] = lambda sampling: None,
    parallel: bool = False,
) -> Contender:
    """specctl's own runtime; `costs` are the prices by which lengths are chosen (None: fixed)."""

    def run(prompts: Prompts, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        chosen = equip(policy, costs(sampling))
        watch = RoundWatch(prompts, batch if not parallel else 1, on_answers)
        result = generate(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            policy=chosen.policy,
            rule=rule,
            batch=batch,
            chooser=chosen.chooser,
            on_round=watch.round,
            parallel=parallel,
        )
        stats, grown = result.stats, chosen.policy
        in_chains = grown.is_chain if grown is not None else default_policy(drafter).is_chain
        return Timed(
            stats.tokens,
            stats.seconds,
            tuple(o.token_ids for o in result.outputs),
            stats.tau,
            stats.draft_share,
            stats.accepted_at,
            stats.tested_at,
            tuple(watch.answers),
            None if parallel else Spent.of(stats, in_chains),
        )

    def mark(sampling: Sampling) -> str:
        grown = policy if policy is not None else default_policy(drafter)
        return mark_of(rule, drafter, grown, target, sampling, parallel)

    return Contender(name, run, mark)


def transformers_contender(
    name: str, model: Any, eos_ids: Sequence[int], **extra: Any
) -> Contender:
    """transformers' own `generate` on the same weights, one prompt at a time; `extra` goes to it
    (`assistant_model=...`, `prompt_lookup_num_tokens=...`)."""

    def run(prompts: Prompts, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        options: dict[str, Any] = {"do_sample": not sampling.greedy, **extra}
        # All is said: what is left out would come from the checkpoint's generation_config.json.
        options["repetition_penalty"] = sampling.repetition_penalty or 1.0
        if not sampling.greedy:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
            options["top_p"] = sampling.top_p or 1.0
            if sampling.min_p is not None or model.generation_config.min_p is not None:
                options["min_p"] = sampling.min_p or 0.0
        options["eos_token_id"] = None if sampling.ignore_eos else list(eos_ids)
        outputs, started = [], time.perf_counter()
        for index, prompt in enumerate(prompts):
            torch.manual_seed(sampling.seed + index)
            ids = torch.tensor([list(prompt)], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=0,
                **options,
            )
            outputs.append(tuple(out[0, len(prompt) :].tolist()))
            on_answers(index + 1)
        seconds = time.perf_counter() - started
        return Timed(sum(map(len, outputs)), seconds, tuple(outputs))

    return Contender(name, run)


class RoundWatch:
    """Counts the rounds of every prompt while a run goes on, and reports answers that are over. One
    writer: the run."""

    def __init__(self, prompts: Prompts, batch: int, on_answers: OnAnswers) -> None:
        self.answers = [AnswerCount() for _ in prompts]
        self._lengths = [len(prompt) for prompt in prompts]
        self._batch, self._on_answers = batch, on_answers
        self._before = self._reported = time.perf_counter()

    def round(self, index: int, new: tuple[int, ...], accepted: int) -> None:
        """An OnRound of generate()."""
        del accepted
        now, answer = time.perf_counter(), self.answers[index]
        answer.count(self._lengths[index] + answer.tokens, len(new))
        if self._batch == 1:
            answer.seconds += now - self._before
            self._before = now
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._on_answers(max(0, index + 1 - self._batch))


def bench(
    target: Target,
    contenders: Sequence[Contender],
    questions: Sequence[Question | Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    repeats: int = 3,
    reporter: Reporter | None = None,
    so_far: Callable[[BenchReport], None] = unread,
) -> BenchReport:
    """Run all contenders interleaved; the first is the baseline. A question may be a prompt as
    token ids. Questions of a category run together, and each contender in turn answers them,
    so that slow minutes of the machine fall on all. One warm-up prompt each, or all of them where
    the target's rounds are recorded: a longer text has others, and may take a new cache.
    Drafters record for each run anew, as they do whenever text is generated. `so_far` is given what
    has been measured whenever all contenders have answered a category more, or all questions again.
    """
    every = [q if isinstance(q, Question) else Question(tuple(q)) for q in questions]
    groups = by_category(every)
    is_recorded = target.device.type == "cuda" or isinstance(target.lm, CompiledLM)
    warming = [one.ids for one in (every if is_recorded else every[:1])]
    reporter = reporter if reporter is not None else SilentReporter()
    rows: list[BenchRow] = []
    answers = sum(one.num_turns for one in every)
    total = len(samplings) * repeats * len(contenders) * answers
    warming_seconds, began = 0.0, time.perf_counter()
    threads = torch.get_num_threads()

    def report(rows: Sequence[BenchRow], runs: int = repeats) -> BenchReport:
        answered = {one.category for row in rows for one in row.categories}
        counts = {name: len(group) for name, group in groups.items() if name in answered}
        return BenchReport(
            tuple(rows),
            target.name,
            target.inflated,
            target.dtype_name,
            str(target.device),
            threads,
            threads_used(threads),
            sum(counts.values()),
            samplings[0].max_new_tokens,
            runs,
            {"warm-up": warming_seconds, "runs": time.perf_counter() - began - warming_seconds},
            counts,
        )

    with reporter.task("bench", total, "answers") as advance:
        for sampling in samplings:
            started = time.perf_counter()
            for contender in contenders:
                advance(0, f"{contender.name}, warming up")
                contender.run(warming, sampling, unreported)
            warming_seconds += time.perf_counter() - started
            runs: Runs = {c.name: [] for c in contenders}
            marks = {c.name: c.mark(sampling) for c in contenders}
            for run in range(1, repeats + 1):
                one_of_each = {c.name: dict[str, Timed]() for c in contenders}
                for category, group in groups.items():
                    for contender in contenders:
                        timed = conversations(target, contender, group, sampling, advance)
                        one_of_each[contender.name][category] = timed
                    if not any(runs.values()):
                        part = {name: [dict(by_group)] for name, by_group in one_of_each.items()}
                        so_far(report([*rows, *_rows(part, sampling, marks)], run))
                for name, by_group in one_of_each.items():
                    runs[name].append(by_group)
                so_far(report([*rows, *_rows(runs, sampling, marks)], run))
            rows += _rows(runs, sampling, marks)
    return replace(report(rows), roof=Roof.of(target))


def by_category(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """The questions of every category, in the order in which categories come."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return groups


def conversations(
    target: Target,
    contender: Contender,
    questions: Sequence[Question],
    sampling: Sampling,
    advance: Advance,
) -> Timed:
    """A contender's conversations about these questions, a turn of all of them after the other. A
    turn for which the context has no room is left out. `answers` of what is returned are by
    question."""
    said: list[list[tuple[int, ...]]] = [[] for _ in questions]
    counts: list[list[AnswerCount]] = [[] for _ in questions]
    parts: list[Timed] = []
    note = f"{contender.name} {questions[0].category}".rstrip()
    for turn in range(max(one.num_turns for one in questions)):
        waiting = [i for i, one in enumerate(questions) if turn < one.num_turns]
        prompts = {i: questions[i].prompt(target, said[i]) for i in waiting if len(said[i]) == turn}
        prompts = {i: ids for i, ids in prompts.items() if len(ids) < target.spec.max_positions}
        done = 0

        def on_answers(answers: int) -> None:
            nonlocal done
            advance(answers - done, note)
            done = answers

        if prompts:
            parts.append(contender.run(list(prompts.values()), sampling, on_answers))
            for place, i in enumerate(prompts):
                said[i].append(parts[-1].token_ids[place])
                counts[i] += parts[-1].answers[place : place + 1]
        advance(len(waiting) - done, note)
    each = tuple(added(one) for one in counts) if all(counts) else ()
    whole = joined(parts)
    return replace(whole, answers=each)


def setting_of(sampling: Sampling) -> str:
    """The name of a sampling in the rows."""
    return described(sampling).replace("temperature ", "T=").replace(",", "")


def _rows(runs: Runs, sampling: Sampling, marks: Mapping[str, str | None]) -> list[BenchRow]:
    """A row for every contender; the first is the baseline."""
    whole = {name: [joined([*run.values()]) for run in each] for name, each in runs.items()}
    baseline = next(iter(runs))
    rows = [_row(name, whole, baseline, runs, sampling) for name in runs]
    return [replace(row, verification=marks[row.name]) for row in rows]


def _row(
    name: str, whole: dict[str, list[Timed]], baseline: str, runs: Runs, sampling: Sampling
) -> BenchRow:
    times, plain = whole[name], whole[baseline]
    last, is_baseline = times[-1], name == baseline
    each = [one.tokens / one.seconds / (base.tokens / base.seconds)
            for one, base in zip(times, plain, strict=True)]  # fmt: skip
    speedup = rate(times) / rate(plain)
    answers = by_question(times)
    context = added(answers)
    return BenchRow(
        name,
        setting_of(sampling),
        last.tau,
        rate(times),
        speedup,
        repetition_rate(last.token_ids),
        last.token_ids == plain[-1].token_ids if sampling.greedy else None,
        last.draft_share,
        last.accepted_per_position,
        last.well_counted,
        () if is_baseline else doubts(speedup, last.tau, last.tokens, each),
        tested_at=last.tested_at,
        tau_error=tau_error(last.answers),
        speedup_error=None if is_baseline else speedup_error(answers, by_question(plain)),
        context_tokens=tuple(context.context_tokens),
        context_rounds=tuple(context.context_rounds),
        round_cost=None if is_baseline else round_cost(times, plain),
        decoding_rate=decoding_rate(times),
        categories=tuple(
            _category(
                category,
                [run[category] for run in runs[name]],
                [run[category] for run in runs[baseline]],
                is_baseline,
            )
            for category in runs[name][-1]
        ),
    )


def round_cost(times: Sequence[Timed], plain: Sequence[Timed]) -> RoundCost | None:
    """Of all runs together; None where a contender does not say how its time was spent."""
    ours, theirs = ([one.spent for one in side if one.spent] for side in (times, plain))
    if len(ours) < len(times) or len(theirs) < len(plain):
        return None
    return RoundCost.of(Spent.sum(ours), Spent.sum(theirs))


def decoding_rate(times: Sequence[Timed]) -> float | None:
    """Tokens a second of all runs, without the time for reading prompts. None where that is not
    known, and where rows are decoded together: the weights are read once for all of them."""
    if any(answer.seconds <= 0 for one in times for answer in one.answers):
        return None
    each = [one.spent for one in times if one.spent is not None]
    if len(each) < len(times) or not each:
        return None
    whole = Spent.sum(each)
    decoding = whole.seconds - whole.prefill
    return whole.tokens / decoding if decoding > 0 else None


def _category(
    category: str, times: Sequence[Timed], plain: Sequence[Timed], is_baseline: bool
) -> CategoryFigures:
    answers = by_question(times)
    return CategoryFigures(
        category,
        times[-1].tau,
        tau_error(times[-1].answers),
        rate(times),
        rate(times) / rate(plain),
        None if is_baseline else speedup_error(answers, by_question(plain)),
    )


def rate(times: Sequence[Timed]) -> float:
    """Tokens a second: the median of the runs."""
    return statistics.median(one.tokens / one.seconds for one in times)


def by_question(times: Sequence[Timed]) -> list[AnswerCount]:
    """What all runs together counted of every question; nothing where one counted none."""
    if len({len(one.answers) for one in times}) > 1:
        return []
    return [added(column) for column in zip(*(one.answers for one in times), strict=True)]
