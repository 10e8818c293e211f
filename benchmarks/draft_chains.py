"""What the calls for chains spare a drafter: processor time of a round, with and without them.

Without: every drafted token is an ordinary forward of the compiled step. With: a chain that is
greedy or drawn without a bias is one call, any other a short call a token. Draft models and
layers of the target alike. Both ways in turn in one process, prompt by prompt, at one thread;
medians over the prompts, and the quartiles of the ratio. Texts and drafts must be equal. `--served`
drafts as a recipe or a package of that name says, with its stop rule (a family: chains of five), in
place of chains of `--length`. `--top-k` and `--top-p` cut what is drawn at T = 0.8.

    python benchmarks/draft_chains.py --draft runs/quickstart/package
    python benchmarks/draft_chains.py --draft unified-skip layer-skip [--served] [--inflate 300m]
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch

from specctl import generate, load_drafter, load_target
from specctl.api.generate import GenerateResult
from specctl.core.drafter import Drafter
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.drafters.states.lm_state import LmState
from specctl.models.native import library as built
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

SEED = 1


def nothing(*given: object) -> None:
    """In place of a call for chains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True, nargs="+")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--top-k", type=int, default=None)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    assert built.library().functions is not None, built.library().missing
    torch.set_num_threads(1)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = [list(p.ids)[:64] for p in heldout_prompts(target, args.prompts)]
    rows = []
    for name in args.draft:
        for temperature in (0.0, 0.8):
            rows.append(measured(target, name, prompts, temperature, args))
            if not args.json:
                print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"inflated": target.inflated, "dtype": args.dtype, "rows": rows}))


def measured(
    target: Target, name: str, prompts: list[list[int]], temperature: float, args: Any
) -> dict[str, Any]:
    drafter = load_drafter(name, target)
    spent: dict[bool, list[float]] = {False: [], True: []}
    drafted = rounds = 0
    for index, prompt in enumerate(prompts):
        did = {}
        for with_calls in (True, False) if index % 2 else (False, True):
            with ExitStack() as stack:
                if not with_calls:
                    for state in (LmState, BorrowedState):
                        for call in ("whole_chain", "_read_next"):
                            stack.enter_context(patch.object(state, call, nothing))
                began = time.process_time()
                made = decode(target, drafter, prompt, temperature, args)
                seconds = time.process_time() - began
            stats = made.stats
            spent[with_calls].append(1e3 * seconds / stats.rounds)
            did[with_calls] = made.text, stats.rounds, stats.drafted, stats.accepted
        assert did[True] == did[False], "a call for chains changed the drafts"
        drafted, rounds = drafted + stats.drafted, rounds + stats.rounds
    ratios = [a / b for a, b in zip(spent[False], spent[True], strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return {
        "draft": name,
        "temperature": temperature,
        "stepwise_ms": median(spent[False]),
        "chain_ms": median(spent[True]),
        "ratio": middle,
        "quartiles": [low, high],
        "drafted": drafted / rounds,
    }


def decode(
    target: Target, drafter: Drafter, prompt: list[int], temperature: float, args: Any
) -> GenerateResult:
    how: dict[str, Any] = {"adaptive": False}
    if not args.served:
        how["policy"] = make_policy({"policy": "chain", "length": args.length})
    cuts = {"top_k": args.top_k, "top_p": args.top_p} if temperature else {}
    sampling = {"max_new_tokens": args.tokens, "temperature": temperature, "seed": SEED, **cuts}
    return generate(target, [prompt], drafter, **sampling, **how)


def line(row: dict[str, Any]) -> str:
    return (
        "{draft}, T = {temperature:g}, {drafted:.2f} tokens a draft: {stepwise_ms:.2f} ms a round "
        "stepwise, {chain_ms:.2f} now, {ratio:.3f}x [{quartiles[0]:.3f}, {quartiles[1]:.3f}]"
    ).format(**row)


if __name__ == "__main__":
    main()
