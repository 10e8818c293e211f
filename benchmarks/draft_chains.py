"""What the calls for chains spare a draft model: processor time of a round, with and without them.

Without: every drafted token is a whole forward of the compiled step. With: a greedy chain is one
call, a sampled one a short call a token. Both ways in turn in one process, prompt by prompt, at one
thread; medians over the prompts. The texts must be equal.

    python benchmarks/draft_chains.py --draft runs/quickstart/package
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from statistics import median
from unittest.mock import patch

import torch

from specctl import generate, load_drafter, load_target
from specctl.drafters.states.lm_state import LmState
from specctl.models.native import library as built
from specctl.train.data.heldout import heldout_prompts

SEED = 1


def nothing(*given: object) -> None:
    """In place of a call for chains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    assert built.library().functions is not None, built.library().missing
    torch.set_num_threads(1)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    drafter = load_drafter(args.draft, target)
    prompts = [list(p.ids)[:64] for p in heldout_prompts(target, args.prompts)]
    rows = []
    for temperature in (0.0, 0.8):
        spent: dict[bool, list[float]] = {False: [], True: []}
        for index, prompt in enumerate(prompts):
            texts = {}
            for with_calls in (True, False) if index % 2 else (False, True):
                with ExitStack() as stack:
                    if not with_calls:
                        for name in ("best_chain", "_read_next"):
                            stack.enter_context(patch.object(LmState, name, nothing))
                    began = time.process_time()
                    made = generate(
                        target,
                        [prompt],
                        drafter,
                        max_new_tokens=args.tokens,
                        temperature=temperature,
                        seed=SEED,
                        length=args.length,
                        adaptive=False,
                    )
                    seconds = time.process_time() - began
                spent[with_calls].append(1e3 * seconds / made.stats.rounds)
                texts[with_calls] = made.text
            assert texts[True] == texts[False], "a call for chains changed the text"
        ratio = median(a / b for a, b in zip(spent[False], spent[True], strict=True))
        of = {"stepwise_ms": median(spent[False]), "chain_ms": median(spent[True])}
        rows.append({"temperature": temperature, **of, "ratio": ratio})
        if not args.json:
            a, b = of.values()
            print(f"T = {temperature:g}: {a:.2f} ms a round stepwise, {b:.2f} now, {ratio:.3f}x")
    if args.json:
        print(json.dumps({"inflated": target.inflated, "dtype": args.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
