"""`specctl quickstart` on a target that continues texts: a drafter trained, trimmed, proved and
measured, at the cost of a larger target as well."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, noted
from specctl.cli.commands.quickstart_story import (
    FULL_MINUTES,
    StoryPlace,
    TrimReporter,
    prove,
    train,
)
from specctl.core.storage.files import write_json
from specctl.runtime.measure.doubt import PAYS, doubts

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.recipes.schema import Recipe
    from specctl.runtime.generate import Generated
    from specctl.runtime.measure.cost_table import CostTable
    from specctl.runtime.measure.reporter import Advance
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

LEAST = {"data.prompts": 32, "train.steps": 40}
TRIM_PROMPTS, TRIM_TOKENS = 12, 48
COMPARE_PROMPTS, COMPARE_TOKENS = 12, 64
RATE_REPEATS = 5
MUCH_REST = 0.2  # share of rounds without a draft from which tokens per pass need a word
TURNS = 3  # runs of each way; one run says little where other work slows the machine for seconds


def text_story(place: StoryPlace, model: Target, size: str | None) -> None:
    """Steps 2 to 5 on a target that continues texts. `size`: a larger cost, at which it is measured
    as well."""
    from specctl.cli.options.loading import DraftChoice
    from specctl.cli.options.target_choice import TargetChoice
    from specctl.runtime.target.variants.inflate import inflatable

    console, out = place.console, place.out
    if size is not None:
        inflatable(model, size, model.dtype)  # known now rather than after the training
    console.heading("2/5 Train a drafter")
    console.say(
        "A drafter has to guess what this target will write. So the target answers some prompts "
        "first, and the drafter learns from its answers."
    )
    tau = train(place)
    console.heading("3/5 Trim the drafter's vocabulary")
    console.say(
        "A drafter that scores fewer tokens is faster, and guesses a little less. The trimmed "
        "one is used only if it is faster in the end."
    )
    package = _faster(console, model, out, _trim(console, model, out))
    console.heading("4/5 Prove that the output stays the same")
    prove(console, model, DraftChoice(str(package)).load(model))
    console.heading("5/5 Measure the speed")
    console.say(
        "The same held-out prompts are decoded plainly and with the drafter. Plain decoding "
        "makes one token per forward pass of the target."
    )
    report = compare(console, model, package, size, out / "quickstart.png")
    result = place.finished({"package": str(package), "tau_trained": tau, **report})
    inflated = [] if size is None else ["--inflate", size]
    trained = TargetChoice.of_recipe(place.recipe.target).training_words()
    console.done(
        result,
        next=[
            noted(
                command_line("generate", package, "def main("),
                "accepted guesses are green at a terminal",
            ),
            noted(
                command_line("bench", package, f"{package}+prompt-lookup", *inflated),
                "copying, too",
            ),
            noted(
                command_line("train-draft", *trained, "--recipe", "eagle3"),
                "an EAGLE-3 head instead",
            ),
        ],
    )


def scaled(recipe: str, target: str, minutes: float, sets: tuple[str, ...]) -> Recipe:
    """The recipe with data and steps in proportion to the budget (never less than a minimum)."""
    from specctl.recipes.load import load_recipe

    base = load_recipe(recipe, target=target)
    share = min(1.0, minutes / FULL_MINUTES)
    flags: dict[str, Any] = {
        "data.prompts": max(LEAST["data.prompts"], round(base.data.prompts * share)),
        "train.steps": max(LEAST["train.steps"], round(base.train.steps * share)),
        "data.text_tokens": round(base.data.text_tokens * share),
    }
    flags["train.save_every"] = max(10, round(base.train.save_every * share))
    flags["train.tau_every"] = max(10, round(base.train.tau_every * share))
    # Trimming is a step of its own here, so that its effect can be seen.
    flags["vocab.size"] = None
    if share == 1.0:
        flags = {"vocab.size": None}
    return load_recipe(recipe, sets, target=target, flags=flags)


def _trim(console: Console, model: Target, out: Path) -> Path:
    """OUT/trimmed; kept when it was made from the same weights."""
    from specctl.api.vocab_trim import TrimJob, trim_and_package
    from specctl.cli.options.loading import DraftChoice
    from specctl.export.package.manifest import WEIGHTS, check_files
    from specctl.train.vocab.candidates import TrimSettings
    from specctl.train.vocab.selectors import selector

    source, folder = out / "package", out / "trimmed"
    mark = folder / "of.json"
    digest = check_files(source).files[WEIGHTS].sha256
    if mark.is_file() and json.loads(mark.read_text()).get("digest") == digest:
        console.say("trimmed by an earlier run")
        return folder
    draft = DraftChoice(str(source)).load(model)
    settings = TrimSettings(new_tokens=TRIM_TOKENS)
    words = ["specctl", *sys.argv[1:]]
    job = TrimJob(
        model, draft, settings, selector("vocab-trim"), num_prompts=TRIM_PROMPTS, command=words
    )
    report = trim_and_package(TrimReporter(console), job, folder).report
    console.say(
        f"{report.size:,} of {report.size_before:,} tokens are kept; they make up "
        f"{report.coverage:.0%} of held-out text"
    )
    write_json(mark, {"digest": digest})
    return folder


def _faster(console: Console, model: Target, out: Path, trimmed: Path) -> Path:
    """The package to go on with, whole or trimmed: what cut words cost in acceptance is not always
    won back by the smaller head. Measured once, and kept beside the trimmed one."""
    mark, packages = trimmed / "of.json", {"whole": out / "package", "trimmed": trimmed / "package"}
    kept = json.loads(mark.read_text())
    if "tokens_per_second" not in kept:
        kept["tokens_per_second"] = _rates(model, packages)
        write_json(mark, kept)
    found = kept["tokens_per_second"]
    faster = max(packages, key=lambda name: float(found[name]))
    console.say(
        f"{found['whole']:.0f} tokens/s with the whole drafter, {found['trimmed']:.0f} with the "
        f"trimmed one: the {faster} one is used"
    )
    return packages[faster]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts decoded plainly and with the drafter."""

    setting: str
    target: str
    plain: Generated
    fast: Generated
    rested: float = 0.0  # share of the rounds in which nothing was drafted
    identical: bool | None = None  # the texts of every turn; None where they are drawn

    @property
    def speedup(self) -> float:
        return self.fast.stats.tokens_per_second / max(self.plain.stats.tokens_per_second, 1e-9)

    @property
    def shown(self) -> str:
        """The target in the words of a reader."""
        name, _, size = self.target.partition(" as ")
        return f"{name} at the cost of {size.upper()}" if size else name

    @property
    def is_same_text(self) -> bool:
        pairs = zip(self.plain.outputs, self.fast.outputs, strict=True)
        return all(a.token_ids == b.token_ids for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "target": self.target,
            "plain": self.plain.stats.to_json(),
            "speculative": self.fast.stats.to_json(),
            "speedup": round(self.speedup, 3),
            "identical": self.identical,
            "rested": round(self.rested, 3),
        }


def compare(
    console: Console, model: Target, package: Path, inflate: str | None, picture: Path
) -> dict[str, Any]:
    """Held-out prompts, greedy and at T = 0.8, plain and speculative; and at a larger cost."""
    targets: list[tuple[Target, int, tuple[float, ...]]] = [(model, COMPARE_PROMPTS, (0.0, 0.8))]
    if inflate is not None:
        from specctl.cli.options.target_choice import TargetChoice

        console.say(
            "So small a target gains little. It is also measured at the cost of "
            f"{inflate.upper()} parameters."
        )
        large = TargetChoice(model.name, inflate=inflate).load(console)
        targets.append((large, max(1, COMPARE_PROMPTS // 3), (0.0,)))
    pairs: list[Pair] = []
    runs = 2 * TURNS * sum(len(heats) for *_, heats in targets)
    with console.task("compare", runs, "runs") as advance:
        for target, count, heats in targets:
            pairs += _pairs(target, package, count, heats, advance)
    _show(console, pairs)
    dtypes = {str(t.dtype).removeprefix("torch.") for t, *_ in targets if t.inflated}
    if "bfloat16" in dtypes and any(p.identical is False for p in pairs):
        console.out("in bfloat16 near-ties may flip; --dtype float32 gives token identity")
    console.out(verdict(pairs))
    drawn = draw(pairs, picture)
    if drawn is not None:
        console.say(f"Picture: {drawn}")
    return {
        "lossless": True,
        "comparisons": [pair.to_json() for pair in pairs],
        "picture": None if drawn is None else str(drawn),
    }


def middle_of(turns: Sequence[Pair]) -> Pair:
    """That of the median speed-up; its texts are identical if those of all turns are."""
    middle = sorted(turns, key=lambda pair: pair.speedup)[len(turns) // 2]
    is_greedy = middle.setting == "greedy"
    return replace(middle, identical=all(p.is_same_text for p in turns) if is_greedy else None)


def verdict(pairs: Sequence[Pair]) -> str:
    """One sentence: what drafting brings where it was measured, at the largest cost first."""
    said = []
    for pair in reversed([pair for pair in pairs if pair.setting == "greedy"]):
        text = {True: ", identical text", False: ", texts differ by rounding"}[bool(pair.identical)]
        why = doubts(pair.speedup, pair.fast.stats.tau, pair.fast.stats.tokens)
        if why:
            said.append(f"{_place(pair)}: {pair.speedup:.2f}x, no finding yet ({'; '.join(why)})")
        elif pair.speedup > PAYS:
            said.append(f"{_place(pair)}: {pair.speedup:.1f}x faster{text}")
        elif pair.speedup * PAYS >= 1:
            said.append(
                f"{_place(pair)}: no gain ({pair.speedup:.2f}x), drafting costs what it saves"
            )
        else:
            said.append(
                f"{_place(pair)}: slower ({pair.speedup:.2f}x), drafting costs more than it saves"
            )
    return "Verdict: " + "; ".join(said) + "."


def _place(pair: Pair) -> str:
    name, _, size = pair.target.partition(" as ")
    return f"on a target of the cost of {size.upper()} parameters" if size else f"on {name} itself"


def draw(pairs: Sequence[Pair], path: Path) -> Path | None:
    """Speed-up on every target, and acceptance by position; None without matplotlib."""
    from specctl.train.metrics.comparison_plot import save_comparison

    names = list(dict.fromkeys(pair.shown for pair in pairs))
    speeds: dict[str, dict[str, float]] = {}
    for pair in pairs:
        speeds.setdefault(pair.setting, {})[pair.shown] = pair.speedup
    series = {setting: [by.get(name) for name in names] for setting, by in speeds.items()}
    positions = {
        f"{pair.shown}, {pair.setting}": shares
        for pair in pairs
        if (shares := pair.fast.stats.well_counted)
    }
    return save_comparison(
        names, series, positions, "The trained drafter on held-out prompts", path
    )


def _rates(target: Target, packages: Mapping[str, Path]) -> dict[str, float]:
    """Tokens per second of each draft on the same held-out prompts, greedy, at its own length:
    medians of runs in turn, so that other work on the machine slows all of them."""
    from specctl.cli.options.loading import DraftChoice
    from specctl.runtime.measure.bench import bench, engine_contender
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.train.data.prompts.heldout import heldout_prompts

    drafts = {name: DraftChoice(str(package)).load(target) for name, package in packages.items()}
    ways = [
        engine_contender(name, target, draft.drafter, draft.policy, rule=draft.rule)
        for name, draft in drafts.items()
    ]
    prompts = [p.ids for p in heldout_prompts(target, COMPARE_PROMPTS // 2)]
    sampling = Sampling(max_new_tokens=COMPARE_TOKENS)
    report = bench(target, ways, prompts, [sampling], repeats=RATE_REPEATS)
    return {row.name: round(row.tokens_per_second, 2) for row in report.rows}


def _pairs(
    target: Target,
    package: Path,
    count: int,
    heats: tuple[float, ...],
    advance: Advance,
) -> Iterator[Pair]:
    """At each temperature the runs in turn: the pair of the median speed-up."""
    from specctl.cli.options.loading import DraftChoice
    from specctl.runtime.generate import generate
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.train.data.prompts.heldout import heldout_prompts

    draft = DraftChoice(str(package)).load(target)
    prompts = [p.ids for p in heldout_prompts(target, count)]
    name = target.name + (f" as {target.inflated}" if target.inflated else "")
    for heat in heats:
        setting = f"T={heat:g}" if heat else "greedy"
        costs = draft.costs(target, prompts, sampled=heat > 0, measure=True)
        sampling = Sampling(temperature=heat, max_new_tokens=COMPARE_TOKENS)
        generate(target, prompts[:1], sampling=sampling)  # pays for allocations
        _speculate(target, draft, prompts[:1], sampling, costs)
        turns = []
        for _ in range(TURNS):
            plain = generate(target, prompts, sampling=sampling)
            advance(1, f"{name} {setting} plain")
            fast, rested = _speculate(target, draft, prompts, sampling, costs)
            advance(1, f"{name} {setting} speculative")
            turns.append(Pair(setting, name, plain, fast, rested))
        yield middle_of(turns)


def _speculate(
    target: Target,
    draft: LoadedDraft,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    costs: CostTable | None,
) -> tuple[Generated, float]:
    """With the drafter, its lengths chosen by what a round was measured to cost; and the share of
    the rounds in which it was left alone."""
    from specctl.runtime.generate import generate
    from specctl.runtime.measure.cost import equip

    chosen = equip(draft.policy, costs)
    made = generate(
        target,
        prompts,
        drafter=draft.drafter,
        sampling=sampling,
        policy=chosen.policy,
        rule=draft.rule,
        chooser=chosen.chooser,
    )
    chooser = chosen.chooser
    return made, 0.0 if chooser is None else chooser.rounds_off / max(1, chooser.rounds)


def _show(console: Console, pairs: list[Pair]) -> None:
    columns = (
        "target", "sampling", "tokens per pass", "plain tokens/s", "drafted tokens/s", "speed-up",
        "same text",
    )  # fmt: skip
    rows = [
        (
            pair.shown,
            pair.setting,
            f"{pair.fast.stats.tau:.2f}",
            f"{pair.plain.stats.tokens_per_second:.0f}",
            f"{pair.fast.stats.tokens_per_second:.0f}",
            f"{pair.speedup:.2f}x",
            pair.identical,
        )
        for pair in pairs
    ]
    console.table(columns, rows)
    for pair in pairs:
        if pair.rested > MUCH_REST:
            console.out(
                f"{pair.shown}, {pair.setting}: {pair.fast.stats.tau:.2f} tokens per pass, fewer "
                f"than in training, because {pair.rested:.0%} of the rounds drafted nothing: "
                "there a draft costs more time than it saves"
            )
