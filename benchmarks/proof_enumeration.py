"""Every verification rule against the target's joint distribution, exactly: no sampling, float64.

python benchmarks/proof_enumeration.py [--json] [--level slice]

Enumerates all drafts and all coins of every legal rule x tree shape x family of distributions, then
compares the fast rules with the scalar ones on random trees under the same noise. Exit code 8 if
anything is off by more than 1e-12 or decided differently.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from specctl.core.tree import NodeKind
from specctl.runtime.proof.cases import proof_cases
from specctl.runtime.proof.compare import differences, random_round
from specctl.runtime.proof.enumerate import enumerate_case
from specctl.runtime.verify import RULES, legal

TOLERANCE = 1e-12
GATE = 8


def enumerate_all(level: str) -> dict[str, Any]:
    """Worst error over all cases, with counts per rule."""
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    worst, worst_case, num_outcomes = 0.0, "", 0
    for case in proof_cases(level):
        exact = enumerate_case(case)
        counts[case.rule] += 1
        num_outcomes += exact.num_outcomes
        if exact.error > worst:
            worst, worst_case = exact.error, case.name
    return {
        "level": level,
        "cases": sum(counts.values()),
        "cases_per_rule": dict(counts),
        "outcomes": num_outcomes,
        "max_abs_error": worst,
        "worst_case": worst_case,
        "seconds": round(time.perf_counter() - started, 2),
    }


def compare_all(rounds: int) -> dict[str, Any]:
    """Fast rules against scalar rules: trees compared and trees decided differently."""
    started = time.perf_counter()
    num_trees = num_different = 0
    for rule in RULES:
        for kind in NodeKind:
            for is_chain in (True, False):
                if not legal(rule, kind, is_chain):
                    continue
                for seed in range(rounds):
                    kept = 5 if seed % 2 else None
                    one = random_round(np.random.default_rng(seed), kind, is_chain, kept=kept)
                    num_different += differences(rule, one)
                    num_trees += one.tree.token_BN.shape[0]
    seconds = round(time.perf_counter() - started, 2)
    return {"trees": num_trees, "different": num_different, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=("slice", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=40, help="batches of 50 trees per rule")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    exact, compared = enumerate_all(options.level), compare_all(options.rounds)
    passed = exact["max_abs_error"] <= TOLERANCE and not compared["different"]
    if options.json:
        print(json.dumps({"enumeration": exact, "comparison": compared, "passed": passed}))
        return 0 if passed else GATE
    for rule, count in exact["cases_per_rule"].items():
        print(f"{rule:12s} {count:6,} cases")
    print(
        f"{exact['cases']:,} cases, {exact['outcomes']:,} outcomes of drafts and coins: "
        f"max abs error {exact['max_abs_error']:.2e} ({exact['worst_case']}), "
        f"{exact['seconds']:.1f} s"
    )
    print(
        f"{compared['trees']:,} random trees, fast rule against scalar rule: "
        f"{compared['different']:,} decided differently, {compared['seconds']:.1f} s"
    )
    return 0 if passed else GATE


if __name__ == "__main__":
    sys.exit(main())
