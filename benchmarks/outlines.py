"""What answers from outlines cost and save: tokens, processor time, how often there is an outline,
and how far the answers are from what the target would write.

Every prompt is answered plainly and in each of the kinds, on one thread. The loss is that of the
answer's tokens behind the plain prompt, under the target, in nats a token: what it thinks of the
text. Standard errors are over prompts; differences are of the same prompts.

    python benchmarks/outlines.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts specbench.jsonl --category mt_bench --count 8
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from time import process_time

import torch

from specctl import Outlining, generate, load_target
from specctl.runtime.outline.answer import KINDS
from specctl.runtime.target.target import Target
from specctl.runtime.turns.reward import Judge


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer. `points` and `waves` are 0 where it was written without an outline."""

    seconds: float
    tokens: int
    shown: int
    loss: float
    points: int
    waves: int
    is_sequential: bool


def answered(
    target: Target, judge: Judge, question: str, kind: str | None, points: int, **sampling: float
) -> Measured:
    began = process_time()
    how = None if kind is None else Outlining(kind, points)
    made = generate(target, question, outline=how, chat=True, **sampling)
    seconds, [output] = process_time() - began, made.outputs
    ids = [token for token in output.token_ids if token not in target.eos_ids]
    prompt = target.encode_chat([{"role": "user", "content": question}])
    loss = -math.log(max(judge.score(prompt, ids), 1e-9)) if ids else float("nan")
    report = output.outline
    if report is None:
        return Measured(seconds, made.stats.tokens, len(ids), loss, 0, 0, False)
    sizes = len(report.titles), len(report.waves)
    return Measured(
        seconds, report.tokens, len(ids), loss, *sizes, report.why_sequential is not None
    )


def mean(values: Sequence[float], digits: int = 2) -> str:
    spread = f" +- {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}" if values else "-"


def row(name: str, found: Sequence[Measured], plain: Sequence[Measured]) -> str:
    with_outline = [(a, b) for a, b in zip(found, plain, strict=True) if a.points]
    cells = [
        f"{len(with_outline)} of {len(found)}",
        mean([float(a.points) for a, _ in with_outline], 1),
        mean([float(a.waves) for a, _ in with_outline], 1),
        mean([float(a.tokens) for a in found], 0),
        mean([a.seconds for a in found], 1),
        mean([a.seconds / a.tokens * 1000 for a in found], 1),
        mean([a.loss for a in found]),
        mean([a.tokens / b.tokens for a, b in with_outline]),
        mean([a.seconds / b.seconds for a, b in with_outline]),
        mean([a.loss - b.loss for a, b in with_outline]),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--category")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--temperatures", nargs="*", type=float, default=(0.0, 0.7))
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    records = map(json.loads, words.prompts.read_text(encoding="utf-8").splitlines())
    kept = [one for one in records if words.category in (None, one["category"])]
    questions = [str(one["messages"][0]["content"]) for one in kept]
    questions = questions[:: max(1, len(questions) // words.count)][: words.count]
    judge = Judge(target)
    judge.open(min(target.spec.max_positions, 4096))
    generate(target, questions[0], chat=True, max_new_tokens=8)  # the first pays for allocations
    for heat in words.temperatures:
        found: dict[str | None, list[Measured]] = {kind: [] for kind in (None, *words.kinds)}
        for seed, question in enumerate(questions):
            sampling = {"temperature": heat, "max_new_tokens": words.tokens, "seed": seed}
            for kind, measured in found.items():
                measured.append(answered(target, judge, question, kind, words.points, **sampling))
                print(heat, seed, kind or "plain", measured[-1], file=sys.stderr, flush=True)
        show(heat, found)


def show(heat: float, found: Mapping[str | None, Sequence[Measured]]) -> None:
    titles = "with outline | points | waves | tokens | seconds | ms a token | loss"
    titles += " | tokens, of plain | seconds, of plain | loss, to plain"
    print(f"temperature {heat:g}\n\n| | {titles} |\n{'|---' * 11}|")
    for kind, measured in found.items():
        print(row(kind or "plain", measured, found[None]), flush=True)


if __name__ == "__main__":
    main()
