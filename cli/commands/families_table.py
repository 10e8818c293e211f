"""Trained families, measured in turn in one process on one target, and shown as table and plot."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.api.against import transformers_contenders
from specctl.api.targets import inflated_note
from specctl.cli.app.console import Console
from specctl.cli.options.loading import DraftingFlags

if TYPE_CHECKING:
    from specctl.api.drafting import LoadedDraft
    from specctl.recipes.schema import Recipe
    from specctl.runtime.measure.bench import BenchRow, Contender
    from specctl.runtime.policies import Policy
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

CHAIN = {"policy": "chain", "length": 5}
TREE = "dynamic-tree"
PROBE_TOKENS = 8
Explain = Callable[[Exception], str]
LEGEND = (
    "size: trained and frozen parameters of its own; sec: training; alpha: chance at the first "
    "three positions; chain, tree: tau; of the faster of the two: draft (share of the time), "
    "tok/s, plain (speed-up over plain decoding), hf (over transformers' assisted generation)"
)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained family: its recipe, its package, and what that took."""

    family: str
    recipe: Recipe
    package: Path
    parameters: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Heat:
    """How all are measured."""

    prompts: Path | None
    num_prompts: int
    domain: str | None
    max_new_tokens: int
    temperatures: tuple[float, ...]
    repeats: int
    batch: int
    seed: int
    compiled: bool
    has_assisted: bool


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """A family that takes part: its contenders by the word for their shape."""

    trained: Trained
    loaded: LoadedDraft
    tree: str | None
    contenders: dict[str, Contender]


def measure(
    console: Console, target: Target, trained: Sequence[Trained], heat: Heat, explain: Explain
) -> list[dict[str, Any]]:
    """A row for every family and sampling; a family that cannot draft here gets its error."""
    from specctl.runtime.measure.bench import bench, engine_contender
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.train.data.heldout import heldout_prompts

    held = heldout_prompts(target, heat.num_prompts, heat.domain, heat.prompts)
    prompts = [prompt.ids for prompt in held]
    samplings = [
        Sampling(temperature=one, seed=heat.seed, max_new_tokens=heat.max_new_tokens)
        for one in heat.temperatures
    ]
    entries: list[FamilyEntry] = []
    rows: list[dict[str, Any]] = []
    for one in trained:
        try:
            entry = enter(one, target, heat.batch)
            probe(entry, prompts[:1], samplings)
            entries.append(entry)
        except Exception as error:  # the others are measured all the same
            rows.append(about(one, target) | {"error": explain(error)})
            console.warn(f"{one.family} on {label(target)}: {rows[-1]['error']}")
    contenders = [engine_contender("plain", target, batch=heat.batch)]
    contenders += [c for entry in entries for c in entry.contenders.values()]
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        if heat.has_assisted:
            drafts = [entry.loaded for entry in entries]
            contenders += transformers_contenders(target, drafts, Path(folder))
        report = bench(
            target, contenders, prompts, samplings, repeats=heat.repeats, reporter=console
        )
    if target.inflated:
        console.detail(inflated_note(target))
    settings = dict.fromkeys(row.setting for row in report.rows)
    for setting in settings:
        found = {row.name: row for row in report.rows if row.setting == setting}
        rows += [figures(entry, target, found) for entry in entries]
    return rows


def enter(one: Trained, target: Target, batch: int) -> FamilyEntry:
    """The family as a chain of five and as its tree."""
    from specctl.drafters import family
    from specctl.runtime.measure.bench import engine_contender
    from specctl.runtime.policies import make_policy, policies_of

    loaded = DraftingFlags().of(str(one.package)).load(target)
    assert loaded.drafter is not None, "a package holds a drafter"
    own = loaded.drafter.policies or family(one.family).policies
    tree = tree_of(own)
    serve = one.recipe.to_json()["serve"]
    policies: dict[str, Policy] = {}
    chains = loaded.drafter.policies or policies_of(family(one.family))
    if "chain" in chains:
        policies["chain"] = make_policy(CHAIN)
    if tree is not None:
        policies[tree] = make_policy(serve if serve["policy"] == tree else {"policy": tree})
    made = {
        word: engine_contender(f"{one.family} {word}", target, loaded.drafter, policy, batch=batch)
        for word, policy in policies.items()
    }
    first = next(iter(policies.values()))
    return FamilyEntry(one, replace(loaded, policy=first), tree, made)


def tree_of(policies: Sequence[str]) -> str | None:
    """The dynamic tree, else the first of a family's own policies that is more than a chain."""
    if TREE in policies:
        return TREE
    return next((name for name in policies if name != "chain"), None)


def probe(
    entry: FamilyEntry, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> None:
    """A few tokens by each contender, so that what cannot draft fails before anything is timed."""
    for sampling in samplings:
        tokens = min(PROBE_TOKENS, sampling.max_new_tokens)
        for contender in entry.contenders.values():
            contender.run(prompts, replace(sampling, max_new_tokens=tokens))


def label(target: Target) -> str:
    return target.name + (f" as {target.inflated}" if target.inflated else "")


def about(one: Trained, target: Target) -> dict[str, Any]:
    """What a row says of a family before it is measured."""
    return {
        "target": label(target),
        "family": one.family,
        "recipe": one.recipe.name,
        "package": str(one.package),
        "parameters": one.parameters,
        "train_seconds": round(one.seconds, 1),
    }


def figures(entry: FamilyEntry, target: Target, found: dict[str, BenchRow]) -> dict[str, Any]:
    """The row of a family in one setting. Costs and speeds are those of the faster shape."""
    by_word = {word: found[one.name] for word, one in entry.contenders.items()}
    faster = max(by_word, key=lambda word: by_word[word].speedup)
    best, chain = by_word[faster], by_word.get("chain")
    tree = None if entry.tree is None else by_word[entry.tree]
    first = chain or best
    assisted = found.get(f"transformers with {entry.loaded.name}")
    over = None if assisted is None else best.tokens_per_second / assisted.tokens_per_second
    return about(entry.trained, target) | {
        "setting": best.setting,
        "alpha": [round(x, 4) for x in first.accepted_per_position],
        "tau_chain": None if chain is None else _rounded(chain.tau),
        "tau_tree": None if tree is None else _rounded(tree.tau),
        "tree": entry.tree,
        "faster": faster,
        "draft_share": _rounded(best.draft_share),
        "tokens_per_second": round(best.tokens_per_second, 2),
        "speedup": round(best.speedup, 3),
        "speedup_chain": None if chain is None else round(chain.speedup, 3),
        "speedup_tree": None if tree is None else round(tree.speedup, 3),
        "speedup_over_assisted": _rounded(over),
        "identical_to_plain": best.identical,
        "error": None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def show_tables(console: Console, rows: Sequence[dict[str, Any]], out: Path) -> Path | None:
    """A table for every target and setting, and OUT/families.png with all their speed-ups, ordered
    as the last table is."""
    from specctl.train.plot import save_bars

    measured = [row for row in rows if row["error"] is None]
    settings = dict.fromkeys(f"{row['target']}, {row['setting']}" for row in measured)
    speeds: dict[str, dict[str, float]] = {}
    for title in settings:
        mine = [row for row in measured if f"{row['target']}, {row['setting']}" == title]
        columns = ["family", "size", "sec", "alpha", "chain", "tree", "draft", "tok/s", "plain"]
        has_assisted = any(row["speedup_over_assisted"] is not None for row in mine)
        ordered = sorted(mine, key=lambda row: -row["speedup"])
        console.table(
            [*columns, "hf"] if has_assisted else columns,
            [_cells(row, has_assisted) for row in ordered],
            title=title,
        )
        speeds[title] = {row["family"]: row["speedup"] for row in ordered}
    names = list(dict.fromkeys(name for found in reversed(speeds.values()) for name in found))
    series = {title: [found.get(name, 0.0) for name in names] for title, found in speeds.items()}
    console.prose(LEGEND)
    return save_bars(names, series, "speed-up over plain decoding", out / "families.png")


def _cells(row: dict[str, Any], has_assisted: bool) -> list[object]:
    over = row["speedup_over_assisted"]
    cells = [
        row["family"],
        short(row["parameters"]),
        f"{row['train_seconds']:.0f}",
        " ".join(f"{x:.2f}".removeprefix("0") for x in row["alpha"][:3]),
        row["tau_chain"],
        row["tau_tree"],
        None if row["draft_share"] is None else f"{row['draft_share']:.0%}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}x",
    ]
    return [*cells, None if over is None else f"{over:.2f}x"] if has_assisted else cells


def short(count: int) -> str:
    """117,600 -> "118k"."""
    for size, unit in ((1e9, "b"), (1e6, "m"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.{1 if count < 10 * size else 0}f}{unit}"
    return str(count)
