"""The table of tree policies: one drafter, every way to grow it, interleaved in one process.

Each policy is run as its recipe or its defaults say, all on the same prompts in turn; the table
gives tau, nodes verified a round, and the median of tokens/s beside plain decoding. With --fit the
policies that can be fitted to the device are (runtime/measure/cost.py). --calibrate measures the
chances that serve.acceptance and serve.profile want, and stops.

    python benchmarks/trees.py --draft runs/distill/package
    python benchmarks/trees.py --draft runs/eagle3/package --temperature 0 --fit --json
    python benchmarks/trees.py --draft runs/distill/package --calibrate
    python benchmarks/trees.py --draft runs/dflash/package --policies marginal-tree:nodes=8,dyspec
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter, Outcome, RoundSeconds
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import equip, measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.stats import Stats
from specctl.runtime.policies import TREES, make_policy
from specctl.runtime.policies.base import Fitting, Policy
from specctl.runtime.policies.hardware_tree import Profile
from specctl.runtime.policies.length import FixedLength
from specctl.runtime.policies.static_tree import StaticTree
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

Prompts = list[list[int]]


@dataclass(slots=True)
class Tally(FixedLength):
    """Which sibling is accepted, of a bushy tree drafted round after round: siblings of a greedy
    run are best tokens, of a sampled run draws without replacement tested from the root (rule
    recursive), so both give the chances for their own setting. Counts at each depth how often the
    text came by, and which rank it took. One writer: the engine."""

    width: int = 1
    visits: list[int] = field(init=False)
    taken: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.visits = [0] * self.fixed
        self.taken = [[0] * self.width for _ in range(self.fixed)]

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        rank_BN = outcome.tree.rank_BN.tolist()
        for ranks, path, ended in zip(
            rank_BN, outcome.path_BP.tolist(), outcome.finished, strict=True
        ):
            nodes = [fed - 1 for fed in path if fed > 0]
            for depth, node in enumerate(nodes):
                self.visits[depth] += 1
                self.taken[depth][ranks[node]] += 1
            if ended is None and len(nodes) < outcome.tree.depth:
                self.visits[len(nodes)] += 1

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By rank, all depths together."""
        visits = max(1, sum(self.visits))
        return tuple(sum(level[r] for level in self.taken) / visits for r in range(self.width))

    @property
    def profile(self) -> Profile:
        """By depth and rank."""
        pairs = zip(self.taken, self.visits, strict=True)
        return tuple(tuple(one / max(1, visits) for one in level) for level, visits in pairs)


def tally(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    width: int = 6,
    depth: int = 2,
) -> Tally:
    """Chances measured while continuing those prompts."""
    found = Tally(CostTable({}, {}, "", "", 1), fixed=depth, width=width)
    policy = StaticTree((width,) * depth)
    rule = "auto" if sampling.greedy else "recursive"
    engine = Engine(target, drafter, policy, rule, num_slots=len(prompts), chooser=found)
    engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    return found


def rows(
    target: Target,
    drafter: Drafter,
    policies: dict[str, Policy | None],
    prompts: Prompts,
    sampling: Sampling,
    repeats: int,
) -> list[dict[str, Any]]:
    """One row a policy (None: plain decoding); every repeat runs all of them in turn. The first
    only warms up, prompt by prompt, which tells how much tau differs between them."""
    found: dict[str, list[Stats]] = {name: [] for name in policies}
    errors: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, policy in policies.items():
            drafted = None if policy is None else drafter

            def run(given: Prompts, drafted: Any = drafted, policy: Any = policy) -> Stats:
                how = {"drafter": drafted, "policy": policy, "sampling": sampling}
                return generate(target, given, **how).stats

            if repeat:
                found[name].append(run(prompts))
            else:
                errors[name] = tau_error([run([prompt]) for prompt in prompts])
    speeds = {n: statistics.median(s.tokens_per_second for s in all_) for n, all_ in found.items()}
    return [
        {
            "policy": name,
            "tau": round(all_[-1].tau, 3),
            "tau_error": round(errors[name], 3),
            "nodes": round(all_[-1].drafted / max(1, all_[-1].rounds), 2),
            "draft_share": round(all_[-1].draft_share, 3),
            "tokens_per_second": round(speeds[name], 1),
            "speedup": round(speeds[name] / speeds["plain"], 3),
        }
        for name, all_ in found.items()
    ]


def tau_error(stats: Sequence[Stats]) -> float:
    """Standard error of tau, a ratio of sums over prompts, as prompts differ."""
    tokens, rounds, n = sum(s.tokens for s in stats), sum(s.rounds for s in stats), len(stats)
    if n < 2 or not rounds:
        return 0.0
    squares = sum((s.tokens - tokens / rounds * s.rounds) ** 2 for s in stats)
    return float((squares * n / (n - 1)) ** 0.5 / rounds)


def policy_of(words: str) -> Policy:
    """`NAME` or `NAME:FIELD=VALUE:...` as in a recipe's `serve`."""
    name, *fields = words.split(":")
    pairs = (field.partition("=") for field in fields)
    return make_policy({"policy": name, **{key: json.loads(value) for key, _, value in pairs}})


def contenders(
    target: Target, drafter: Drafter, names: list[str], prompts: Prompts | None
) -> dict[str, Policy | None]:
    """Plain decoding, a chain, and the named trees, fitted to the device if there are prompts."""
    found: dict[str, Policy | None] = {"plain": None, "chain": make_policy({"policy": "chain"})}
    for name in names:
        policy = policy_of(name)
        if prompts is not None and isinstance(policy, Fitting):
            policy = equip(policy, measure_costs(target, drafter, policy, prompts)).policy
        found[name] = policy
    return found


def markdown(table: list[dict[str, Any]], note: str) -> str:
    head = list(table[0])
    lines = [note, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, r.values())) + " |" for r in table)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", required=True, help="package of a stepwise drafter")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--inflate")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", default=",".join(TREES))
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fit", action="store_true", help="fit policies to the device")
    parser.add_argument("--calibrate", action="store_true", help="measure acceptances and stop")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype, inflate=args.inflate)
    drafter = load_drafter(args.draft, target).to(target.device, target.dtype)
    prompts = [list(one.ids) for one in heldout_prompts(target, args.prompts)]
    sampling = Sampling(args.temperature, max_new_tokens=args.tokens, ignore_eos=True)
    if args.calibrate:
        found = tally(target, drafter, prompts, sampling)
        print(f"serve.acceptance={[round(p, 4) for p in found.acceptance]}")
        print(f"serve.profile={[[round(p, 4) for p in level] for level in found.profile]}")
        return
    policies = contenders(target, drafter, args.policies.split(","), prompts if args.fit else None)
    table = rows(target, drafter, policies, prompts, sampling, args.repeats)
    note = (
        f"{args.draft} on {target.name} ({target.device}, {args.dtype}, "
        f"{target.inflated or 'as published'}), T = {args.temperature:g}, "
        f"{len(prompts)} prompts x {args.tokens} tokens, batch 1, medians of {args.repeats}."
    )
    print(json.dumps({"note": note, "rows": table}) if args.json else markdown(table, note))


if __name__ == "__main__":
    main()
