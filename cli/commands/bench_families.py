"""`specctl bench-families`: every trained family under one budget, in one table and one plot.

OUT/NAME            an ordinary run of family NAME; a finished one holds finished.json and is kept
OUT/families.json   the rows
OUT/families.png    speed-up over plain decoding and acceptance by position, also at --plot
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.against import parse_against, transformers_contenders
from specctl.api.arguments.families import check_options, family_infos
from specctl.api.arguments.outputs import check_folder, check_plot
from specctl.api.arguments.targets import inflated_note, target_json
from specctl.cli.app.console import Console
from specctl.cli.app.failures import shown_error
from specctl.cli.app.follow_up import with_text
from specctl.cli.commands.family_tables import show_tables
from specctl.cli.options.flags import Compile, Seed, Sets
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.measuring import (
    Batch,
    Domain,
    NumPrompts,
    Plot,
    PromptFile,
    Repeats,
    TokensEach,
)
from specctl.cli.options.names import complete_family
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.cli.options.target_choice import TargetChoice, loading
from specctl.core.errors import Exit, GateError, RecipeError, did_you_mean
from specctl.core.messages.printable import counted
from specctl.core.storage.diffusion_kinds import is_diffusion_folder
from specctl.recipes.load import RecipeInfo, list_recipes, load_recipe, with_fields
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders.checkpoint_folder import read_settings
from specctl.train.runs.kept import kept_in

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.recipes.schema import Recipe
    from specctl.runtime.measure.bench import Contender
    from specctl.runtime.measure.bench_report import BenchRow
    from specctl.runtime.policies import Policy
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

HOME = "tiny"  # the target whose recipes are compared
SHARED = "eagle"  # the recipe whose data and batches every family is given
OWN = (
    "steps", "learning_rate", "vocab_rate", "attention_rate", "schedule", "warmup", "decay",
    "optimizer", "momentum", "weight_decay",
)  # fmt: skip
CHAIN = {"policy": "chain", "length": 5}
TREE = "dynamic-tree"
PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What is trained: which families, for which target, on how much, where."""

    families: str
    target: TargetChoice
    steps: int | None
    sets: tuple[str, ...]
    out: Path


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
    compiled: bool | None
    has_assisted: bool


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """A family that takes part: its contenders by the word for their shape."""

    trained: Trained
    loaded: LoadedDraft
    tree: str | None
    contenders: dict[str, Contender]


TINY = TargetChoice()
FAMILIES_OUT = Path("runs/families")


def bench_families(
    console: Console,
    families: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FAMILY]...",
            help="Families to train and compare; else all that have a recipe for target tiny.",
            autocompletion=complete_family,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", "--budget-steps", min=1, help="Training steps of every family."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of runs, table and picture.")
    ] = FAMILIES_OUT,
    sets: Sets = None,
    prompts: PromptFile = None,
    num_prompts: NumPrompts = 16,
    domain: Domain = None,
    max_new_tokens: TokensEach = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Sampling temperature (repeatable); else greedy."),
    ] = None,
    repeats: Repeats = 3,
    batch: Batch = 1,
    against: Annotated[
        str | None,
        typer.Option("--against", help="hf: also transformers' assisted generation."),
    ] = None,
    plot: Plot = None,
    seed: Seed = 0,
    compiled: Compile = None,
    target: TargetChoice = TINY,
) -> None:
    """Train drafter families alike and compare them: one target, one set of data, one number of
    steps. Each is measured as a chain and as a tree, on the target and on its --inflate.

    What is trained is kept in OUT/NAME, and the same command continues where it was interrupted.

    Examples:

      specctl bench-families medusa eagle3 --steps 200 --inflate 300m
      specctl bench-families --out runs/families --plot families.svg
    """
    baselines = parse_against(against or "")
    if "ngram" in baselines:
        raise RecipeError(
            "families are not compared with prompt-lookup here",
            where="--against",
            found=str(against),
            expected="hf, or nothing",
            do="leave ngram out; specctl bench compares drafters with it",
        )
    words = "all" if not families else ",".join(families)
    budget = TrainingBudget(words, target, steps, tuple(sets or ()), out)
    heat = Heat(
        prompts, num_prompts, domain, max_new_tokens, tuple(temperature or (0.0,)), repeats, batch,
        seed, compiled, "hf" in baselines,
    )  # fmt: skip
    compare_families(console, budget, heat, plot)


def compare_families(
    console: Console, budget: TrainingBudget, heat: Heat, plot: Path | None = None
) -> None:
    """Train what is not trained yet, measure all of it, report; GateError if a family failed."""
    check_folder(budget.out)
    check_plot(plot)
    folder = resolve(budget.target.name).path
    if folder is not None and is_diffusion_folder(folder):
        read_settings(folder)  # refuses it: once, and not again for every family
    recipes = {name: family_recipe(name, budget) for name in chosen(budget.families)}
    budget.out.mkdir(parents=True, exist_ok=True)
    console.kept = partial(kept_in, budget.out)
    trained: list[Trained] = []
    errors: dict[str, str] = {}
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        console.say(
            f"family {number} of {len(recipes)}: {name}, " + counted(recipe.train.steps, "step")
        )
        try:
            begun = list(recipes)[: number - 1]
            done = [budget.out / name for name in begun if has_rows(budget.out / name)]
            trained.append(train_family(console, name, recipe, budget.out / name, done))
        except Exception as error:  # whatever a family does, the others are measured
            errors[name] = explained(error)
            console.warn(f"{name}: {errors[name]}")
    rows: list[dict[str, Any]] = []
    sizes = dict.fromkeys((None, budget.target.inflate))
    console.say(loading(budget.target))
    targets = [replace(budget.target, inflate=size).load(console, heat.compiled) for size in sizes]
    for target in targets:
        rows += measure(console, target, trained, heat)
    rows += [{"family": name, "recipe": recipes[name].name, "error": errors[name]}
             for name in errors]  # fmt: skip
    picture = show_tables(console, rows, budget.out, plot)
    result = {
        "rows": rows,
        "targets": [target_json(target) for target in targets],
        "steps": next(iter(recipes.values())).train.steps,
        "out": str(budget.out),
        "picture": None if picture is None else str(picture),
    }
    (budget.out / "families.json").write_text(json.dumps(result, indent=1) + "\n")
    console.result = result
    refuse_failed(rows)
    best = max(rows, key=lambda row: row["speedup"])
    console.done(result, next=[with_text("generate", "--draft", best["package"])])


def chosen(words: str) -> list[str]:
    """`all` or `medusa,eagle` -> families that train and have a recipe for the embedded target."""
    known = [name for name, info in family_infos().items() if info.trainable and recipes_of(name)]
    wanted = [part.strip() for part in words.split(",") if part.strip()]
    if wanted == ["all"]:
        return known
    for name in wanted or [""]:
        if name not in known:
            raise RecipeError(
                f"no trained family {name!r} with a recipe for target {HOME}",
                where="FAMILY",
                found=words,
                expected="families that `specctl recipes ls --all` lists as trained",
                do=did_you_mean(name, known, "specctl bench-families, for all of them"),
            )
    return list(dict.fromkeys(wanted))


def recipes_of(family: str) -> list[str]:
    """The recipes of a family for the embedded target: its namesake first, then train-draft's own
    choice."""
    names = [r.name for r in shipped() if (r.family, r.target) == (family, HOME)]
    order = (family, RecipeFlags().recipe)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


@cache
def shipped() -> tuple[RecipeInfo, ...]:
    """Every recipe that comes with specctl, read once."""
    return tuple(list_recipes())


def family_recipe(family: str, budget: TrainingBudget) -> Recipe:
    """The family's recipe in one stage on the shared target, data and batches. How fast it learns
    (rate, schedule, optimizer), what it is and how it is served stay its own."""
    tree = load_recipe(SHARED).to_json()
    fields: dict[str, Any] = {
        f"{section}.{key}": value
        for section in ("target", "data", "train")
        for key, value in tree[section].items()
        if section != "train" or key not in OWN
    }
    fields |= {"stages": {}, "target.name": budget.target.name}
    fields["train.steps"] = budget.steps or tree["train"]["steps"]
    named = dict.fromkeys(fields, "bench-families") | {
        "target.name": "--target", "train.steps": "--budget-steps"
    }  # fmt: skip
    name = recipes_of(family)[0]
    recipe = load_recipe(name, budget.sets, flags=fields, named=named)
    if recipe.data.features == "offline" and recipe.data.features_at is None:
        shared = {"data.features_at": str(budget.out / "features")}  # of all families alike
        recipe = with_fields(recipe, shared, "bench-families")
    check_options(recipe, name)
    return recipe


def train_family(
    console: Console, name: str, recipe: Recipe, out: Path, done: Sequence[Path]
) -> Trained:
    """The family trained in `out`: kept if that is finished, continued if it was interrupted, begun
    on the rows of an earlier one else."""
    from specctl.api.train import train_and_package
    from specctl.export.package.manifest import read_manifest
    from specctl.train.planning.scaling import share_data
    from specctl.train.run import marked_result
    from specctl.train.runs.finished import finished_mark
    from specctl.train.saving.fingerprint import config_fields

    mark = finished_mark(config_fields(recipe, is_packaged=True), out)
    if mark is None:
        share_data(done, out)
        result = train_and_package(console, recipe, out, command=["specctl", *sys.argv[1:]])
    else:
        result = marked_result(mark, recipe.train.joint, out)
        console.say(f"{name}: trained before, kept")
    assert result.package is not None, "a finished run has a package"
    parameters = read_manifest(result.package).parameters
    return Trained(name, recipe, result.package, parameters, result.seconds)


def has_rows(folder: Path) -> bool:
    """Whether the rows of a run are made."""
    return (folder / "data" / "manifest.json").is_file()


def measure(
    console: Console, target: Target, trained: Sequence[Trained], heat: Heat
) -> list[dict[str, Any]]:
    """A row for every family and sampling; a family that cannot draft here gets its error."""
    from specctl.runtime.measure.bench import bench, engine_contender
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.train.data.prompts.heldout import heldout_prompts

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
            rows.append(about(one, target) | {"error": explained(error)})
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
    from specctl.runtime.measure.bench import unreported

    for sampling in samplings:
        tokens = min(PROBE_TOKENS, sampling.max_new_tokens)
        for contender in entry.contenders.values():
            contender.run(prompts, replace(sampling, max_new_tokens=tokens), unreported)


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


def explained(error: Exception) -> str:
    """An error in one line for a table. An interruption is none: it ends the command."""
    shown = shown_error(error)
    if shown is not None and shown.exit == Exit.INTERRUPTED:
        raise error
    text = f"{type(error).__name__}: {error}" if shown is None else shown.text()
    return " ".join(text.split())[:300]


def refuse_failed(rows: Sequence[dict[str, Any]]) -> None:
    """GateError (exit 8) naming the families that have no figures."""
    failed = {row["family"]: row["error"] for row in rows if row["error"] is not None}
    if failed:
        raise GateError(
            f"{counted(len(failed), 'family', 'families')} could not be compared: "
            + ", ".join(failed),
            where="FAMILY",
            found="; ".join(f"{name}: {why}" for name, why in failed.items())[:600],
            expected="figures for every family",
            do="mend or leave out what failed, then: specctl " + " ".join(sys.argv[1:]),
        )
