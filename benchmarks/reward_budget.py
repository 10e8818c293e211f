"""What a budget of reward-guided decoding buys, and what is spent of it.

The costs of a token are measured once (or given in the law) and hold for all budgets. Greedily, of
every budget: the share of steps that the target is to write by the rule and that it wrote, its
share of the tokens, what was spent by these costs, and what in truth: processor time over that of
the target alone, for answers of the same limit, without the reading of the prompt by each model.
Standard errors are over prompts. Every answer is said on the way.

    python benchmarks/reward_budget.py --target qwen2.5-coder-1.5b --beside qwen2.5-coder-0.5b \\
        --prompts mathematics.jsonl --count 5 --budgets 0.7 0.85
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from time import process_time

from mixtures import Pair, cells, options

from specctl.runtime.generate import Generated, generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import Mixture, parse


def seconds_of(target: Target, ids: Sequence[int], tokens: int) -> tuple[Generated, float]:
    """An answer, and its processor seconds."""
    began = process_time()
    made = generate(target, [ids], sampling=Sampling(max_new_tokens=tokens))
    return made, process_time() - began


def main() -> None:
    parser = options(__doc__, tokens=96)
    parser.add_argument("--category", help="Of the prompts, those of this category alone.")
    parser.add_argument("--budgets", nargs="+", type=float, required=True)
    parser.add_argument("--longest", type=int, default=16, help="tokens of a step")
    parser.add_argument("--judge", choices=("target", "beside"), default="target")
    parser.add_argument("--costs", nargs=2, type=float, default=(0.0, 0.0), help="small, judge")
    words = parser.parse_args()
    pair = Pair.load(words.target, words.beside)
    lines = map(json.loads, words.prompts.read_text(encoding="utf-8").splitlines())
    kept = [one for one in lines if words.category in (None, one.get("category"))]
    prompts = [pair.own.encode_chat(one["messages"]) for one in kept]
    prompts = prompts[:: max(1, len(prompts) // words.count)][: words.count]
    models = words.beside if words.judge == "target" else f"{words.beside},{words.beside}"

    def law_of(budget: float, small: float, judge: float) -> Mixture:
        numbers = f"{budget:g}:{words.longest}:{small:g}:{judge:g}"
        return parse(f"reward-budget:{numbers}={models}")

    small, judge = words.costs
    if not (small and judge):
        most = pair.by(law_of(0.999, small, judge)).mixture
        assert most is not None
        small, judge = most.numbers[2:]
    laws = [law_of(budget, small, judge) for budget in words.budgets]
    wholes = [pair.by(law) for law in laws]
    found: list[list[tuple[float, ...]]] = [[] for _ in laws]
    for number, ids in enumerate(prompts):
        _, read = seconds_of(pair.own, ids, 1)
        _, read_small = seconds_of(pair.beside, ids, 1)
        _, plain = seconds_of(pair.own, ids, words.tokens)
        for whole, rows in zip(wholes, found, strict=True):
            made, spent = seconds_of(whole, ids, words.tokens)
            turns = made.stats.turns
            assert turns is not None
            assert turns.spent is not None
            spent -= read_small + read * bool(turns.by_target)
            spent -= read if words.judge == "target" else read_small
            steps = turns.by_target / turns.turns
            rows.append((steps, turns.share, turns.spent, spent / (plain - read)))
            said = " ".join(f"{one:.3f}" for one in rows[-1])
            print(f"prompt {number}: {whole.mixture} {said}", file=sys.stderr, flush=True)
    print("| law | share by the rule | of steps | of tokens | spent by the costs | time |")
    print("|---|---|---|---|---|---|")
    for law, rows in zip(laws, found, strict=True):
        share = law.numbers[0] - small - judge
        columns = cells([list(column) for column in zip(*rows, strict=True)])
        print(f"| `{law.law_text}` | {share:.2f} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
