"""Does the predicted ranking of draft shapes hold? (Decoding Speculative Decoding, 2402.01528.)

Cuts every shape out of the embedded target and heals it for --steps (a run that is there goes on;
--heal-only stops behind it). Then predicts tokens/s twice: of a healed shape by its own latency and
acceptance, and as if it had never been seen, by fits of all other shapes. Acceptance is measured on
other prompts than speed, and speed (shape_speed.py) at the draft length that was predicted to be
the best. Kendall's tau is that of the pairs which differ by more than the noise; others are ties.
OUT/compared-embedded.json (or -300m) holds every number.

    python benchmarks/shapes.py --out runs/shapes --steps 150 --dtype bfloat16 --heal-only
    python benchmarks/shapes.py --out runs/shapes --steps 150 --dtype bfloat16 --inflate 300m
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from shape_speed import ERRORS, Effort, Speed, measured, noise

from specctl import load_target
from specctl.cli.app.console import Console
from specctl.cli.app.progress import duration
from specctl.core.drafter import Drafter
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.prune.cut import prunable
from specctl.train.prune.healing import HealingPlan, healed, healings, plan_healing
from specctl.train.prune.shapes import (
    Candidate,
    DraftShape,
    Latency,
    Reached,
    agreement,
    fit_acceptance,
    measure_latency,
    measure_reached,
    rank,
    unseen,
)

Prompts = Sequence[Sequence[int]]


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


def promise(
    console: Console, left: HealingPlan, shapes: Sequence[DraftShape], args: argparse.Namespace
) -> None:
    """What will be done, before it begins."""
    console.say(
        f"{left.shapes} of {len(shapes)} shapes to heal for {args.steps} steps "
        f"({duration(left.least)} to {duration(left.most)} by the plan)"
    )
    if not args.heal_only:
        console.say(
            f"then acceptance on {args.alpha_prompts} prompts, steps of {len(shapes)} drafts, and "
            f"{args.repeats} x {args.prompts} prompts x {args.tokens} tokens with each shape, "
            f"fewer repeats where {args.minutes:g} minutes are over"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--shapes", default="1x256,2x256,1x128,2x128,4x128,8x128,4x256")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--heal-only", action="store_true", help="heal the shapes and stop")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=24, help="on which speed is measured")
    parser.add_argument("--alpha-prompts", type=int, default=48, help="other ones, for acceptance")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="repeats end early behind that")
    parser.add_argument("--inflate", default=None, help="serve behind the target at this cost")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", action="append", default=[], help="a field of the recipe")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.prompts < 2 or args.alpha_prompts < 2:
        parser.error("errors are those of several prompts: give at least 2")
    return args


def main() -> None:
    args, console = arguments(), Console()
    console.json = args.json
    shapes = [DraftShape(*map(int, text.split("x"))) for text in args.shapes.split(",")]
    sets = [f"train.steps={args.steps}", f"target.dtype={args.dtype}", "train.save_every=50"]
    recipe = load_recipe("prune", sets=[*sets, *args.set])
    target = load_target("tiny", dtype=args.dtype)
    runs = healings(recipe, shapes, prunable(target).module.shape, args.steps)
    promise(console, plan_healing(runs, target, args.out), shapes, args)
    drafts = dict(healed(runs, target, args.out, console))
    if args.heal_only:
        return
    served = load_target("tiny", dtype=args.dtype, inflate=args.inflate) if args.inflate else target
    prompts = [p.ids for p in heldout_prompts(target, args.prompts + args.alpha_prompts)]
    spoken, others = prompts[: args.prompts], prompts[args.prompts :]
    acceptances = fit_acceptance(accepted(target, drafts, others, console))
    base, vocab = prunable(target).module.shape, drafts[shapes[0]].vocab
    latency = measure_latency(served, base, shapes, vocab, spoken[:1], reporter=console)
    ranked = rank(shapes, latency, acceptances)
    effort = Effort(args.tokens, args.repeats, args.minutes)
    speeds = measured(served, drafts, ranked, spoken, effort, console)
    found = summary(ranked, unseen(latency, acceptances), speeds)
    fits = {"latency": latency.fit, "acceptance": acceptances.fit}
    found |= {
        "note": told(latency, served, args),
        "fits": {n: {"r2": f.r2, "left_out_r2": f.left_out_r2} for n, f in fits.items()},
    }
    text = json.dumps(found, indent=1) + "\n"
    (args.out / f"compared-{args.inflate or 'embedded'}.json").write_text(text, encoding="utf-8")
    print(text, end="") if args.json else show(console, found)


if __name__ == "__main__":
    main()
