"""The table of a trimmed vocabulary: five sizes of one package, predicted and measured, by domain.

For every size: coverage, alpha, tau, MBSU, speed-up by the fitted cost, tokens per second and the
share of prompts that got slower, over all prompts and in each domain. Below it, how well two
predictors rank the sizes (Kendall's tau-b): the drafter's own distributions along text the target
wrote, and the older one that lets acceptance fall in proportion to coverage. benchmarks/drafters.py
makes runs/bench.

    python benchmarks/vocab.py --draft runs/bench/distill/package --prompts 48 --tokens 64
    python benchmarks/vocab.py --draft runs/bench/eagle3/package --inflate 300m --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specctl import load_target
from specctl.api.vocab_trim import TrimJob, gathered
from specctl.cli.options.loading import DraftChoice
from specctl.core.drafter import Drafter
from specctl.runtime.policies import Policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.candidates import TrimSettings, predict_from_coverage
from specctl.train.vocab.coverage import always_kept, coverage_curve, ranking
from specctl.train.vocab.measure import MeasuredDrafter, measure_drafter, measure_head_cost
from specctl.train.vocab.report import MBSU_FORMULA, TrimReport, kendall
from specctl.train.vocab.selectors import selector
from specctl.train.vocab.trim import trim

SHARES = (24, 12, 6, 3, 1)


class Clock:
    """Measures a drafter several times, the middle speed counts; the whole drafter only once.
    One writer: the benchmark."""

    def __init__(
        self, target: Target, prompts: list[HeldoutPrompt], settings: TrimSettings, repeats: int
    ) -> None:
        self.target, self.prompts, self.settings = target, prompts, settings
        self.repeats = repeats
        self.known: dict[int, MeasuredDrafter] = {}

    def __call__(self, drafter: Drafter, policy: Policy) -> MeasuredDrafter:
        size = self.target.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
        if size not in self.known:
            given = (self.prompts, self.settings.new_tokens, self.settings.temperature)
            runs = [
                measure_drafter(self.target, drafter, policy, *given) for _ in range(self.repeats)
            ]
            speed = median(run.tokens_per_second for run in runs)
            self.known[size] = replace(runs[0], tokens_per_second=speed)
        return self.known[size]


def table(args: argparse.Namespace) -> dict[str, Any]:
    """One report per size, and the agreement of predicted with measured rankings."""
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    loaded = DraftChoice(args.draft).load(target)
    drafter, policy = loaded.drafter, loaded.policy
    assert drafter is not None
    assert policy is not None
    base = TrimSettings(new_tokens=args.tokens, temperature=args.temperature)
    chosen = selector(args.selector)
    data = () if args.data is None else (str(args.data),)
    job = TrimJob(target, loaded, base, chosen, data, None, args.prompts)
    material = gathered(job)
    rank = ranking(material.counts, always_kept(target), drafter.vocab)
    sizes = args.sizes or sorted({max(16, rank.numel() // s // 8 * 8) for s in SHARES})
    cost = measure_head_cost(target, drafter, policy, rank, material.prompts)
    clock = Clock(target, list(material.prompts), base, args.repeats)
    reports = [
        trim(
            drafter, policy, target, material, replace(base, size=k), measure=clock, cost=cost
        ).report
        for k in sizes
    ]
    whole = clock(drafter, policy)
    curve = coverage_curve(rank, material.heldout)
    by_coverage = predict_from_coverage(
        sizes, curve, min(max(whole.alpha, 0.01), 0.99), policy.depth, cost, whole.tau
    )
    measured = [report.trials[0].speedup for report in reports]
    predicted = [report.trials[0].predicted.speedup for report in reports]
    clocked = [clock.known[k].tokens_per_second for k in sizes]
    return {
        "draft": args.draft,
        "family": drafter.family,
        "target": target.name,
        "inflated": target.inflated,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": len(material.prompts),
        "new_tokens": args.tokens,
        "temperature": args.temperature,
        "selector": chosen.name,
        "mbsu": MBSU_FORMULA,
        "rows": [row(report) for report in reports],
        "kendall": {
            "distributions_to_measured_tau": kendall(list(zip(predicted, measured, strict=True))),
            "distributions_to_tokens_per_second": kendall(
                list(zip(predicted, clocked, strict=True))
            ),
            "coverage_to_measured_tau": kendall(
                list(zip(by_coverage.speedup_N.tolist(), measured, strict=True))
            ),
        },
        "tau_error": {
            "distributions": worst_error(
                [(r.trials[0].predicted.tau, r) for r in reports], reports[-1]
            ),
            "coverage": worst_error(
                list(zip(by_coverage.tau_N.tolist(), reports, strict=True)), reports[-1]
            ),
        },
    }


def worst_error(pairs: list[tuple[float, TrimReport]], whole: TrimReport) -> float:
    """Largest error of predicted tau(k) / tau(whole), the whole vocabulary standing last."""
    full = pairs[-1][0]
    measured = whole.trials[0].measured.tau
    return max(abs(tau / full - r.trials[0].measured.tau / measured) for tau, r in pairs)


def row(report: TrimReport) -> dict[str, Any]:
    trial = report.trials[0]
    return {
        **trial.to_json(),
        "tokens_per_second": round(trial.measured.tokens_per_second, 1),
        "mbsu": round(report.after.moved.mbsu(trial.measured.tau), 4),
        "domains": [d.to_json() for d in report.domains],
    }


def markdown(found: dict[str, Any]) -> str:
    """The table in the words of runtime/measure/stats.py."""
    note = f"inflated to the cost of {found['inflated']}" if found["inflated"] else "embedded"
    heat = f"T = {found['temperature']:g}" if found["temperature"] else "greedy"
    lines = [
        f"{found['draft']} ({found['family']}), target {found['target']} ({note}), "
        f"{found['dtype']}, {found['threads']} threads, {found['prompts']} prompts x "
        f"{found['new_tokens']} tokens, {heat}, ids by {found['selector']}.",
        found["mbsu"],
        "",
        "| kept | domain | coverage | alpha | tau | MBSU | speed-up | tokens/s | slower prompts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in found["rows"]:
        for d in size["domains"]:
            a = d["after"]
            covered = "-" if d["coverage"] is None else f"{d['coverage']:.2%}"
            lines.append(
                f"| {size['size']:,} | {d['domain']} | {covered} | {a['alpha']:.3f} | "
                f"{a['tau']:.3f} | {a['mbsu']:.3f} | {a['speedup']:.3f} | "
                f"{a['tokens_per_second']:.0f} | {d['slower']:.0%} |"
            )
    lines += ["", "| kept | tau predicted | tau measured | S predicted | S measured |"]
    lines.append("|---|---|---|---|---|")
    for size in found["rows"]:
        p, m = size["predicted"], size["measured"]
        lines.append(
            f"| {size['size']:,} | {p['tau']:.3f} | {m['tau']:.3f} | {p['speedup']:.3f} | "
            f"{m['speedup']:.3f} |"
        )
    lines += ["", f"Kendall's tau: {json.dumps(found['kendall'])}"]
    lines.append(f"Largest error of tau(k) / tau(whole): {json.dumps(found['tau_error'])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True, help="a trained package")
    parser.add_argument("--sizes", type=int, nargs="*", default=None)
    parser.add_argument("--selector", default="vocab-trim")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = table(args)
    print(json.dumps(found) if args.json else markdown(found))


if __name__ == "__main__":
    main()
