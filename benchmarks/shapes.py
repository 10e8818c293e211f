"""Does the predicted ranking of draft shapes hold? (Decoding Speculative Decoding, 2402.01528.)

Cuts every shape out of the embedded target and heals it for --steps (a run that is there goes on;
--heal-only stops behind it). Then predicts tokens/s twice: of a healed shape by its own latency and
acceptance, and as if it had never been seen, by fits of all other shapes. Acceptance is measured on
other prompts than speed. Speed is measured prompt by prompt, all shapes in turn, each at the draft
length that was predicted to be its best; seconds are medians over the repeats, errors come from
leaving out one prompt after the other (jackknife), and two shapes that differ by less than two
standard errors are a tie. Kendall's tau is that of the other pairs.

    python benchmarks/shapes.py --out runs/shapes --steps 150 --dtype bfloat16 --heal-only
    python benchmarks/shapes.py --out runs/shapes --steps 150 --dtype bfloat16 --inflate 300m
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from specctl import Sampling, load_target
from specctl.cli.console import Console
from specctl.cli.progress import duration
from specctl.drafters.parts.base import Drafter
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.target import Target
from specctl.train.data.heldout import heldout_prompts
from specctl.train.prune.cut import prunable
from specctl.train.prune.search.acceptance import Reached, fit_acceptance, measure_reached
from specctl.train.prune.search.healing import healed, plan_healing
from specctl.train.prune.search.latency import Latency, measure_latency
from specctl.train.prune.search.ranking import Candidate, agreement, rank, unseen
from specctl.train.prune.search.shape import DraftShape

Prompts = Sequence[Sequence[int]]
ERRORS = 2.0  # standard errors by which two shapes must differ


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens and median seconds of each prompt."""

    tokens_P: tuple[int, ...]
    seconds_P: tuple[float, ...]

    @property
    def rate(self) -> float:
        return sum(self.tokens_P) / sum(self.seconds_P)

    @property
    def rate_without_P(self) -> list[float]:
        """The rate with each prompt left out."""
        tokens, seconds = sum(self.tokens_P), sum(self.seconds_P)
        pairs = zip(self.tokens_P, self.seconds_P, strict=True)
        return [(tokens - t) / (seconds - s) for t, s in pairs]

    @property
    def error(self) -> float:
        return jackknife(self.rate_without_P)


def jackknife(without_P: Sequence[float]) -> float:
    """The standard error of a figure, given its values with each prompt left out."""
    mean, count = fmean(without_P), len(without_P)
    return sqrt((count - 1) / count * sum((x - mean) ** 2 for x in without_P))


def noise(speeds: Mapping[DraftShape, Speed]) -> dict[tuple[DraftShape, DraftShape], float]:
    """By how much two shapes, on the same prompts, must differ to be told apart."""
    return {
        (a, b): ERRORS
        * jackknife(
            [x - y for x, y in zip(speeds[a].rate_without_P, speeds[b].rate_without_P, strict=True)]
        )
        for a, b in combinations(sorted(speeds), 2)
    }


def measured(
    served: Target,
    drafts: Mapping[DraftShape, Drafter],
    best: Sequence[Candidate],
    prompts: Prompts,
    args: argparse.Namespace,
    console: Console,
) -> dict[DraftShape, Speed]:
    """Every shape at its predicted best draft length; repeats end early where time is up."""
    setting = Sampling(temperature=0.0, max_new_tokens=args.tokens, ignore_eos=True)
    policies = {c.shape: make_policy({"policy": "chain", "length": c.length}) for c in best}

    def run(shape: DraftShape, prompt: Sequence[int]) -> tuple[int, float]:
        drafter, policy = drafts[shape], policies[shape]
        stats = generate(served, [prompt], drafter=drafter, policy=policy, sampling=setting).stats
        return stats.tokens, stats.seconds

    for shape in policies:
        run(shape, prompts[0])  # warms up
    tokens: dict[tuple[DraftShape, int], int] = {}
    seconds: dict[tuple[DraftShape, int], list[float]] = {}
    total = args.repeats * len(prompts) * len(policies)
    with console.task("measuring", total, "runs") as advance:
        for repeat in within(args.repeats, 60 * args.minutes, console):
            for index, prompt in enumerate(prompts):
                turn = (index + repeat) % len(best)  # each shape is the first as often as others
                for shape in [c.shape for c in [*best[turn:], *best[:turn]]]:
                    tokens[shape, index], spent = run(shape, prompt)
                    seconds.setdefault((shape, index), []).append(spent)
                    advance(1, shape.name)
    each = range(len(prompts))
    return {
        shape: Speed(
            tuple(tokens[shape, i] for i in each), tuple(median(seconds[shape, i]) for i in each)
        )
        for shape in policies
    }


def within(repeats: int, budget: float, console: Console) -> Iterator[int]:
    """Repeats, until another one as long as those before would leave the budget; at least one."""
    began = time.perf_counter()
    for repeat in range(repeats):
        spent = time.perf_counter() - began
        if repeat and spent * (repeat + 1) / repeat > budget:
            console.say(f"{repeat} of {repeats} repeats fit into {duration(budget)}")
            return
        yield repeat


def accepted(
    target: Target, drafts: Mapping[DraftShape, Drafter], prompts: Prompts, console: Console
) -> dict[DraftShape, Reached]:
    """What is accepted of every shape's drafts."""
    found = {}
    with console.task("acceptance", len(drafts), "shapes") as advance:
        for shape, drafter in drafts.items():
            found[shape] = measure_reached(target, drafter, prompts, tokens=48)
            advance(1, f"{shape.name}: alpha {found[shape].alpha:.3f}")
    return found


def equal_pairs(ranked: Sequence[Candidate]) -> list[tuple[DraftShape, DraftShape]]:
    """(shallower, deeper) shapes whose layers have the same number of parameters, within 5 %."""
    return [
        (a.shape, b.shape)
        for a in ranked
        for b in ranked
        if a.shape.layers < b.shape.layers
        and abs(a.body_parameters - b.body_parameters) <= 0.05 * b.body_parameters
    ]


def summary(
    ranked: Sequence[Candidate], alone: Mapping[DraftShape, Candidate], speeds: dict[Any, Speed]
) -> dict[str, Any]:
    """Both rankings beside the measured one, and whether the shallower of equal shapes was
    faster."""
    rates, level = {shape: speed.rate for shape, speed in speeds.items()}, noise(speeds)

    def compared(predicted: Mapping[DraftShape, Candidate]) -> dict[str, Any]:
        guesses = {shape: c.tokens_per_second for shape, c in predicted.items()}
        found, all_pairs = agreement(guesses, rates, level), agreement(guesses, rates)
        return {
            **asdict(found),
            "kendall_tau": found.kendall_tau,
            "kendall_tau_with_ties_by_sign": all_pairs.kendall_tau,
        }

    def verdict(a: DraftShape, b: DraftShape) -> str:
        if abs(rates[a] - rates[b]) <= level[min(a, b), max(a, b)]:
            return "level"
        return "shallow" if rates[a] > rates[b] else "deep"

    return {
        "rows": [
            {
                **c.to_json(),
                "unseen": alone[c.shape].to_json(),
                "measured": rates[c.shape],
                "measured_error": speeds[c.shape].error,
            }
            for c in ranked
        ],
        "healed": compared({c.shape: c for c in ranked}),
        "never_seen": compared(alone),
        "equal_parameters": [
            {"shallow": a.name, "deep": b.name, "faster": verdict(a, b)}
            for a, b in equal_pairs(ranked)
        ],
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """The summary for people."""
    rows = [
        (
            f"{r['layers']}x{r['width']}",
            f"{r['alpha']:.3f} +- {r['alpha_error']:.3f}",
            f"{r['unseen']['alpha']:.3f}",
            f"{1e3 * r['step_seconds']:.2f}",
            r["length"],
            f"{r['tokens_per_second']:.1f}",
            f"{r['unseen']['tokens_per_second']:.1f}",
            f"{r['measured']:.1f} +- {r['measured_error']:.1f}",
        )
        for r in found["rows"]
    ]
    titles = ("shape", "alpha", "unseen", "ms a step", "k", "predicted", "unseen", "measured")
    console.table(titles, rows, title=found["note"])
    for name, words in (("healed", "healed shapes"), ("never_seen", "shapes never seen")):
        f = found[name]
        tau = "undecided" if f["kendall_tau"] is None else f"{f['kendall_tau']:.2f}"
        console.out(
            f"{words}: Kendall's tau {tau}; {f['alike']} pairs alike, {f['otherwise']} otherwise, "
            f"{f['ties']} ties within {ERRORS:g} standard errors"
        )
    for fit in ("latency", "acceptance"):
        console.out(f"fit of {fit}: {found['fits'][fit]}")
    for pair in found["equal_parameters"]:
        console.out(f"equal parameters: {pair['shallow']}, {pair['deep']}: {pair['faster']}")


def told(latency: Latency, served: Target, args: argparse.Namespace) -> str:
    """What was measured, and plain decoding beside it."""
    return (
        f"{served.name} ({served.inflated or 'as published'}), {args.dtype}, {served.device}, "
        f"{torch.get_num_threads()} threads, healed {args.steps} steps, greedy, batch 1, "
        f"{args.prompts} prompts x {args.tokens} tokens; tokens/s, plain decoding "
        f"{1 / latency.verify[0]:.1f}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--shapes", default="1x256,2x256,1x128,2x128,4x128,8x128,4x256")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--heal-only", action="store_true", help="heal the shapes and stop")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=16, help="on which speed is measured")
    parser.add_argument("--alpha-prompts", type=int, default=48, help="other ones, for acceptance")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="repeats end early behind that")
    parser.add_argument("--inflate", default=None, help="serve behind the target at this cost")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", action="append", default=[], help="a field of the recipe")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), Console()
    console.json = args.json
    shapes = [DraftShape(*map(int, text.split("x"))) for text in args.shapes.split(",")]
    sets = [f"train.steps={args.steps}", f"target.dtype={args.dtype}", "train.save_every=50"]
    recipe = load_recipe("prune", sets=[*sets, *args.set])
    target = load_target("tiny", dtype=args.dtype)
    left = plan_healing(recipe, target, shapes, args.out, args.steps)
    console.say(
        f"{left.shapes} of {len(shapes)} shapes to heal for {args.steps} steps "
        f"({duration(left.least)} to {duration(left.most)} by the plan); then acceptance on "
        f"{args.alpha_prompts} prompts, {len(shapes)} drafts timed, and {args.repeats} x "
        f"{args.prompts} prompts x {args.tokens} tokens measured with each shape, for at most "
        f"about {args.minutes:g} minutes"
    )
    drafts = dict(healed(recipe, target, shapes, args.out, args.steps, console))
    if args.heal_only:
        return
    served = load_target("tiny", dtype=args.dtype, inflate=args.inflate) if args.inflate else target
    prompts = [p.ids for p in heldout_prompts(target, args.prompts + args.alpha_prompts)]
    spoken, others = prompts[: args.prompts], prompts[args.prompts :]
    acceptances = fit_acceptance(accepted(target, drafts, others, console))
    base, vocab = prunable(target).module.shape, drafts[shapes[0]].vocab
    latency = measure_latency(served, base, shapes, vocab, spoken[:1], reporter=console)
    ranked = rank(shapes, latency, acceptances)
    speeds = measured(served, drafts, ranked, spoken, args, console)
    found = summary(ranked, unseen(latency, acceptances), speeds)
    fits = {"latency": latency.fit, "acceptance": acceptances.fit}
    found |= {
        "note": told(latency, served, args),
        "fits": {n: {"r2": f.r2, "left_out_r2": f.left_out_r2} for n, f in fits.items()},
    }
    print(json.dumps(found, indent=1)) if args.json else show(console, found)


if __name__ == "__main__":
    main()
