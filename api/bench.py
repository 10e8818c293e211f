"""bench(): timed comparisons of drafters against plain decoding, as `specctl bench` makes them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specctl.api.against import cannot_assist, parse_against, transformers_contenders
from specctl.api.arguments.arguments import MOST_ROWS, check_count
from specctl.api.arguments.attention_only import attention_only
from specctl.api.arguments.drafting import DrafterLike, LoadedDraft, load_draft
from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.prompts import Prompt
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.bench_questions import bench_material
from specctl.api.failures import raises_user_errors
from specctl.core.drafter import Drafter
from specctl.runtime.measure import bench as measure
from specctl.runtime.measure.bench import Contender, engine_contender, unread
from specctl.runtime.measure.bench_report import BenchReport
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

MOST_REPEATS, MOST_PROMPTS = 1000, 1 << 20
DEFAULT_DRAFTS = ("prompt-lookup", "token-recycling")
DEFAULT_SAMPLINGS = (Sampling(), Sampling(temperature=0.8))
SUITE_SAMPLINGS = (Sampling(), Sampling(temperature=1.0))  # as the papers measure


@raises_user_errors
def bench(
    target: TargetLike = None,
    drafters: DrafterLike | Sequence[DrafterLike] = DEFAULT_DRAFTS,
    *,
    prompts: Path | Prompt | Sequence[Prompt] | None = None,
    suites: str | Sequence[str] = (),
    num_prompts: int | None = None,
    limit: int | None = None,
    domain: str | None = None,
    chat: bool | None = None,
    samplings: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    repeats: int = 3,
    batch: int = 1,
    against: str | Sequence[str] = (),
    progress: Progress = None,
    so_far: Callable[[BenchReport], None] = unread,
    **drafting: Any,
) -> BenchReport:
    """Measure tau, tokens per second and speed-up of drafters, interleaved in one process; ratios
    are to plain decoding by specctl on the same target.

    `prompts`: texts, or a Path to a file of them; else the held-out prompts (`num_prompts`, of that
    `domain`). `suites` instead: public question sets by name ("spec-bench", "humaneval", ...), each
    NAME or NAME=PATH, with commas between, at most `limit` questions of every category; questions
    that follow each other are answered in turn. `chat` as in `generate`. `samplings`: else greedy
    and T = 0.8, of suites greedy and T = 1.
    `against`: more baselines, "ngram" (prompt-lookup) and "hf" (transformers' own generate, plain
    and assisted by the same drafters). `drafting` is how to draft, as in `generate`, but lengths
    are fixed unless `adaptive` is true. What a round costs here is kept, and chooses the draft
    lengths of `generate` from then on. `so_far` is given a report of what has been measured,
    category by category and run by run.
    """
    reporter = as_reporter(progress)
    check_count("batch", batch, MOST_ROWS)
    check_count("repeats", repeats, MOST_REPEATS)
    for name, count in (("num_prompts", num_prompts), ("limit", limit)):
        if count is not None:
            check_count(name, count, MOST_PROMPTS)
    wanted_suites = suite_words(suites)
    baselines = parse_against(against if isinstance(against, str) else ",".join(against))
    listed: list[Any] = (
        [drafters]
        if drafters is None or isinstance(drafters, (str, Path, Drafter, LoadedDraft))
        else list(drafters)
    )
    wanted = attention_only(listed, *map(drafting.get, ("parallel", "policy", "rule")))
    model = target_or_own(target, *listed, wanted=wanted)
    material = bench_material(
        model, prompts, wanted_suites,
        num_prompts=num_prompts, limit=limit, domain=domain, chat=chat,
    )  # fmt: skip
    ids = [question.ids for question in material.questions]
    drafts = _loaded([*listed, *(["prompt-lookup"] if "ngram" in baselines else [])], model,
                     drafting, reporter)  # fmt: skip
    if samplings is None:
        samplings = SUITE_SAMPLINGS if wanted_suites else DEFAULT_SAMPLINGS
    several = [samplings] if isinstance(samplings, Sampling) else samplings
    settings = [replace(one, seed=seed, max_new_tokens=max_new_tokens) for one in several]
    contenders = [engine_contender("plain", model, batch=batch)]
    began = time.perf_counter()
    with reporter.task("measuring what a round costs", len(drafts), "drafters") as advance:
        for draft in drafts:
            contenders.append(_contender(draft, model, batch, ids, settings))
            advance(1, draft.name)
    costs_seconds = time.perf_counter() - began

    def of_material(report: BenchReport) -> BenchReport:
        return replace(report, suites=material.suites, chat=material.chat, notes=material.notes)

    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        if "hf" in baselines:
            contenders += _transformers(reporter, model, drafts, Path(folder), batch)
        found = measure.bench(
            model,
            contenders,
            material.questions,
            settings,
            repeats=repeats,
            reporter=reporter,
            so_far=lambda part: so_far(of_material(part)),
        )
    return of_material(found).after("costs of a round", costs_seconds)


def suite_words(suites: str | Sequence[str]) -> tuple[str, ...]:
    """`spec-bench,humaneval` -> the suites of that name, each once."""
    words = suites.split(",") if isinstance(suites, str) else suites
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip()))


def _loaded(
    wanted: Sequence[Any], model: Target, drafting: Mapping[str, Any], reporter: Reporter
) -> list[LoadedDraft]:
    """The drafters, each under a name of its own; plain decoding is no drafter."""
    drafts, names = list[LoadedDraft](), list[str]()
    for one in wanted:
        draft = load_draft(one, model, **({} if isinstance(one, LoadedDraft) else drafting))
        same = names.count(draft.name)
        if draft.drafter is None or (same and not isinstance(one, Drafter)):
            continue
        if draft is not one:
            draft.announce(reporter)
        names.append(draft.name)
        drafts.append(replace(draft, name=f"{draft.name} {same + 1}") if same else draft)
    return drafts


def _transformers(
    reporter: Reporter, model: Target, drafts: Sequence[LoadedDraft], folder: Path, batch: int
) -> list[Contender]:
    for name in cannot_assist(drafts):
        reporter.warn(f"transformers cannot draft with {name}: no row for it")
    if batch > 1:
        reporter.warn("transformers decodes one prompt at a time, specctl here several at once")
    return list(transformers_contenders(model, drafts, folder))


def _contender(
    loaded: LoadedDraft,
    model: Target,
    batch: int,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> Contender:
    """The drafter as it is served. Its costs are measured anew, for whoever generates later."""
    size = min(batch, len(prompts))
    measured = {
        sampled: loaded.costs(model, prompts, size, sampled=sampled, measure=True)
        for sampled in {not one.greedy for one in samplings}
    }
    return engine_contender(
        loaded.name,
        model,
        loaded.drafter,
        loaded.policy,
        rule=loaded.rule,
        batch=batch,
        costs=lambda one: measured[one.temperature > 0] if loaded.is_adaptive else None,
        parallel=loaded.parallel,
    )
