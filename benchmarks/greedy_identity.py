"""Greedy identity in float32: every drafter, chain and tree, batch 1 and 3, against transformers.

The reference is transformers' own greedy decoding of the embedded target, one prompt at a time.
A difference counts as explained only when the two best logits at its first position lie within a
few units in the last place of each other; anything else is a failure (exit 1).

    python benchmarks/greedy_identity.py --drafts runs/distill/package,runs/eagle3/package \\
        --prompts 200 --tokens 64 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specctl import Sampling, generate, load_drafter, load_target
from specctl.drafters import family
from specctl.recipes.targets import resolve
from specctl.runtime.policies import make_policy
from specctl.train.data.prompts.heldout import heldout_prompts

TREES = {
    "chain": {"policy": "chain", "length": 5},
    "static-tree": {"policy": "static-tree", "branch": (3, 2, 1, 1)},
    "dynamic-tree": {"policy": "dynamic-tree", "length": 5, "nodes": 16, "beam": 4},
    "direct": {"policy": "direct", "length": 5, "nodes": 24},
}
ULPS = 4.0


@torch.inference_mode()
def reference(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Greedy continuation by transformers, without EOS handling."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(map(int, out[0, len(prompt) :]))


@torch.inference_mode()
def explained(model: Any, prefix: list[int]) -> bool:
    """The target's two best tokens after `prefix` are within ULPS of each other in float32."""
    best = model(torch.tensor([prefix])).logits[0, -1].float().topk(2).values
    ulp = torch.finfo(torch.float32).eps * best[0].abs().clamp(min=1.0)
    return bool(best[0] - best[1] <= ULPS * ulp)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", default="prompt-lookup,token-recycling")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,3")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target("tiny", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny").path, dtype=torch.float32).eval()
    prompts = [list(p.ids) for p in heldout_prompts(target, args.prompts)]
    wanted = [reference(model, prompt, args.tokens) for prompt in prompts]
    rows, unexplained = [], 0
    for name in args.drafts.split(","):
        drafter = load_drafter(name, target)
        for policy in family(drafter.family).policies:
            for batch in map(int, args.batches.split(",")):
                result = generate(
                    target,
                    prompts,
                    drafter=drafter,
                    policy=make_policy(TREES[policy]),
                    sampling=Sampling(max_new_tokens=args.tokens, ignore_eos=True),
                    batch=batch,
                )
                row = compare(model, prompts, wanted, [o.token_ids for o in result.outputs])
                row |= {"draft": name, "policy": policy, "batch": batch, "tau": result.stats.tau}
                unexplained += row["unexplained"]
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    report = {
        "prompts": len(prompts),
        "tokens": args.tokens,
        "unexplained": unexplained,
        "rows": rows,
    }
    print(json.dumps(report) if args.json else f"unexplained mismatches: {unexplained}")
    return int(unexplained > 0)


def compare(
    model: Any, prompts: list[list[int]], wanted: list[list[int]], got: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Counts of identical, explained and unexplained continuations."""
    counts = {"identical": 0, "explained": 0, "unexplained": 0}
    for prompt, want, have in zip(prompts, wanted, got, strict=True):
        if list(have) == want:
            counts["identical"] += 1
            continue
        first = next(i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b)
        kind = "explained" if explained(model, prompt + want[:first]) else "unexplained"
        counts[kind] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
