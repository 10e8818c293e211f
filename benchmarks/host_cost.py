"""What drafting costs the host: the share of a target step that a drafter's own code takes.

For every family that needs no training, at batch 1: seconds inside `propose` (or the policy's
growth) and `observe` per round, beside the seconds of the target's plain step in the same process.
The clock is `time.perf_counter` around the calls. The claim: below 5 % of a step of the target
inflated to 300M parameters; --check exits with 8 if a family is dearer.

    python benchmarks/host_cost.py --inflate 300m --check
    python benchmarks/host_cost.py --drafters prompt-lookup,team --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from workloads import WORKLOADS

from specctl import Sampling, load_target
from specctl.core.drafter import DraftState
from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target

MOST = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds per round, and their share of a plain step of the target."""

    family: str
    propose_ms: float
    observe_ms: float
    step_ms: float
    share: float
    tau: float


def clocked(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        began = time.perf_counter()
        found = call(*args)
        into.append(time.perf_counter() - began)
        return found

    return run


def plain_step(target: Target, prompts: list[list[int]], tokens: int) -> float:
    """Median seconds of a round of plain decoding."""
    found: list[float] = []
    engine = Engine(target)
    engine.step = clocked(engine.step, found)  # type: ignore[method-assign]
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    engine.run([Request(tuple(p), sampling) for p in prompts])
    return median(found)


def cost_of(target: Target, name: str, prompts: list[list[int]], tokens: int, step: float) -> Cost:
    found = families()[name]
    drafter = found.build(found.options(), target.spec, None).to(target.device, target.dtype)
    engine = Engine(target, drafter, make_policy({"policy": found.policies[0]}))
    proposed: list[float] = []
    observed: list[float] = []
    inner = engine.drafting.inner
    inner.draft = clocked(inner.draft, proposed)  # type: ignore[method-assign]
    opened = drafter.open

    def watched(space: Any) -> DraftState:
        state = opened(space)
        state.observe = clocked(state.observe, observed)  # type: ignore[method-assign]
        return state

    drafter.open = watched  # type: ignore[method-assign]
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    made = engine.run([Request(tuple(p), sampling) for p in prompts])
    rounds = sum(c.stats.rounds for c in made)
    tau = sum(c.stats.tokens for c in made) / rounds
    each = mean(proposed), mean(observed) if observed else 0.0
    return Cost(name, 1e3 * each[0], 1e3 * each[1], 1e3 * step, sum(each) / step, tau)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    free = [name for name, found in families().items() if not found.trainable]
    parser.add_argument("--drafters", default=",".join(free))
    parser.add_argument("--workload", default="code", choices=list(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 8 if a family is dearer")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = WORKLOADS[args.workload](target, args.prompts)
    step = plain_step(target, prompts, args.tokens)
    costs, missing = [], {}
    for name in args.drafters.split(","):
        try:
            costs.append(cost_of(target, name, prompts, args.tokens, step))
        except SpecctlError as error:
            missing[name] = str(error)
            continue
        if not args.json:
            c = costs[-1]
            print(
                f"{c.family:20s} propose {c.propose_ms:7.3f} ms  observe {c.observe_ms:7.3f} ms  "
                f"{c.share:6.2%} of a step of {c.step_ms:.1f} ms  tau {c.tau:.2f}",
                flush=True,
            )
    for name, why in missing.items():
        print(f"{name}: not measured: {why}", file=sys.stderr)
    if args.json:
        print(json.dumps({"inflated": target.inflated, "rows": [asdict(c) for c in costs]}))
    dear = [c.family for c in costs if c.share > MOST]
    if args.check and dear:
        print(f"above {MOST:.0%} of a step: {', '.join(dear)}", file=sys.stderr)
        raise SystemExit(8)


if __name__ == "__main__":
    main()
