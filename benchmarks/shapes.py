"""Does the predicted ranking of draft shapes hold? (Decoding Speculative Decoding, 2402.01528.)

Cuts every shape out of the embedded target, heals it for --steps, predicts its tokens/s from the
fits of latency and acceptance, measures its tokens/s through the engine, and compares the two
rankings (Kendall's tau), with wide-shallow against deep-narrow at equal parameters of the layers.

    python benchmarks/shapes.py --out runs/shapes --steps 150 --inflate 300m
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import Sampling, load_target
from specctl.cli.console import Console
from specctl.cli.shapes import quick_recipe
from specctl.drafters.parts.base import Drafter
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.bench import bench, engine_contender
from specctl.runtime.policies import make_policy
from specctl.runtime.report import Reporter
from specctl.runtime.target import Target
from specctl.train.data.heldout import heldout_prompts
from specctl.train.initial import checkpoint_drafter
from specctl.train.prune.cut import prunable
from specctl.train.prune.shapes import (
    Candidate,
    DraftShape,
    alpha_of,
    fit_acceptance,
    kendall_tau,
    measure_latency,
    rank,
)
from specctl.train.run import train_draft


@dataclass(frozen=True)
class Healed:
    """A shape's drafter and the acceptance it reached."""

    drafter: Drafter
    alpha: float


def healed(
    target: Target, recipe: Recipe, shapes: list[DraftShape], out: Path, reporter: Reporter
) -> dict[DraftShape, Healed]:
    """Every shape, cut from the target and trained; runs that are there already go on."""
    base, found = prunable(target).module.shape, {}
    first: Path | None = None
    for shape in shapes:
        folder = out / f"{shape.layers}x{shape.width}"
        if first is not None and not (folder / "data").exists():
            shutil.copytree(first / "data", folder / "data")
        first = first or folder
        steps = recipe.train.steps
        reporter.say(f"healing {folder.name} for {steps:,} steps in {folder}")
        result = train_draft(
            quick_recipe(recipe, shape.options(base), steps),
            folder,
            target=target,
            reporter=reporter,
        )
        assert result.tau is not None
        drafter = checkpoint_drafter(folder, target).to(target.device, target.dtype)
        assert drafter.module is not None
        drafter.module.eval()
        found[shape] = Healed(drafter, alpha_of(result.tau, recipe.serve.length))
    return found


def measured(
    served: Target, drafts: dict[DraftShape, Healed], best: list[Candidate], tokens: int, count: int
) -> dict[DraftShape, float]:
    """Tokens per second of each shape at its predicted best draft length, interleaved."""
    prompts = [list(p.ids) for p in heldout_prompts(served, count)]
    rows = [
        engine_contender(
            f"{c.shape.layers}x{c.shape.width}",
            served,
            drafts[c.shape].drafter,
            make_policy({"policy": "chain", "length": c.length}),
        )
        for c in best
    ]
    setting = Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    report = bench(served, [engine_contender("plain", served), *rows], prompts, [setting])
    rates = {row.name: row.tokens_per_second for row in report.rows}
    return {c.shape: rates[f"{c.shape.layers}x{c.shape.width}"] for c in best}


def equal_pairs(ranked: list[Candidate]) -> list[tuple[DraftShape, DraftShape]]:
    """(shallower, deeper) shapes whose layers have the same number of parameters, within 5 %."""
    return [
        (a.shape, b.shape)
        for a in ranked
        for b in ranked
        if a.shape.layers < b.shape.layers
        and abs(a.body_parameters - b.body_parameters) <= 0.05 * b.body_parameters
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--shapes", default="1x256,2x256,1x128,2x128,4x128,8x128,4x256")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--heal-only", action="store_true", help="heal the shapes and stop")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--inflate", default=None, help="serve behind the target at this cost")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", action="append", default=[], help="a field of the recipe")
    args = parser.parse_args()
    shapes = [DraftShape(*map(int, text.split("x"))) for text in args.shapes.split(",")]
    sets = [f"train.steps={args.steps}", f"target.dtype={args.dtype}", "train.save_every=50"]
    recipe = load_recipe("prune", sets=[*sets, *args.set])
    target = load_target("tiny", dtype=args.dtype)
    served = load_target("tiny", dtype=args.dtype, inflate=args.inflate) if args.inflate else target
    drafts = healed(target, recipe, shapes, args.out, Console())
    if args.heal_only:
        return
    base, vocab = prunable(target).module.shape, next(iter(drafts.values())).drafter.vocab
    prompts = [p.ids for p in heldout_prompts(served, 2)]
    latency = measure_latency(served, base, shapes, vocab, prompts)
    acceptances = fit_acceptance({shape: found.alpha for shape, found in drafts.items()})
    ranked = rank(shapes, latency, acceptances)
    rates = measured(served, drafts, ranked, args.tokens, args.prompts)
    print(json.dumps(summary(ranked, rates, drafts, latency.fit.r2, acceptances.fit.r2), indent=1))


def summary(
    ranked: list[Candidate],
    rates: dict[DraftShape, float],
    drafts: dict[DraftShape, Healed],
    latency_r2: float,
    acceptance_r2: float,
) -> dict[str, Any]:
    """Both rankings side by side, and whether the shallower of equal shapes was faster."""
    predicted = [c.tokens_per_second for c in ranked]
    found = [rates[c.shape] for c in ranked]
    return {
        "rows": [
            {**c.to_json(), "healed_alpha": drafts[c.shape].alpha, "measured": rates[c.shape]}
            for c in ranked
        ],
        "kendall_tau": kendall_tau(predicted, found),
        "r2": {"latency": latency_r2, "acceptance": acceptance_r2},
        "equal_parameters": [
            {
                "shallow": f"{a.layers}x{a.width}",
                "deep": f"{b.layers}x{b.width}",
                "shallow_is_faster": rates[a] > rates[b],
            }
            for a, b in equal_pairs(ranked)
        ],
    }


if __name__ == "__main__":
    main()
