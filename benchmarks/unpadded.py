"""Unpadded inputs (EMS-SD): tokens computed and time of verification, with and without padding.

Batches of held-out prompts on the embedded target, greedily, drafted by prompt lookup (rows find
much or nothing) and by a chain that ends where the drafter is unsure (--draft). Both ways in turn
for every batch size; the texts must be equal but for ties. Milliseconds are those of verification,
per round, median of the repeats.

    python benchmarks/unpadded.py --batches 4 8 16 --dtype float32
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts


def run(
    target: Target, drafter: Drafter, serve: dict[str, Any], batch: int, args: argparse.Namespace,
    packed: bool,
) -> dict[str, Any]:  # fmt: skip
    """One batch size, one way: tokens fed, true and computed per round, milliseconds a round."""
    engine = Engine(target, drafter, make_policy(serve), num_slots=batch)
    unpadded, seen = engine.reader._unpadded, [0, 0, 0, 0]
    assert unpadded is not None
    read = engine.reader.read

    def reading(round: Any, tree: Any) -> Any:
        valid_BT = tree.fed_valid_BT()
        seen[0] += 1
        seen[1] += valid_BT.numel()
        seen[2] += int(valid_BT.sum())
        return read(round, tree)

    def at(feed: Any, tree: Any) -> Any:
        found = type(unpadded).true_tokens(unpadded, feed, tree) if packed else None
        seen[3] += feed.ids_BT.numel() if found is None else len(found)
        return found

    class Counted(type(unpadded)):  # type: ignore[misc]
        def true_tokens(self, feed: Any, tree: Any) -> Any:
            return at(feed, tree)

    engine.reader.read = reading  # type: ignore[method-assign]
    engine.reader._unpadded = Counted(target.lm)
    sampling = Sampling(max_new_tokens=args.tokens, ignore_eos=True)
    prompts = [p.ids for p in heldout_prompts(target, batch)]
    done = engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    rounds = max(seen[0], 1)
    sizes = dict(zip(("fed", "true", "computed"), [n / rounds for n in seen[1:]], strict=True))
    milliseconds = 1e3 * engine.verify_seconds / rounds
    return {**sizes, "ms": milliseconds, "texts": [d.tokens for d in done]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", help="a drafter that is grown by a chain, ended by confidence")
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target("tiny", dtype=args.dtype)
    ways: dict[str, tuple[Drafter, dict[str, Any]]] = {
        "prompt-lookup": (load_drafter("prompt-lookup", target),
                          {"policy": "direct", "length": args.length}),
    }  # fmt: skip
    if args.draft:
        chain = {"policy": "chain", "length": args.length, "confidence": 0.5}
        ways[args.draft] = (load_drafter(args.draft, target), chain)
    rows = []
    for name, (drafter, serve) in ways.items():
        for batch in args.batches:
            found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _ in range(args.repeats):
                for packed in found:
                    found[packed].append(run(target, drafter, serve, batch, args, packed))
            first, second = found[False][0], found[True][0]
            same = sum(a == b for a, b in zip(first["texts"], second["texts"], strict=True))
            row = {"drafter": name, "batch": batch, "same_texts": f"{same} of {batch}"}
            row |= {k: round(second[k], 1) for k in ("fed", "true", "computed")}
            row |= {key: round(median(r["ms"] for r in found[packed]), 2)
                    for key, packed in (("ms_padded", False), ("ms_unpadded", True))}  # fmt: skip
            rows.append(row)
            if not args.json:
                print(row, flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
