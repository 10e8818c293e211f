"""What is each system's own idea worth? Our figure with it and without it, on the embedded target.

Six kinds of lines (ablation_lines.py). *Trained*: two drafters of one family on the same rows, one
with the idea switched off; or two families, one of which is the other and the idea. *Served*: one
drafter, or one memory, under two ways to draft or to verify, with as many nodes. *Piped*: two
pipelines of stages. *Stopped*: a rule that ends drafts beside the best fixed length, by tokens a
unit of cost. *Batched*: a batch policy beside the best fixed length (ablation_batches.py).
*Crossed*: translations of a draft of other tokens (ablation_vocabularies.py). Figures are counted
on held-out prompts, not timed; differences are paired over prompts (of batches: over groups of
users), each prompt's figures being means over seeds. A line is `reproduced` or `opposite` where the
difference is more than two standard errors from zero and every seed has its sign, else `level`.
What has no two ways to compare on this target has a toy of its own among the tests.

The trained arms are cases of quality.py and lie in the same folder, so that neither script trains
what the other has: run again, it goes on.

    python benchmarks/ablations.py --out runs/quality --steps 120 --plan
    python benchmarks/ablations.py --out runs/quality --steps 120 --seeds 2 --workers 2
    python benchmarks/ablations.py --out runs/quality --only served        # nothing is trained
    python benchmarks/ablations.py --out runs/quality --table              # what is there
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from ablation_batches import BatchArm, batch_arms, serve_batches
from ablation_lines import (
    BATCHED,
    CROSSED,
    FIXED,
    LONGEST,
    PIPED,
    PRICE,
    SERVED,
    STOPPED,
    TRAINED,
    Batched,
    Crossed,
    Piped,
    Served,
    Stopped,
    Trained,
)
from ablation_vocabularies import CrossedArm, crossed_arms, draft_of, serve_crossed
from quality import HELD_UNMEASURED, Case, check_settings, finished, run_all, write
from training_free import CORPUS_PROMPTS, build
from trees import tally

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.core.drafter import Drafter
from specctl.drafters import families
from specctl.drafters.lm.sorted_lm import SortedLm
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import stages_of
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.policies import Policy, make_policy
from specctl.runtime.policies.hardware_tree import HardwareTree, check_profile
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops import trained_stops
from specctl.runtime.stops.learned import write_stop
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.planning.scaling import share_data
from specctl.train.runs.stages import stages
from specctl.train.stop_rules import collect, fit, learned_rule

HEATS = {"greedy": 0.0, "T = 1": 1.0}
WORDS = {"greedy": "greedy", "T = 1": "sampled"}  # of quality.py
OPTIONS = "drafter.options."
LEARNING_PROMPTS = 48  # of trained stop rules: none of them is asked


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft: a recipe with settings, at a temperature, by a drafter that quality.py has
    trained (None: it needs no training). `price` of a drafted token: 0 counts rounds alone."""

    words: tuple[str, ...]
    heat: str
    trained: str | None
    seed: int
    price: float = 0.0
    sets: tuple[str, ...] = ()  # with which the drafter was trained
    counts_layers: bool = False
    fits: bool = False

    @property
    def name(self) -> str:
        words = [word for word in _short(self.words) if not word.startswith("stop_file=")]
        cost = [f"price={self.price:g}"] if self.price else []
        cost += [word for word in ("counts_layers", "fits") if getattr(self, word)]
        heat = self.heat.replace(" ", "")
        sets = _short(self.sets)
        return "-".join([*words, *cost, heat, self.trained or "none", *sets, str(self.seed)])

    def case(self, steps: int, prompts: int) -> Case:
        """The training of its drafter."""
        assert self.trained is not None
        return Case(self.trained, "tokens", self.seed, steps, prompts, self.sets)

    def file(self, out: Path) -> Path:
        return out / "served" / f"{self.name}.json"


def _short(words: Sequence[str]) -> list[str]:
    pairs = [word.partition("=") for word in words]
    return [key.rsplit(".", 1)[-1] + equals + value for key, equals, value in pairs]


@dataclass(frozen=True, slots=True)
class PipedArm:
    """A recipe with settings, trained and asked."""

    words: tuple[str, ...]
    length: int
    heat: str
    seed: int

    @property
    def name(self) -> str:
        said = hashlib.sha256(" ".join(self.words).encode()).hexdigest()[:8]
        return f"{self.words[0]}-{said}-{self.length}-{self.heat.replace(' ', '')}-{self.seed}"

    def file(self, out: Path) -> Path:
        return out / "piped" / f"{self.name}.json"


def piped_arms(line: Piped, seed: int) -> tuple[PipedArm, PipedArm]:
    whole, without = (
        PipedArm(words, line.length, line.heat, seed) for words in (line.whole, line.without)
    )
    return whole, without


def trained_cases(line: Trained, seeds: int, steps: int, prompts: int) -> list[tuple[Case, Case]]:
    """With and without, a pair for each seed."""
    other, sets = (line.family, line.without)
    if isinstance(line.without, str):
        other, sets = line.without, ()
    return [
        (Case(line.family, "tokens", seed, steps, prompts, line.whole),
         Case(other, "tokens", seed, steps, prompts, tuple(sets)))
        for seed in range(seeds)
    ]  # fmt: skip


def served_arms(line: Served, seed: int) -> tuple[Arm, Arm]:
    cost = {"price": line.price, "counts_layers": line.counts_layers}
    at = (line.heat, line.trained, seed)
    whole = Arm(line.whole, *at, **cost, sets=line.whole_sets, fits=line.fits)
    return whole, Arm(line.without, *at, **cost, sets=line.without_sets)


def stopped_arms(line: Stopped, seed: int, out: Path) -> tuple[list[Arm], list[Arm]]:
    """The rule under each threshold, and the fixed lengths."""
    served = _recipe(line.trained).serve
    no_tree = [f"serve.{name}=null" for name in ("nodes", "beam") if getattr(served, name)]
    base = (line.trained, "serve.policy=chain", *no_tree)
    rule = [*base, f"serve.length={LONGEST}", f"serve.stop={line.rule}"]
    if line.rule in trained_stops():
        rule.append(f"serve.stop_file={out / 'stops' / f'{line.trained}-{line.rule}-{seed}'}")
    ruled = [
        (*rule, *([] if threshold is None else [f"serve.threshold={threshold:g}"]))
        for threshold in line.thresholds
    ]
    fixed = [(*base, f"serve.length={length}") for length in FIXED]
    found = [[Arm(w, line.heat, line.trained, seed, PRICE) for w in ws] for ws in (ruled, fixed)]
    return found[0], found[1]


def _recipe(trained: str, sets: Sequence[str] = ()) -> Recipe:
    return load_recipe("distill" if trained == "small-lm" else trained, sets)


def other_prompts(target: Target, count: int = CORPUS_PROMPTS) -> list[list[int]]:
    """Held-out prompts that are not asked: what retrieves or learns to stop reads these."""
    return [list(p.ids) for p in heldout_prompts(target, 10_000)[-CORPUS_PROMPTS:]][:count]


def learn_to_stop(arm: Arm, target: Target, drafter: Drafter) -> None:
    """The trained stop rule that an arm names, made now if it is not there."""
    for file in (Path(w.split("=", 1)[1]) for w in arm.words if w.startswith("serve.stop_file=")):
        if not file.exists():
            rule = next(w.split("=", 1)[1] for w in arm.words if w.startswith("serve.stop="))
            wanted, asked = learned_rule(rule), other_prompts(target, LEARNING_PROMPTS)
            learning = fit(wanted, collect(target, drafter, wanted, asked, LONGEST), seed=arm.seed)
            file.parent.mkdir(exist_ok=True)
            write_stop(file, wanted.name, learning.net, {"drafter": drafter.family})


def serve(arm: Arm, args: argparse.Namespace) -> None:
    """Tokens a unit of cost of one arm, prompt by prompt, into its file; tau where drafts are
    free."""
    torch.set_num_threads(1)
    torch.manual_seed(arm.seed)
    if arm.file(args.out).exists():
        return
    name, *sets = arm.words
    target = load_target("tiny", dtype="float32")
    if arm.trained is None:
        recipe = load_recipe(name, sets)
        assert not families()[recipe.drafter.family].trainable, name
        drafter = build(recipe, target, other_prompts(target))
    else:
        package = args.out / "runs" / arm.case(args.steps, args.data).name / "package"
        drafter = load_drafter(str(package), target)
        learn_to_stop(arm, target, drafter)
        recipe = _recipe(name, sets)
        drafter.options = replace(drafter.options, **_given(recipe, sets))
    policy = sized(arm, make_policy(recipe.serve.model_dump(mode="json")), target, drafter)
    requests = asked(target, arm.heat, arm.seed, args)
    if arm.counts_layers:
        write(arm.file(args.out), _by_layers(target, drafter, policy, requests))
        return
    done = Engine(target, drafter, policy, num_slots=8, rule=recipe.serve.rule).run(requests)
    stats = [row.stats for row in done]
    write(arm.file(args.out), [s.tokens / (s.rounds + arm.price * s.drafted) for s in stats])


def asked(target: Target, heat: str, seed: int, args: argparse.Namespace) -> list[Request]:
    fields: dict[str, Any] = {"temperature": HEATS[heat], "max_new_tokens": args.tokens}
    return [
        Request(tuple(p.ids), Sampling(**fields, ignore_eos=True, seed=1000 * seed + i))
        for i, p in enumerate(heldout_prompts(target, args.prompts))
    ]


def _given(recipe: Recipe, sets: Sequence[str]) -> dict[str, Any]:
    """Options of a trained drafter that are to be others than it was trained with."""
    names = [word.split("=", 1)[0] for word in sets]
    changed = [n.removeprefix(OPTIONS) for n in names if n.startswith(OPTIONS)]
    return {name: recipe.drafter.options[name] for name in changed}


def sized(arm: Arm, policy: Policy, target: Target, drafter: Drafter) -> Policy:
    """Trees of the best ranks by the accuracies of this drafter, and by what nodes cost."""
    if not isinstance(policy, HardwareTree):
        return policy
    greedy = Sampling(max_new_tokens=64, ignore_eos=True)
    found = tally(target, drafter, other_prompts(target, 8), greedy, width=4, depth=3)
    policy = replace(policy, profile=check_profile(found.profile))
    costs = TreeCosts(0.0, {0: 1.0, policy.nodes: 1.0 + arm.price * policy.nodes})
    return policy.fitted(costs) if arm.fits else policy


def _by_layers(
    target: Target, drafter: Drafter, policy: Policy, requests: Sequence[Request]
) -> list[float]:
    """Tokens a unit of cost, PRICE for a pass through all of the drafter's layers."""
    assert isinstance(drafter, SortedLm)
    found, own, counted = list[float](), drafter.lm.through, [0]

    def through(*given: Any) -> Any:
        counted[0] += len(given[-1])
        return own(*given)

    with patch.object(drafter.lm, "through", through):
        for request in requests:
            counted[0] = 0
            stats = Engine(target, drafter, policy).run([request])[0].stats
            found.append(stats.tokens / (stats.rounds + PRICE * counted[0] / drafter.exits[-1]))
    return found


def pipe(arm: PipedArm, args: argparse.Namespace) -> None:
    """Trains by a recipe of stages, and tau of chains, prompt by prompt, into the arm's file."""
    torch.set_num_threads(1)
    if arm.file(args.out).exists():
        return
    recipe = load_recipe(arm.words[0], (f"train.seed={arm.seed}", HELD_UNMEASURED, *arm.words[1:]))
    folder = args.out / "piped" / "runs" / arm.name
    for stage in stages(stages_of(recipe), folder):  # answers and texts are the same for all
        same = sorted(folder.parent.glob(f"*/stage-*-{stage.name}/finished.json"))
        share_data([file.parent for file in same], stage.folder)
    result = train_and_package(SilentReporter(), recipe, folder, command=sys.argv)
    assert result.package is not None
    target = load_target("tiny", dtype="float32")
    drafter = load_drafter(str(result.package), target)
    policy = make_policy({"policy": "chain", "length": arm.length})
    done = Engine(target, drafter, policy, num_slots=8).run(asked(target, arm.heat, arm.seed, args))
    write(arm.file(args.out), [row.stats.tokens / row.stats.rounds for row in done])


Figures = Sequence[float]


def compare(pairs: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    """Means of both, their difference with its standard error over prompts, and what it says."""
    whole, without = (
        [mean(each) for each in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
    )
    apart = [a - b for a, b in zip(whole, without, strict=True)]
    error = stdev(apart) / len(apart) ** 0.5
    signs = {mean(a) > mean(b) for a, b in pairs}
    said = "level"
    if abs(mean(apart)) > 2 * error and len(signs) == 1:
        said = "reproduced" if mean(apart) > 0 else "opposite"
    return {"with": mean(whole), "without": mean(without), "difference": mean(apart),
            "error": error, "seeds": len(pairs), "verdict": said}  # fmt: skip


def best(arms: Sequence[Sequence[Figures]]) -> int:
    """Which of several settings has the highest mean over seeds and prompts."""
    return max(range(len(arms)), key=lambda i: mean(mean(seed) for seed in arms[i]))


def lines_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every line whose arms are there, with as many seeds as both have."""
    for line in TRAINED:
        shapes, pairs = (line.shape, line.without_shape or line.shape), []
        for sides in trained_cases(line, args.seeds, args.steps, args.data):
            files = [args.out / "cases" / f"{case.name}.json" for case in sides]
            if all(file.exists() for file in files):
                found = (json.loads(file.read_text()) for file in files)
                whole, without = (
                    each[f"{shape} {WORDS[line.heat]}"]["tau"]
                    for each, shape in zip(found, shapes, strict=True)
                )
                pairs.append((whole, without))
        if pairs:
            yield _said(line, f"tau, {line.shape}, {line.heat}") | compare(pairs)
    for served in SERVED:
        pairs = []
        for seed in range(args.seeds):
            files = [arm.file(args.out) for arm in served_arms(served, seed)]
            if all(file.exists() for file in files):
                pairs.append((_read(files[0]), _read(files[1])))
        if pairs:
            yield _said(served, _measure(served)) | compare(pairs)
    for piped in PIPED:
        pairs = []
        for seed in range(args.seeds):
            files = [arm.file(args.out) for arm in piped_arms(piped, seed)]
            if all(file.exists() for file in files):
                pairs.append((_read(files[0]), _read(files[1])))
        if pairs:
            yield _said(piped, f"tau, chain, {piped.heat}") | compare(pairs)
    for stopped in STOPPED:
        ruled, fixed = [], []
        for seed in range(args.seeds):
            sides = stopped_arms(stopped, seed, args.out)
            if all(arm.file(args.out).exists() for side in sides for arm in side):
                ruled.append([_read(arm.file(args.out)) for arm in sides[0]])
                fixed.append([_read(arm.file(args.out)) for arm in sides[1]])
        if ruled:
            a, b = (list(zip(*side, strict=True)) for side in (ruled, fixed))
            length = f"tokens a unit of cost, {stopped.heat}; fixed length {FIXED[best(b)]}"
            whole, without = a[best(a)], b[best(b)]
            yield _said(stopped, length) | compare(list(zip(whole, without, strict=True)))

    for batched in BATCHED:
        ruled, fixed = [], []
        for seed in range(args.seeds):
            batches = batch_arms(batched, seed)
            if all(arm.file(args.out).exists() for side in batches for arm in side):
                ruled.append([_read(arm.file(args.out)) for arm in batches[0]])
                fixed.append([_read(arm.file(args.out)) for arm in batches[1]])
        if ruled:
            a, b = (list(zip(*side, strict=True)) for side in (ruled, fixed))
            length = batched.fixed[best(b)]
            what = "tokens a unit of cost" if batched.price else "tokens a round and row"
            at = f"{what}, greedy; fixed length {length}"
            yield _said(batched, at) | compare(list(zip(a[0], b[best(b)], strict=True)))
    for crossed in CROSSED:
        pairs = []
        for seed in range(args.seeds):
            one, other = crossed_arms(crossed, seed)
            if all(arm is None or arm.file(args.out).exists() for arm in (one, other)):
                taus = _read(one.file(args.out))
                pairs.append((taus, _read(other.file(args.out)) if other else [1.0] * len(taus)))
        if pairs:
            yield _said(crossed, f"tau, chain, {crossed.heat}") | compare(pairs)


def _measure(line: Served) -> str:
    if line.counts_layers:
        return f"tokens a unit of cost, {line.heat}"
    if line.price:
        return f"tokens a unit of cost, {line.heat}"
    return f"tau, {line.heat}"


Line = Trained | Served | Piped | Stopped | Batched | Crossed
SomeLine = TypeVar("SomeLine", bound=Line)
SomeArm = TypeVar("SomeArm")


def _said(line: Line, at: str) -> dict[str, Any]:
    return {"system": line.system, "claim": line.claim, "at": at}


def _read(file: Path) -> list[float]:
    return list(json.loads(file.read_text()))


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    rows = ["| system | claim | measured | with | without | difference | seeds | |",
            "|" + "---|" * 8]  # fmt: skip
    for line in lines:
        rows.append(
            f"| {line['system']} | {line['claim']} | {line['at']} | {line['with']:.2f} "
            f"| {line['without']:.2f} | {line['difference']:+.2f} +- {line['error']:.2f} "
            f"| {line['seeds']} | {line['verdict']} |"
        )
    return "\n".join(rows)


def wanted_arms(args: argparse.Namespace) -> list[Arm]:
    """Those to serve, each once; those of the first seed first."""
    found: list[Arm] = []
    for seed in range(args.seeds):
        for line in SERVED:
            if _is_asked(line, args):
                found += served_arms(line, seed)
        for stopped in STOPPED:
            if _is_asked(stopped, args):
                ruled, fixed = stopped_arms(stopped, seed, args.out)
                found += [*ruled, *fixed]
    return list(dict.fromkeys(found))


def each_once(
    args: argparse.Namespace,
    lines: Sequence[SomeLine],
    arms_of: Callable[[SomeLine, int], Iterable[SomeArm | None]],
) -> list[SomeArm]:
    """The arms of the lines that are asked for, seed by seed, each once."""
    found = (
        arm
        for seed in range(args.seeds)
        for line in lines
        if _is_asked(line, args)
        for arm in arms_of(line, seed)
        if arm is not None
    )
    return list(dict.fromkeys(found))


def batched_arms(args: argparse.Namespace) -> list[BatchArm]:
    """Those of batch policies, both sides."""
    return each_once(args, BATCHED, lambda line, seed: itertools.chain(*batch_arms(line, seed)))


def wanted_cases(args: argparse.Namespace, arms: Sequence[Arm]) -> list[Case]:
    """Drafters to train: those that arms are served with, and both sides of trained lines."""
    found = [arm.case(args.steps, args.data) for arm in arms if arm.trained]
    found += [
        Case(arm.trained, "tokens", arm.seed, args.steps, args.data)
        for arm in batched_arms(args)
        if args.only != "trained"
    ]
    if args.only != "served":
        found += [
            case
            for line in TRAINED
            if _is_asked(line, args)
            for pair in trained_cases(line, args.seeds, args.steps, args.data)
            for case in pair
        ]
    return sorted(dict.fromkeys(found), key=lambda case: case.seed)


def _is_asked(line: Line, args: argparse.Namespace) -> bool:
    names = [name for name in args.systems.split(",") if name]
    return not names or line.system in names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="quality.py's")
    parser.add_argument("--only", choices=("trained", "served"), default=None)
    parser.add_argument("--systems", default="", help="names, with commas between; else all")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", type=int, default=1000, help="prompts to train on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--plan", action="store_true", help="say what would be run, and stop")
    parser.add_argument("--table", action="store_true", help="only show what is there")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.out, args.seconds = args.out.resolve(), None
    check_settings(args)
    arms = [] if args.only == "trained" else wanted_arms(args)
    wanted = wanted_cases(args, arms)
    missing = [case.name for case in wanted if case.name not in finished(args.out)]
    batches = [] if args.only == "trained" else batched_arms(args)
    pipes = [] if args.only == "served" else each_once(args, PIPED, piped_arms)
    crossed = [] if args.only else each_once(args, CROSSED, crossed_arms)
    jobs: list[Job] = [
        *((serve, arm) for arm in arms),
        *((serve_batch, arm) for arm in batches),
        *((pipe, arm) for arm in pipes),
        *((serve_crossed, arm) for arm in crossed),
    ]
    jobs = [(work, arm) for work, arm in jobs if not arm.file(args.out).exists()]
    print(f"{len(missing)} drafters to train, {len(jobs)} arms to serve", file=sys.stderr)
    if args.plan:
        print("\n".join([*missing, *(arm.name for _, arm in jobs)]))
        return
    failed: list[str] = []
    if not args.table:
        for seed in sorted({arm.seed for arm in crossed if not arm.file(args.out).exists()}):
            draft_of(seed, args.out)
        failed = run_all(wanted, args) + do_all(jobs, args)
    lines = list(lines_of(args))
    print(json.dumps(lines) if args.json else markdown(lines))
    if failed:
        raise SystemExit("not in this table, since they failed: " + ", ".join(failed))


def serve_batch(arm: BatchArm, args: argparse.Namespace) -> None:
    serve_batches(arm, args.out)


Job = tuple[Callable[[Any, argparse.Namespace], None], Arm | BatchArm | PipedArm | CrossedArm]


def do_all(jobs: Sequence[Job], args: argparse.Namespace) -> list[str]:
    """Serves each arm; names of those that failed, with the reason."""
    failed: list[str] = []
    with ProcessPoolExecutor(args.workers) as pool:
        waiting = [(arm, pool.submit(work, arm, args)) for work, arm in jobs]
        for number, (arm, future) in enumerate(waiting, 1):
            if (error := future.exception()) is not None:
                failed.append(f"{arm.name}: {error}")
            print(f"{number} of {len(jobs)} arms served: {arm.name}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    main()
