"""Reading a prompt, ours beside transformers' on the same weights: milliseconds to the first token.

One greedy token behind a prompt of so many tokens, cache and sampling included, in turn; medians of
processor time with quartiles of the ratio. The first tokens have to be the same.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --inflate 300m --dtype bfloat16 --lengths 512 1000
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median, quantiles
from typing import Any

import torch

from specctl import Sampling, generate, load_target
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts


def text_of(target: Target, length: int) -> list[int]:
    """So many tokens of held-out text."""
    ids: list[int] = []
    for prompt in heldout_prompts(target, 240):
        ids += prompt.ids
    assert len(ids) >= length, f"held-out text has {len(ids)} tokens, {length} asked for"
    return ids[:length]


def milliseconds(target: Target, model: Any, length: int, repeats: int) -> dict[str, Any]:
    ids, one = text_of(target, length), Sampling(0.0, max_new_tokens=1, ignore_eos=True)
    ids_BT = torch.tensor([ids])

    def ours() -> int:
        return generate(target, ids, sampling=one).outputs[0].token_ids[0]

    def theirs() -> int:
        how = {"max_new_tokens": 1, "do_sample": False, "attention_mask": ids_BT * 0 + 1}
        return int(model.generate(ids_BT, **how, pad_token_id=0, eos_token_id=None)[0, -1])

    spent: dict[str, list[float]] = {"specctl": [], "transformers": []}
    assert ours() == theirs(), "another first token"
    for _ in range(repeats):
        for name, way in (("specctl", ours), ("transformers", theirs)):
            began = time.process_time()
            way()
            spent[name].append((time.process_time() - began) * 1e3)
    ratios = [b / a for a, b in zip(*spent.values(), strict=True)]
    low, _, high = quantiles(ratios, n=4)
    of = {name: median(each) for name, each in spent.items()}
    return {"tokens": length, **of, "ratio": median(ratios), "quartiles": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1000])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    model = as_transformers(target.lm)
    rows = [milliseconds(target, model, length, args.repeats) for length in args.lengths]
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        spent = "  ".join(f"{name} {row[name]:7.1f} ms" for name in ("specctl", "transformers"))
        low, high = row["quartiles"]
        print(f"{row['tokens']:5d} tokens  {spent}  {row['ratio']:4.2f}x [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
