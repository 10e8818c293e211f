"""`specctl quickstart` on a chat model: a question, a drafter, its proof, a measurement, a verdict.

Training takes the part of the time that the other steps leave; where that is too short for this
machine, drafters without training are measured alone. Each finished step is kept in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, noted
from specctl.cli.app.progress import duration
from specctl.cli.commands.adapt import drafter_fields
from specctl.cli.commands.quickstart_story import StoryPlace, StoryReporter, prove, train
from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted
from specctl.core.storage.files import digest_of, write_json
from specctl.recipes.load import with_fields
from specctl.recipes.published import published_folder
from specctl.recipes.section import flatten
from specctl.runtime.measure.doubt import PAYS, SLACK, SURE, standing
from specctl.runtime.measure.round_cost import RoundCost

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.api.generate import GenerateResult
    from specctl.recipes.schema import DataPart, DrafterPart, Recipe, TrainPart
    from specctl.runtime.target.target import Target

QUESTION = "Explain in two sentences why the sky is blue."
ANSWER_TOKENS, ANSWER_RUNS = 96, 3  # of which the fastest is shown: the first pays for allocations
COPIER = "prompt-lookup"  # drafts without training, from the first token on
FREE = (COPIER, "auto")  # what is measured beside the trained drafter
TRAINED = "trained"  # its name in tables
TRAINED_SHARE = 0.6  # of the minutes
SUITE, SUITE_TOKENS, SUITE_RUNS = "everyday", 48, 2
HEATS = (0.0, 1.0)
MEASURED, PICTURE = "quickstart-bench.json", "quickstart.png"
LONGER = "1h"
LEVEL = "quick"  # of the proof

Row = Mapping[str, Any]  # of a BenchReport, as JSON


def chat_story(place: StoryPlace, target: Target) -> None:
    """Steps 2 to 5 on a chat model."""
    from specctl.cli.options.loading import DraftChoice

    console = place.console
    console.heading("2/5 A question, answered plainly and with guesses")
    answered = answer(console, target)
    console.heading("3/5 Train a drafter")
    recipe = place.recipe
    fields, source = begun_from(recipe.target.name, recipe.drafter)
    if fields:
        recipe = with_fields(recipe, fields, fields["drafter.init"])
    console.explain(
        f"It begins from {source}. The model writes questions and answers them, and the drafter "
        "learns to guess these answers."
    )
    tau = train_in_time(replace(place, recipe=recipe))
    console.heading("4/5 Prove that the answers stay the same")
    package = place.out / "package"
    draft = DraftChoice(COPIER if tau is None else str(package)).load(target)
    prove(console, target, draft, LEVEL)
    console.explain(
        "This is the short proof; specctl verify takes four times as many samples, and longer."
    )
    console.heading("5/5 Measure")
    drafts = [] if tau is None else [replace(draft, name=TRAINED)]
    report = measure(place, target, drafts)
    found = verdict(report["rows"], target.name)
    for line in found:
        console.prose(line)
    picture = draw(report, place.out / PICTURE)
    if picture is not None:
        console.say(f"picture: {picture}")
    result = {
        "package": None if tau is None else str(package),
        "begun_from": source,
        "tau_trained": tau,
        "lossless": True,
        "answer": answered,
        "bench": report,
        "verdict": found,
        "picture": None if picture is None else str(picture),
    }
    can_go_on = tau is not None and recipe.drafter.init is None
    console.done(place.finished(result), next=following(place, report["rows"], can_go_on))


def answer(console: Console, target: Target) -> dict[str, Any]:
    """One question, plainly and with guesses: the text, and how fast it came."""
    from specctl.api.arguments.drafting import PLAIN, load_draft
    from specctl.api.generate import generate
    from specctl.runtime.sampling.sampling import Sampling

    sampling = Sampling(max_new_tokens=ANSWER_TOKENS)
    drafts = [PLAIN, load_draft(COPIER, target, adaptive=False)]
    best: dict[str, GenerateResult] = {}
    with console.task("answer", ANSWER_RUNS * len(drafts), "runs") as advance:
        for _ in range(ANSWER_RUNS):
            for draft in drafts:
                run = generate(target, QUESTION, draft, sampling=sampling)
                if draft.name not in best or run.stats.seconds < best[draft.name].stats.seconds:
                    best[draft.name] = run
                advance(1, draft.name)
    plain, fast = (best[draft.name] for draft in drafts)
    console.out(f"> {QUESTION}")
    console.prose(" ".join(plain.text.split()))
    console.out()
    is_same = plain.outputs[0].token_ids == fast.outputs[0].token_ids
    console.table(
        ("", "tokens/s", "tokens per pass", "same text"),
        [
            ("plain", f"{plain.stats.tokens_per_second:.0f}", "1.00", None),
            (COPIER, f"{fast.stats.tokens_per_second:.0f}", f"{fast.stats.tau:.2f}", is_same),
        ],
    )
    console.explain(
        f"{COPIER} guesses that the text repeats itself; the model checks several guesses in one "
        "pass and keeps those that it would have written."
    )
    stats = {"plain": plain.stats.to_json(), "drafted": fast.stats.to_json()}
    return {"question": QUESTION, "text": plain.text, "identical": is_same, **stats}


def begun_from(target: str, part: DrafterPart) -> tuple[dict[str, Any], str]:
    """The fields of a recipe that name the weights to begin from, other than its own: the published
    drafter TARGET-FAMILY where there is one; and what is begun from, in words."""
    name = f"{target}-{part.family}"
    if part.init is not None:
        return {}, part.init
    folder = published_folder(name)
    if folder is None:
        return {}, "random weights"
    fields = drafter_fields(folder)
    fields |= {"drafter.init": name, "vocab.size": None}  # ids, too, are those of the package
    return fields, f"the published drafter {name}"


def train_in_time(place: StoryPlace) -> float | None:
    """The tau of the trained drafter; None where the time is too short for one on this machine."""
    console = place.console
    try:
        made = derived(place, round(60 * TRAINED_SHARE * place.minutes))
    except RecipeError as error:
        if error.where != "--time":
            raise
        console.warn(
            f"no drafter is trained: {error.what} (found {error.found}, expected "
            f"{error.expected}); --minutes {2 * place.minutes:g} gives it more"
        )
        return None
    return train(replace(place, recipe=made))


def derived(place: StoryPlace, seconds: float) -> Recipe:
    """The recipe with sizes, answers and steps for this target, machine and time; those of the run
    in the folder, if there is one."""
    from specctl.api import derive as api

    console, recipe, out = place.console, place.recipe, place.out

    def digest() -> str:
        return api.origin_digest(recipe.name, recipe.target, recipe.drafter, recipe.data)

    choices = api.kept(out, None, digest)
    if choices is not None:
        fields = api.chosen_fields(choices, recipe.origin, flatten(recipe.to_json()))
        found = with_fields(recipe, fields, api.DERIVED)
        console.explain(f"{_amounts(found.data, found.train)}, as chosen by an earlier run")
        if api.time_of(out) != seconds:
            console.warn(
                f"--minutes is ignored in training: {out} holds a run for another time; choose "
                "another --out to begin anew"
            )
        return found
    console.explain("First the pace of this machine is measured, for what fits into the time.")
    made = api.derive_recipe(recipe=recipe, time=seconds, progress=StoryReporter(console))
    api.keep(made, out, digest())
    for choice in made.choices:
        console.detail(f"{choice.field}: {choice.value} ({choice.reason})")
    low, high = (sum(part.seconds_range[i] for part in made.parts) for i in (0, 1))
    amounts = _amounts(made.recipe.data, made.recipe.train)
    console.explain(f"{amounts}; expected: {duration(low)} to {duration(high)}")
    return made.recipe


def _amounts(data: DataPart, train: TrainPart) -> str:
    rows = train.rows * train.accumulate
    return (
        f"{counted(data.prompts, 'question')} of at most {data.new_tokens} tokens "
        f"an answer, {counted(train.steps, 'step')} of {rows} x {train.seq_len} "
        "tokens"
    )


def measure(place: StoryPlace, target: Target, drafts: Sequence[LoadedDraft]) -> dict[str, Any]:
    """Plain decoding, the trained drafter and those without training on the same questions: shown,
    and kept for the next run."""
    from specctl.api.bench import bench
    from specctl.runtime.sampling.sampling import Sampling

    console, file = place.console, place.out / MEASURED
    console.explain(
        "The same questions of six kinds are answered plainly and with each drafter, in turn; "
        f"{FREE[1]} drafts only where it has measured that this pays."
    )
    about = {
        "target": [target.fingerprint, target.dtype_name],
        "drafts": [draft.source for draft in drafts],
        "measured": [FREE, HEATS, SUITE_TOKENS, SUITE_RUNS, "tau of rounds"],
    }
    of = digest_of(about)
    report = kept_report(file, of)
    if report is None:
        made = bench(
            target,
            [*drafts, *FREE],
            suites=SUITE,
            samplings=[Sampling(temperature=heat) for heat in HEATS],
            max_new_tokens=SUITE_TOKENS,
            repeats=SUITE_RUNS,
            progress=StoryReporter(console),
        )
        report = made.to_json()
        place.out.mkdir(parents=True, exist_ok=True)
        write_json(file, {"of": of, "report": report})
    else:
        console.explain("measured by an earlier run")
    show(console, report)
    return report


def kept_report(file: Path, of: str) -> dict[str, Any] | None:
    """The measurement that an earlier run kept, if it is of the same things."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(kept, dict) and kept.get("of") == of
    return dict(kept["report"]) if is_ours else None


def show(console: Console, report: Mapping[str, Any]) -> None:
    """What was measured, in all and by category."""
    rows: Sequence[Row] = report["rows"]
    console.table(
        ("drafter", "sampling", "tokens per pass", "tokens/s", "speed-up", "same text"),
        [
            (
                row["name"],
                row["setting"],
                f"{row['tau']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                _with_error(row),
                row["identical_to_plain"],
            )
            for row in rows
        ],
    )
    console.out()
    names = [one["category"] for one in rows[0]["by_category"]]
    console.table(
        ("speed-up", "sampling", *names),
        [
            (row["name"], row["setting"], *(f"{c['speedup']:.2f}" for c in row["by_category"]))
            for row in rows
            if not _is_plain(row)
        ],
    )
    threads = counted(report["threads"], "thread")
    console.out(
        f"{report['target']} {report['dtype']} on {report['device']}, {threads}, "
        f"{report['new_tokens']} tokens an answer; +- is a standard error"
    )
    for row in rows:
        if row["doubts"]:
            console.out(f"doubtful: {row['name']}, {row['setting']}: {'; '.join(row['doubts'])}")


def _is_plain(row: Row) -> bool:
    return bool(row["name"] == "plain")


def _with_error(row: Row) -> str:
    error = row["speedup_error"]
    return f"{row['speedup']:.2f}" + ("" if error is None else f" +- {error:.2f}")


def verdict(rows: Sequence[Row], target: str) -> list[str]:
    """What pays on this machine with this model, by how much, for which questions, and why."""
    best = winner(rows)
    gains, level = ([row for row in best if _stands(row) == what] for what in ("faster", "level"))
    if best:
        line = f"Verdict: {best[0]['name']} pays here: {_each(gains)} the speed of {target} alone"
        line += f", and level with it otherwise: {_each(level)}." if level else "."
    else:
        first = [row for row in rows if row["setting"] == rows[0]["setting"]]
        drafted = [row for row in first if not _is_plain(row)]
        others = ", ".join(f"{row['name']} {_with_error(row)}x" for row in drafted)
        why = f"{target} alone is as fast or faster"
        if any(row["speedup"] > 1 for row in drafted):
            why = f"none is faster than {target} alone beyond its error, and nowhere slower"
        line = f"Verdict: over all questions no drafter pays here, {why} ({others}; "
        line += f"{first[0]['setting']})."
    return [line, *(more for more in (best_category(rows), round_of(rows)) if more)]


def _each(rows: Sequence[Row]) -> str:
    return " and ".join(f"{row['speedup']:.2f}x ({row['setting']})" for row in rows)


def _stands(row: Row) -> str:
    """Faster, level or slower than plain decoding; doubtful where nothing can be said."""
    return "doubtful" if row["doubts"] else standing(row["speedup"], row["speedup_error"])


def winner(rows: Sequence[Row]) -> list[Row]:
    """The rows of the drafter that is faster in a setting and slower in none, of several the one
    with the best worst; empty where there is none."""
    names = dict.fromkeys(row["name"] for row in rows if not _is_plain(row))
    each = [[row for row in rows if row["name"] == name] for name in names]
    gaining = [
        of
        for of in each
        if (stands := {_stands(row) for row in of}) <= {"faster", "level"} and "faster" in stands
    ]
    return max(gaining, key=lambda of: min(row["speedup"] for row in of), default=[])


def best_category(rows: Sequence[Row]) -> str:
    """The category in which a drafter gains most, if that is more than noise."""
    each = [
        (one["speedup"], row, one["category"])
        for row in rows
        for one in row["by_category"]
        if not _is_plain(row) and not row["doubts"] and _gains(one)
    ]
    if not each:
        return ""
    speedup, row, category = max(each, key=lambda one: one[0])
    return f"Most is gained in {category}: {speedup:.2f}x with {row['name']} ({row['setting']})."


def _gains(figures: Row) -> bool:
    """Whether a category's speed-up is beyond its noise, and no more than its tau can bring."""
    speedup, error = figures["speedup"], figures["speedup_error"]
    sure = error is not None and speedup - SURE * error > PAYS
    return bool(sure and speedup <= figures["tau"] * SLACK)


def round_of(rows: Sequence[Row]) -> str:
    """What a round of the trained drafter costs, its limits, and what holds it back; without a
    trained one, of the first that drafted."""
    drafted = [row for row in rows if row["round"] is not None]
    row = min(drafted, key=lambda one: one["name"] != TRAINED, default=None)
    if row is None:
        return ""
    return f"{row['name']} ({row['setting']}): {RoundCost.of_json(row['round']).text()}"


def draw(report: Mapping[str, Any], path: Path) -> Path | None:
    """Speed-up in every setting, and what a round brings and costs in the first; None without
    matplotlib."""
    from specctl.train.metrics.comparison_plot import save_comparison

    rows = report["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    speeds: dict[str, dict[str, float]] = {}
    for row in rows:
        speeds.setdefault(row["setting"], {})[row["name"]] = row["speedup"]
    rounds = {
        row["name"]: (row["round"]["total"], row["round"]["tau"])
        for row in rows
        if row["setting"] == rows[0]["setting"] and row["round"] is not None
    }
    series = {setting: [by.get(name) for name in names] for setting, by in speeds.items()}
    title = f"Drafters for {report['target']} {report['dtype']} on {report['device']}"
    return save_comparison(names, series, {}, title, path, rounds)


def following(place: StoryPlace, rows: Sequence[Row], can_go_on: bool) -> list[str]:
    """The commands to type next: the best drafter at work, more training where another is faster,
    and the measurement by itself."""
    from specctl.cli.options.target_choice import TargetChoice

    best = winner(rows)
    name = best[0]["name"] if best else FREE[1]
    words = TargetChoice(place.target).words()
    draft = place.out if name == TRAINED else name
    why = "the fastest here" if best else "drafts only where it pays"
    found = [noted(command_line("chat", draft, *words), why)]
    if can_go_on and name != TRAINED:
        longer = ("--out", place.out, "--time", LONGER, "--allow", "data")
        trained = ("train-draft", *words, *place.recipe_words, *longer)
        found.append(noted(command_line(*trained), "goes on with this drafter"))
    found.append(command_line("bench", *words, *FREE, "--suite", SUITE))
    return found
