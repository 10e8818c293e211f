"""`specctl bench`: timed comparisons of drafters against plain decoding, in one table."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.against import parse_against
from specctl.api.arguments.outputs import check_file, check_plot, write_report
from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.options.flags import DRAFTING, Compile, Seed
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.measuring import (
    Batch,
    QuestionFlags,
    Repeats,
    TokensEach,
    WrittenFlags,
    chat_words,
)
from specctl.cli.options.names import complete_draft
from specctl.cli.options.prompts import tell_chat
from specctl.cli.options.sampling import GenerationConfig, check_choice, followed, tell
from specctl.cli.options.target_choice import OWN_WRITING, TargetChoice, WritingChoice, loading
from specctl.core.errors import GateError, RecipeError
from specctl.core.messages.printable import counted

if TYPE_CHECKING:
    from specctl.runtime.measure.bench_report import BenchReport, BenchRow
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

COMPARISONS = {">=": float.__ge__, "<=": float.__le__, ">": float.__gt__, "<": float.__lt__}


def bench(
    console: Console,
    drafting: DraftingFlags,
    questions: QuestionFlags,
    written: WrittenFlags,
    target: WritingChoice = OWN_WRITING,
    drafters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFTER]...",
            help="Package or run folders, or drafters' names; else prompt-lookup and "
            "token-recycling.",
            autocompletion=complete_draft,
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            help="The same as DRAFTER (repeatable).",
            autocompletion=complete_draft,
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    max_new_tokens: TokensEach = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            help="Sampling temperature (repeatable); else greedy and 0.8, of suites greedy and 1.",
        ),
    ] = None,
    repeats: Repeats = 3,
    batch: Batch = 1,
    gate: Annotated[
        list[str] | None,
        typer.Option(help='Fail (exit 8) unless every drafter meets it, e.g. "speedup>=1.3".'),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="LIST",
            help="More baselines, with commas: ngram (prompt-lookup), hf (transformers' generate, "
            "plain and assisted by the same drafts); plain is always there.",
        ),
    ] = None,
    generation_config: GenerationConfig = None,
    seed: Seed = 0,
    compiled: Compile = None,
) -> None:
    """Measure tau, tokens per second and speed-up of drafters, interleaved in one process.

    Speed-ups are over plain decoding by specctl on the same target. The repetition rate of the
    outputs is shown because text that repeats itself favours drafters that copy.

    --suite measures on public question sets, by category, conversations turn by turn.

    The cost of a round is measured and stored, so that generate can choose its draft lengths by it.
    bench itself keeps the lengths of each drafter, as papers do, unless --adaptive is given.

    Examples:

      specctl bench auto prompt-lookup --target model.gguf --prompts prompts.txt
      specctl bench runs/quickstart prompt-lookup --plot bench.png
      specctl bench prompt-lookup --suite humaneval,gsm8k --limit 4 --card bench.md
      specctl bench runs/distill --against hf --dtype float32
      specctl bench prompt-lookup --inflate 300m --num-prompts 4 --temperature 0
      specctl bench runs/quickstart --gate "speedup>=1.2" --json
    """
    gates = [parse_gate(text) for text in gate or ()]
    baselines = parse_against(against or "")
    check_choice(generation_config)
    names = list(dict.fromkeys([*(drafters or ()), *(draft or ())]))
    drafting.check(*names)
    questions.check()
    check_plot(written.plot)
    for file in (written.out, written.card):
        check_file(file)
    target = target.or_own(*names)
    from specctl.api.bench import DEFAULT_DRAFTS
    from specctl.api.bench import bench as bench_
    from specctl.api.measured.machine import made_by

    measured: list[BenchReport] = []  # the last one says all that was measured
    console.remains = partial(_remaining, console, measured, time.time())
    console.say(loading(target))
    began = time.perf_counter()
    model = target.load(console, compiled, wanted=drafting.wanted(*names))
    tell_chat(console, model, questions.chat)
    heats = temperature or ((0.0, 1.0) if questions.suites else (0.0, 0.8))
    samplings = _samplings(console, model, generation_config, temperature, heats)
    drafts = [drafting.of(n).load(model) for n in names or DEFAULT_DRAFTS]
    for loaded in drafts:
        loaded.announce(console)
    loading_seconds = time.perf_counter() - began
    report = bench_(
        model,
        drafts,
        prompts=questions.prompts,
        suites=questions.suites,
        num_prompts=questions.num_prompts,
        limit=questions.limit,
        domain=questions.domain,
        chat=questions.chat,
        samplings=samplings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        repeats=repeats,
        batch=batch,
        against=baselines,
        progress=console,
        so_far=measured.append,
        **drafting.given(),
    ).after("loading", loading_seconds)
    _show(console, report)
    made = made_by(["specctl", *sys.argv[1:]], model.device)
    result = {**report.to_json(), "target": target_json(model), "batch": batch, "made": made}
    console.result = result
    _write(console, report, result, written)
    check_gates(report.rows, gates)
    following = _next(report, [d.name for d in drafts], target, drafting, questions)
    console.done(result, next=[following])


def _show(console: Console, report: BenchReport) -> None:
    """The table; of suites also those by category, position and context."""
    console.show(report.table())
    for title, table in report.details().items() if report.suites else ():
        console.out()
        console.table(table.columns, table.rows, title)


def _write(
    console: Console, report: BenchReport, result: dict[str, Any], written: WrittenFlags
) -> None:
    """The files that were requested."""
    if written.out is not None:
        write_report(written.out, result)
    if written.plot is not None:
        result["plot"] = str(written.plot)
        _draw(report, written.plot)
        console.say(f"picture: {written.plot}")
    if written.card is not None:
        from specctl.api.measured.bench_card import bench_card
        from specctl.core.storage.files import write_bytes

        result["card"] = str(written.card)
        card = bench_card(report, result["made"])
        written.card.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(written.card, card.encode())
        console.say(f"card: {written.card}")


def _remaining(console: Console, measured: Sequence[BenchReport], since: float) -> str | None:
    """What a benchmark that was stopped leaves: the table of what it had measured, which is shown,
    and the costs of rounds."""
    from specctl.api.measured.cost_cache import count_since

    count, kept = count_since(since), list[str]()
    if count:
        kept.append(f"kept: {counted(count, 'table')} of what a round costs here")
    if measured:
        report = measured[-1]
        _show(console, report)
        console.result = {**report.to_json(), "stopped": True}
        place = "in the result" if console.json else "above"
        kept.append(f"{place}: what was measured, of {counted(report.num_prompts, 'question')}")
    elif count:
        kept.append("of this benchmark nothing was saved")
    return "; ".join(kept) or None


def _draw(report: BenchReport, path: Path) -> None:
    """Speed-up of every drafter and setting; of the first setting acceptance by position, and what
    a round brings and costs."""
    from specctl.train.metrics.comparison_plot import save_comparison

    names = list(dict.fromkeys(row.name for row in report.rows))
    speeds: dict[str, dict[str, float]] = {}
    for row in report.rows:
        speeds.setdefault(row.setting, {})[row.name] = row.speedup
    series = {setting: [by.get(name) for name in names] for setting, by in speeds.items()}
    first = report.rows[0].setting
    positions = {
        row.name: row.well_counted
        for row in report.rows
        if row.setting == first and row.well_counted
    }
    rounds = {
        row.name: (row.round_cost.total, row.round_cost.tau)
        for row in report.rows
        if row.setting == first and row.round_cost is not None
    }
    about = f"{report.target} {report.dtype} on {report.device}"
    about += f", inflated to {report.inflated}" if report.inflated else ""
    save_comparison(names, series, positions, f"Speculative decoding of {about}", path, rounds)


def _samplings(
    console: Console,
    target: Target,
    choice: str | None,
    heats: Sequence[float] | None,
    default: Sequence[float] = (0.0, 0.8),
) -> list[Sampling]:
    """What is measured: each temperature that was given, else the default ones, or what the
    target's generation_config.json sets where that is followed."""
    from specctl.runtime.sampling.generation_config import SETTINGS
    from specctl.runtime.sampling.sampling import Sampling

    suggested, nothing = followed(console, target, choice), dict.fromkeys(SETTINGS)
    if suggested is None:
        found = [Sampling(temperature=heat) for heat in heats or default]
    else:
        given = [suggested.fill({**nothing, "temperature": heat}) for heat in heats or (None,)]
        found = [Sampling(**{**one, "temperature": one["temperature"] or 0.0}) for one in given]
    tell(console, target, choice, found)
    return found


def parse_gate(text: str) -> tuple[str, str, float]:
    """`speedup>=1.3` -> ("speedup", ">=", 1.3)."""
    match = re.fullmatch(
        r"\s*(speedup|tau|tokens_per_second)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*", text
    )
    if match is None:
        raise RecipeError(
            f"the gate {text!r} cannot be read",
            where="--gate",
            found=text,
            expected="speedup, tau or tokens_per_second, then >=, <=, > or <, then a number",
            do='--gate "speedup>=1.3"',
        )
    return match[1], match[2], float(match[3])


def check_gates(rows: Sequence[BenchRow], gates: Sequence[tuple[str, str, float]]) -> None:
    """Refuse the first drafter that misses a gate; plain decoding is exempt."""
    for row in rows:
        for figure, sign, bound in gates:
            value = getattr(row, figure)
            if row.name == "plain" or value is None or COMPARISONS[sign](float(value), bound):
                continue
            raise GateError(
                f"{row.name} misses the gate",
                where=f"row {row.name}, {row.setting}",
                found=f"{figure} {value:.3f}",
                expected=f"{figure} {sign} {bound:g}",
                do="train longer (specctl train-draft), try --length 3, or lower the gate",
            )


def _next(
    report: BenchReport,
    drafts: Sequence[str],
    target: TargetChoice,
    drafting: DraftingFlags,
    questions: QuestionFlags | None = None,
) -> str:
    """The winner where there is one; where that is doubtful, a measurement that says more; else how
    to train a drafter. Other baselines, and a drafter that stands there twice, are no name of a
    drafter."""
    drafted = [row for row in report.rows if row.name in drafts]
    winners = [row for row in drafted if row.is_winner]
    if winners:
        best = max(winners, key=lambda row: row.speedup)
        words = [*target.words(), "--draft", best.name, *drafting.words()]
        return with_text("generate", *words, *chat_words(questions.chat if questions else None))
    if not any(row.doubts for row in drafted):
        return command_line("train-draft", *target.training_words(), "--recipe", "distill")
    names = dict.fromkeys(row.name for row in drafted)
    prompts, tokens = max(12, 2 * report.num_prompts), max(64, report.new_tokens)
    which: list[Any] = ["--num-prompts", prompts]
    if report.suites and questions is not None:
        which = questions.words()
    more = ("--max-new-tokens", tokens, "--repeats", report.repeats + 2)
    spoken = chat_words(questions.chat if questions else None)
    return command_line("bench", *target.words(), *names, *drafting.words(), *which, *more, *spoken)
