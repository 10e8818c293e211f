"""How often is each trained family right? tau and alpha with standard errors, at equal tokens, at
equal processor seconds, over the amount of data, and by its whole recipe.

Every family is trained for the embedded target on the same rows, with the settings of `specctl
bench-families`, and measured on held-out prompts, greedy and at T = 1, as a chain of five and as
its recipe serves it. tau is counted, not timed, so that a busy machine does no harm; processor
seconds are those of the training process, on one thread, imports and packaging included. Families
whose recipe has stages are trained in one, but for the arm `recipe`: that is `specctl train-draft`
with the family's recipe as it is. One file a case in OUT: run again, it goes on; other settings
need another OUT.

    python benchmarks/quality.py --out runs/quality --workers 2 --plan     # what it will take
    python benchmarks/quality.py --out runs/quality --workers 2
    python benchmarks/quality.py --out runs/quality --arms seconds         # at equal seconds
    python benchmarks/quality.py --out runs/quality --arms data --families eagle3,small-lm
    python benchmarks/quality.py --out runs/quality --arms recipe           # whole recipes
    python benchmarks/quality.py --out runs/quality --arms recipe --times 4  # with more data
    python benchmarks/quality.py --arms recipe --families eagle3 --set train.steps=320

Families whose paired difference over prompts is below two standard errors from the best of a group
are in its group: these weights are level. Seeds are averaged prompt by prompt; how far they are
apart is in the files. --set trains whole recipes a second time with a field changed, and says what
that changed, paired over prompts. --times N gives whole recipes N times the data and the steps,
and says what that changed where they were run without it, too. Where there is a GPU, families are
trained and measured on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.cli.commands.bench_families import (
    TINY,
    TrainingBudget,
    chosen,
    family_recipe,
    recipes_of,
)
from specctl.drafters import family
from specctl.recipes.load import build_recipe, load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy, policies_of
from specctl.runtime.sampling.sampling import Sampling
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.planning.scaling import share_data

DATA = (250, 500, 1000, 2000)  # prompts of the learning curve
LEADING = ("small-lm", "staged", "moa", "glide", "eagle3", "eagle")
HEATS = {"greedy": 0.0, "sampled": 1.0}
WHOLE = "recipe"  # the arm of whole recipes
AMOUNTS = ("steps", "prompts", "text_tokens", "limit_tokens")
SETTINGS = ("steps", "seconds", "data", "prompts", "tokens")
HELD_UNMEASURED = "train.tau_every=1000000"


@dataclass(frozen=True, slots=True)
class Case:
    """A training run and how it is measured."""

    family: str
    arm: str  # tokens, seconds, data, or recipe
    seed: int
    steps: int
    prompts: int
    sets: tuple[str, ...] = ()  # fields of the recipe that differ; ablations.py trains such cases
    times: int = 1  # so many times the data and the steps of a whole recipe

    @property
    def name(self) -> str:
        size = f"-{self.prompts}" if self.arm == "data" else ""
        changed = "".join(f"-{word.removeprefix('drafter.options.')}" for word in self.sets)
        more = f"-x{self.times}" if self.times > 1 else ""
        return f"{self.family}{changed}-{self.arm}{size}{more}-{self.seed}"


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures; the figures of a case."""
    torch.set_num_threads(1)
    recipe = recipe_of(case, args.out)
    folder, first = args.out / "runs" / case.name, rows_of(case, args.out)
    spent = folder / "processor_seconds.json"
    if not spent.exists():  # killed while it trained: the seconds of a part would be counted
        shutil.rmtree(folder, ignore_errors=True)
    share_data([first], folder)
    began = time.process_time()
    result = train_and_package(SilentReporter(), recipe, folder, command=sys.argv)
    if not spent.exists():
        write(spent, time.process_time() - began)
    assert result.package is not None
    target = load_target(str(result.target or "tiny"), dtype="float32")
    drafter = load_drafter(str(result.package), target)
    own = make_policy(recipe.serve.model_dump(mode="json"))
    shapes = {"served": (own, recipe.serve.rule)}
    if "chain" in (drafter.policies or policies_of(family(case.family))):
        shapes["chain"] = make_policy({"policy": "chain", "length": 5}), "auto"
    if shapes["served"] == shapes.get("chain"):
        del shapes["served"]  # the same figures: not counted twice
    held = heldout_prompts(target, args.prompts)
    found: dict[str, Any] = {**asdict(case), "seconds": json.loads(spent.read_text())}
    found["numbers"] = sum(weight.numel() for weight in drafter.trainable().values())
    for shape, (policy, rule) in shapes.items():
        for word, heat in HEATS.items():
            sampling = {"temperature": heat, "max_new_tokens": args.tokens, "ignore_eos": True}
            asked = [
                Request(tuple(p.ids), Sampling(**sampling, seed=i)) for i, p in enumerate(held)
            ]
            done = Engine(target, drafter, policy, rule, num_slots=8).run(asked)
            tested = add_counts(row.stats.tested_at for row in done)
            found[f"{shape} {word}"] = {
                "tau": [row.stats.tokens / row.stats.rounds for row in done],
                "alpha": shares(add_counts(row.stats.accepted_at for row in done), tested),
            }
    if "served" not in shapes:
        found |= {f"served {word}": found[f"chain {word}"] for word in HEATS}
    return found


def recipe_of(case: Case, out: Path) -> Recipe:
    """The family's own recipe, or its share of equal tokens."""
    seed = f"train.seed={case.seed}"
    if case.arm == WHOLE:
        return scaled(load_recipe(recipes_of(case.family)[0], (seed, *case.sets)), case.times)
    sets = (seed, f"data.prompts={case.prompts}", "train.rows=4", HELD_UNMEASURED, *case.sets)
    return family_recipe(case.family, TrainingBudget(case.family, TINY, case.steps, sets, out))


def scaled(recipe: Recipe, times: int) -> Recipe:
    """With so many times the data and the steps, in every stage."""

    def more(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: more(name, below) for name, below in value.items()}
        return times * value if key in AMOUNTS and value is not None else value

    return build_recipe(more("", recipe.to_json()), recipe.name).with_origin(recipe.origin)


def rows_of(case: Case, out: Path) -> Path:
    """The run whose rows a case is given; one whose recipe has others makes its own."""
    size = "" if case.arm != WHOLE else f"-{WHOLE}"
    return out / "runs" / f"data-{case.prompts}{size}"


def cases(args: argparse.Namespace, arm: str) -> Iterator[Case]:
    """What an arm takes; equal seconds are known when equal tokens were run."""
    names, known = chosen(args.families), finished(args.out)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if arm == "tokens":
        yield from (Case(n, "tokens", s, args.steps, args.data) for s in seeds for n in names)
    if arm == "seconds":
        spent = {n: known[c]["seconds"] for n in names if (c := f"{n}-tokens-0") in known}
        for name, own in spent.items():
            steps = max(1, round(args.steps * (args.seconds or median(spent.values())) / own))
            yield from (Case(name, "seconds", s, steps, args.data) for s in seeds)
    if arm == WHOLE:
        for seed in seeds:
            for name in names:
                for sets in dict.fromkeys(((), tuple(args.set))):
                    recipe = load_recipe(recipes_of(name)[0], sets)
                    sizes = args.times * recipe.train.steps, args.times * recipe.data.prompts
                    yield Case(name, WHOLE, seed, *sizes, sets, args.times)
    if arm == "data":
        leading = [name for name in names if name in LEADING]
        for size in DATA:  # as many passes over each: the size of the first arm is not run again
            kind, steps = _kind(size, args), round(args.steps * size / args.data)
            yield from (Case(n, kind, 0, steps, size) for n in leading)


def _kind(size: int, args: argparse.Namespace) -> str:
    return "tokens" if size == args.data else "data"


def finished(out: Path) -> dict[str, dict[str, Any]]:
    return {f.stem: json.loads(f.read_text()) for f in sorted((out / "cases").glob("*.json"))}


def write(path: Path, found: Any) -> None:
    """The whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".tmp")
    part.write_text(json.dumps(found))
    part.replace(path)


def check_settings(args: argparse.Namespace) -> None:
    """Figures of other settings are never shown beside these."""
    file, own = args.out / "settings.json", {n: getattr(args, n) for n in SETTINGS}
    if not file.exists():
        write(file, own)
    elif (found := json.loads(file.read_text())) != own:
        raise SystemExit(f"{args.out} holds cases of {found}; give these, or another --out")


def grouped(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, dict[str, Any]]]:
    """Rows by falling tau, each with the number of its group."""
    order = sorted(rows, key=lambda row: -mean(row[key]["tau"]))
    found, group, best = [], 0, None
    for row in order:
        taus = row[key]["tau"]
        if best is None or _differs(best, taus):
            group, best = group + 1, taus
        found.append((group, row))
    return found


def _differs(first: Sequence[float], second: Sequence[float]) -> bool:
    apart = [a - b for a, b in zip(first, second, strict=True)]
    return mean(apart) >= 2 * stdev(apart) / len(apart) ** 0.5


def _text(taus: Sequence[float]) -> str:
    return f"{mean(taus):.2f} +- {stdev(taus) / len(taus) ** 0.5:.2f}"


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seeds of one case as one: taus are means over seeds, prompt by prompt."""
    found = dict(rows[0])
    for key, value in rows[0].items():
        if isinstance(value, dict):
            taus = zip(*(row[key]["tau"] for row in rows), strict=True)
            found[key] = {"tau": [mean(each) for each in taus], "alpha": value["alpha"]}
    return found | {"seeds": len(rows), "seconds": mean(row["seconds"] for row in rows)}


def changed_by(row: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Fields that differ from the recipe's, and how many times its data it had."""
    return tuple(row.get("sets", ())), row.get("times", 1)


def rows_in(rows: Sequence[dict[str, Any]], arm: str, times: int) -> list[dict[str, Any]]:
    """Those of an arm, without the ones that --set changed."""
    wanted = (), times if arm == WHOLE else 1
    return [row for row in rows if row["arm"] == arm and changed_by(row) == wanted]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of one arm, best first by the greedy tau of what is served."""
    by_case: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["family"], row["prompts"]), []).append(row)
    lines = ["| group | family | numbers | prompts, steps, CPU s, seeds | alpha 1 2 3 "
             "| chain, greedy | chain, T = 1 | served, greedy | served, T = 1 |",
             "|" + "---|" * 9]  # fmt: skip
    for group, row in grouped([pooled(each) for each in by_case.values()], "served greedy"):
        chain = row.get("chain greedy")
        alpha = "-" if chain is None else " ".join(f"{a:.2f}" for a in chain["alpha"][:3])
        taus = (row.get(f"{shape} {word}") for shape in ("chain", "served") for word in HEATS)
        shown = " | ".join("-" if each is None else _text(each["tau"]) for each in taus)
        cost = f"{row['prompts']}, {row['steps']}, {row['seconds']:.0f}, {row['seeds']}"
        lines.append(
            f"| {group} | `{row['family']}` | {row['numbers']:,} | {cost} | {alpha} | {shown} |"
        )
    return "\n".join(lines)


def changes(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    """What --set and --times change in whole recipes, paired over prompts, seeds averaged."""
    whole = [row for row in rows if row["arm"] == WHOLE]
    sets = tuple(args.set)
    before, after = ((), args.times if sets else 1), (sets, args.times)
    said = " ".join(sets) or f"{args.times} times the data"
    for name in dict.fromkeys(row["family"] for row in whole if changed_by(row) == after != before):
        own = [row for row in whole if row["family"] == name]
        both = [
            {row["seed"]: row for row in own if changed_by(row) == want} for want in (before, after)
        ]
        seeds = both[0].keys() & both[1].keys()  # one of them may have failed
        if not seeds:
            continue
        base, changed = (pooled([found[seed] for seed in sorted(seeds)]) for found in both)
        for key, value in base.items():
            if isinstance(value, dict):
                pairs = zip(changed[key]["tau"], value["tau"], strict=True)
                apart = _text([a - b for a, b in pairs])
                yield f"{name}, {said}, {key}: {apart}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tau of every family with bars of two standard errors: served and as a chain, both heats."""
    from matplotlib.figure import Figure

    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row)
    order = sorted(map(pooled, found.values()), key=lambda row: mean(row["served greedy"]["tau"]))
    figure = Figure(figsize=(7.5, 1.2 + 0.27 * len(order)), layout="constrained")
    axes = figure.subplots(1, len(HEATS), sharey=True)
    for axis, (word, heat) in zip(axes, HEATS.items(), strict=True):
        for shape, mark, shift in (("served", "o", 0.12), ("chain", "s", -0.12)):
            shown = [(i, row[f"{shape} {word}"]) for i, row in enumerate(order)
                     if f"{shape} {word}" in row]  # fmt: skip
            taus = [mean(each["tau"]) for _, each in shown]
            bars = [2 * stdev(each["tau"]) / len(each["tau"]) ** 0.5 for _, each in shown]
            label = "as its recipe serves it" if shape == "served" else "as a chain of five"
            axis.errorbar(taus, [i + shift for i, _ in shown], xerr=bars, fmt=mark, markersize=4,
                          linewidth=1, label=label)  # fmt: skip
        axis.set_title("greedy" if heat == 0 else f"T = {heat:g}")
        axis.set_xlabel("tau (tokens a round)")
        axis.set_xlim(left=1)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(order)), [row["family"] for row in order])
    axes[0].set_ylim(-0.7, len(order) - 0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Drafter families on the embedded target (bars: two standard errors)")
    figure.savefig(path, dpi=150)


def curves(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown of the learning curves: tau over prompts, each seen equally often."""
    found = {
        (row["family"], row["prompts"]): row
        for row in rows
        if row["seed"] == 0 and not row.get("sets") and row["arm"] == _kind(row["prompts"], args)
    }
    lines = ["| family | " + " | ".join(f"{size:,} prompts" for size in DATA) + " |",
             "|" + "---|" * (len(DATA) + 1)]  # fmt: skip
    for name in LEADING:
        taus = [
            _text(row[f"{_shape(row)} greedy"]["tau"]) if (row := found.get((name, size))) else "-"
            for size in DATA
        ]
        lines.append(f"| `{name}` | {' | '.join(taus)} |")
    return "\n".join(lines)


def _shape(row: dict[str, Any]) -> str:
    return "chain" if "chain greedy" in row else "served"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--families", default="all", help="names, with commas between")
    parser.add_argument(
        "--arms", default="tokens", help="tokens, seconds, data, recipe; with commas"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=None, help="else the median of the first")
    parser.add_argument("--data", type=int, default=1000, help="prompts to train on")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="of whole recipes: trained with and without")  # fmt: skip
    parser.add_argument("--times", type=int, default=1, help="of whole recipes: data and steps")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--plan", action="store_true", help="say what would be run, and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=None, help="tau of the first arm's families")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.case is not None:
        fields = json.loads(args.case)
        case = Case(**fields | {"sets": tuple(fields["sets"])})
        found = run(case, args)
        write(args.out / "cases" / f"{case.name}.json", found)
        return
    if args.plan:
        for arm in args.arms.split(","):
            plan(list(cases(args, arm)), args)
        return
    check_settings(args)
    failed = [
        name for arm in args.arms.split(",") for name in run_all(list(cases(args, arm)), args)
    ]
    rows = list(finished(args.out).values())
    if args.plot is not None:
        draw(rows_in(rows, args.arms.split(",")[0], args.times), args.plot)
    if args.json:
        print(json.dumps(rows))
    else:
        for arm in args.arms.split(","):
            one = rows_in(rows, arm, args.times)
            print(f"\n{arm}:\n\n{curves(rows, args) if arm == 'data' else table(one)}")
        print(*changes(rows, args), sep="\n")
    if failed:
        raise SystemExit(f"not in these tables, since they failed: {', '.join(failed)}")


def plan(wanted: list[Case], args: argparse.Namespace) -> list[Case]:
    """The cases that are missing, and what they will take."""
    known = finished(args.out)
    missing = [case for case in wanted if case.name not in known]
    taken = [row["seconds"] / row["steps"] for row in known.values()]
    said = "how long is known after the first"
    if taken:
        hours = sum(case.steps for case in missing) * mean(taken) / args.workers / 3600
        said = f"about {hours:.1f} hours of training"
    print(f"{len(missing)} of {len(wanted)} cases to run, {said}", file=sys.stderr)
    return missing


def run_all(wanted: list[Case], args: argparse.Namespace) -> list[str]:
    """Runs the missing cases, each in a process; names of those that failed."""
    missing = plan(wanted, args)
    for rows, case in {rows_of(case, args.out): case for case in missing}.items():
        prepare(case, rows, args.out)
    began, done, failed = time.time(), list[str](), list[str]()

    def one(case: Case) -> None:
        log = args.out / "logs" / f"{case.name}.log"
        log.parent.mkdir(exist_ok=True)
        words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
        words += ["--out", str(args.out), "--prompts", str(args.prompts)]
        words += ["--tokens", str(args.tokens)]
        with log.open("w") as file:
            is_done = subprocess.run(words, stdout=file, stderr=file).returncode == 0
        done.append(case.name)
        if not is_done:
            failed.append(case.name)
        left = (time.time() - began) / len(done) * (len(missing) - len(done)) / 60
        said = "done" if is_done else f"failed ({log})"
        print(f"{len(done)} of {len(missing)}: {case.name} {said}, about {left:.0f} minutes left",
              file=sys.stderr, flush=True)  # fmt: skip

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(one, missing))
    return failed


def prepare(case: Case, rows: Path, out: Path) -> None:
    """The target's answers, written once for all runs on so many prompts."""
    if (rows / "finished.json").exists():
        return
    first = replace(case, family="medusa", seed=0, steps=1, sets=())
    if case.arm == WHOLE:
        prompts = case.prompts // case.times
        first = replace(first, sets=("train.steps=1", f"data.prompts={prompts}"))
    train_and_package(SilentReporter(), recipe_of(first, out), rows, command=sys.argv)


if __name__ == "__main__":
    main()
