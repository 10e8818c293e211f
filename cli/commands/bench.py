"""`specctl bench`: timed comparisons of drafters against plain decoding, in one table."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.against import parse_against
from specctl.api.outputs import check_file, check_plot, write_report
from specctl.api.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.commands.bench_families import (
    FAMILIES_OUT,
    Heat,
    Plot,
    TrainingBudget,
    compare_families,
)
from specctl.cli.options.flags import DRAFTING, Compile, Seed
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.measuring import (
    Batch,
    Domain,
    NumPrompts,
    PromptFile,
    Repeats,
    TokensEach,
)
from specctl.cli.options.names import complete_draft
from specctl.cli.options.sampling import GenerationConfigFlag, check_choice, followed, tell
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice, loading
from specctl.core.errors import GateError, RecipeError
from specctl.core.printable import counted

if TYPE_CHECKING:
    from specctl.runtime.measure.bench import BenchReport, BenchRow
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

COMPARISONS = {">=": float.__ge__, "<=": float.__le__, ">": float.__gt__, "<": float.__lt__}


def bench(
    console: Console,
    drafting: DraftingFlags,
    target: TargetChoice = OWN_TARGET,
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
    prompts: PromptFile = None,
    num_prompts: NumPrompts = 16,
    domain: Domain = None,
    max_new_tokens: TokensEach = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Sampling temperature (repeatable); else greedy and 0.8."),
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
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the result as JSON."),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            "--families",
            metavar="all|LIST",
            help="The same as specctl bench-families.",
            hidden=True,
        ),
    ] = None,
    budget_steps: Annotated[
        int | None,
        typer.Option(
            "--budget-steps",
            min=1,
            help="Training steps of every family.",
            hidden=True,
        ),
    ] = None,
    plot: Plot = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Of the recipes of --families.", hidden=True
        ),
    ] = None,
    generation_config: GenerationConfigFlag = None,
    seed: Seed = 0,
    compiled: Compile = None,
) -> None:
    """Measure tau, tokens per second and speed-up of drafters, interleaved in one process.

    Speed-ups are over plain decoding by specctl on the same target. The repetition rate of the
    outputs is shown because text that loops flatters drafters that look things up.

    The cost of a round is measured and kept, and generate then chooses its draft lengths by it.

    Examples:

      specctl bench runs/quickstart prompt-lookup --plot bench.png
      specctl bench runs/distill --against hf --dtype float32
      specctl bench prompt-lookup --inflate 300m --num-prompts 4 --temperature 0
      specctl bench runs/quickstart --gate "speedup>=1.2" --json
    """
    gates = [parse_gate(text) for text in gate or ()]
    baselines = parse_against(against or "")
    check_choice(generation_config)
    draft = [*(drafters or ()), *(draft or ())] or None
    drafting.check(*(draft or ()))
    check_plot(plot)
    target = target.or_own(*(draft or ()))
    refuse_ignored(
        families,
        {"--draft": draft, "--gate": gate, "how to draft": drafting != DraftingFlags() or None,
         "--against ngram": "ngram" in baselines or None, "--generation-config": generation_config},
        {"--budget-steps": budget_steps, "--set": sets},
    )  # fmt: skip
    if families is not None:
        budget = TrainingBudget(
            families, target, budget_steps, tuple(sets or ()), out or FAMILIES_OUT
        )
        heats = tuple(temperature or (0.0,))
        heat = Heat(
            prompts, num_prompts, domain, max_new_tokens, heats, repeats, batch, seed, compiled,
            "hf" in baselines,
        )  # fmt: skip
        compare_families(console, budget, heat, plot)
        return
    check_file(out)
    from specctl.api.bench import DEFAULT_DRAFTS
    from specctl.api.bench import bench as bench_

    console.remains = partial(_remaining, time.time())
    console.say(loading(target))
    began = time.perf_counter()
    model = target.load(console, compiled)
    samplings = _samplings(console, model, generation_config, temperature)
    drafts = [drafting.of(n).load(model) for n in dict.fromkeys(draft or DEFAULT_DRAFTS)]
    for loaded in drafts:
        loaded.announce(console)
    loading_seconds = time.perf_counter() - began
    report = bench_(
        model,
        drafts,
        prompts=prompts,
        num_prompts=num_prompts,
        domain=domain,
        samplings=samplings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        repeats=repeats,
        batch=batch,
        against=baselines,
        progress=console,
        **drafting.given(),
    )
    report = report.after("loading", loading_seconds)
    console.show(report.table())
    result = {**report.to_json(), "target": target_json(model), "batch": batch}
    console.result = result
    if out is not None:
        write_report(out, result)
    if plot is not None:
        result["plot"] = str(plot)
        _draw(report, plot)
        console.say(f"picture: {plot}")
    check_gates(report.rows, gates)
    console.done(result, next=[_next(report, [d.name for d in drafts], target, drafting)])


def _remaining(since: float) -> str | None:
    """What a benchmark that was stopped leaves: its table is written at its end."""
    from specctl.api.cost_cache import count_since

    if not (count := count_since(since)):
        return None
    told = f"kept: {counted(count, 'table')} of what a round costs here"
    return f"{told}; of this benchmark nothing was saved"


def _draw(report: BenchReport, path: Path) -> None:
    """Speed-up of every drafter and setting, and acceptance by position in the first setting."""
    from specctl.train.comparison_plot import save_comparison

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
    about = f"{report.target} {report.dtype} on {report.device}"
    about += f", inflated to {report.inflated}" if report.inflated else ""
    save_comparison(names, series, positions, f"Speculative decoding of {about}", path)


def _samplings(
    console: Console, target: Target, choice: str | None, heats: Sequence[float] | None
) -> list[Sampling]:
    """What is measured: each temperature that was given, else greedy and 0.8, or what the target's
    generation_config.json asks for where that is followed."""
    from specctl.runtime.sampling.generation_config import SETTINGS
    from specctl.runtime.sampling.sampling import Sampling

    suggested, nothing = followed(console, target, choice), dict.fromkeys(SETTINGS)
    if suggested is None:
        found = [Sampling(temperature=heat) for heat in heats or (0.0, 0.8)]
    else:
        given = [suggested.fill({**nothing, "temperature": heat}) for heat in heats or (None,)]
        found = [Sampling(**{**one, "temperature": one["temperature"] or 0.0}) for one in given]
    tell(console, target, choice, found)
    return found


def refuse_ignored(
    families: str | None, without: Mapping[str, object], only_with: Mapping[str, object]
) -> None:
    """Flags that say nothing beside --families, or nothing without it."""
    wrong, word = (only_with, "only goes with") if families is None else (without, "is ignored by")
    for flag, value in wrong.items():
        if value is not None:
            raise RecipeError(
                f"{flag} {word} --families",
                where="the command line",
                found=flag,
                expected="flags that change what is measured",
                do=f"leave {flag} out" if families else "add --families all",
            )


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
    report: BenchReport, drafts: Sequence[str], target: TargetChoice, drafting: DraftingFlags
) -> str:
    """The winner where there is one; where that is doubtful, a measurement that says more; else how
    to train a drafter. Other baselines, and a drafter that stands there twice, are no name of a
    drafter."""
    drafted = [row for row in report.rows if row.name in drafts]
    winners = [row for row in drafted if row.is_winner]
    if winners:
        best = max(winners, key=lambda row: row.speedup)
        return with_text("generate", *target.words(), "--draft", best.name, *drafting.words())
    if not any(row.doubts for row in drafted):
        return command_line("train-draft", *target.training_words(), "--recipe", "distill")
    names = dict.fromkeys(row.name for row in drafted)
    prompts, tokens = max(12, 2 * report.num_prompts), max(64, report.new_tokens)
    more = ("--num-prompts", prompts, "--max-new-tokens", tokens, "--repeats", report.repeats + 2)
    return command_line("bench", *target.words(), *names, *more)
