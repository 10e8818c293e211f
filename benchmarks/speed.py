"""Wall clock against the alternatives, interleaved in one process on the same weights.

Against: a bare forward loop over the same forward (what the engine itself costs), transformers'
plain generate, transformers' assisted generation with the very same small-LM draft, transformers'
prompt lookup. With --inflate the target costs as much as a larger model and says the same; the
transformers contenders then run the same inflated weights. benchmarks/drafters.py makes runs/bench.

    python benchmarks/speed.py --small-lm runs/bench/distill/package \\
        --best runs/bench/eagle3/package
    python benchmarks/speed.py ... --inflate 300m --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.api.against import assistant_model
from specctl.drafters import family
from specctl.runtime.measure.bench import (
    Contender,
    OnAnswers,
    Prompts,
    bench,
    engine_contender,
    transformers_contender,
)
from specctl.runtime.measure.timed import Timed
from specctl.runtime.policies import make_policy
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts


def bare_contender(name: str, target: Target) -> Contender:
    """The shortest possible greedy loop over the same forward: no rows, no rules, no statistics.
    The engine's plain decoding is judged against it."""

    @torch.inference_mode()
    def continue_one(prompt: Sequence[int], count: int) -> list[int]:
        slot_B = torch.zeros(1, dtype=torch.long, device=target.device)
        kv = target.new_kv(1, len(prompt) + count + 1)
        ids_BT, kept, new = torch.tensor([list(prompt)], device=target.device), 0, []
        while True:
            T = ids_BT.shape[1]
            start_B = torch.full_like(slot_B, kept)
            kv.begin((0,), slot_B, start_B, T, kept + T, kept)
            position_BT = start_B[:, None] + torch.arange(T, device=target.device)
            masks = target.lm.chain_masks(start_B, T, kept + T)
            out = target.lm.forward(ids_BT, position_BT, masks, kv)
            assert out.logits_BTV is not None
            new.append(int(out.logits_BTV[0, -1].argmax()))
            kept += T
            if len(new) == count:
                return new
            ids_BT = torch.tensor([new[-1:]], device=target.device)

    def run(prompts: Prompts, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        del on_answers
        started = time.perf_counter()
        outputs = tuple(tuple(continue_one(p, sampling.max_new_tokens)) for p in prompts)
        return Timed(sum(map(len, outputs)), time.perf_counter() - started, outputs)

    return Contender(name, run)


def contenders(target: Target, args: argparse.Namespace, folder: Path) -> list[Contender]:
    model = as_transformers(target.lm)
    eos = target.eos_ids
    found = [
        engine_contender("plain", target),
        bare_contender("bare forward loop", target),
        transformers_contender("transformers plain", model, eos),
        transformers_contender(
            "transformers prompt lookup", model, eos, prompt_lookup_num_tokens=5
        ),
        engine_contender(
            "prompt-lookup", target, load_drafter("prompt-lookup", target), make_policy(DIRECT)
        ),
    ]
    if args.small_lm:
        assistant = assistant_model(args.small_lm, target, folder / "assistant", args.length)
        name = "transformers assisted, same draft"
        found.append(transformers_contender(name, model, eos, assistant_model=assistant))
        drafter = load_drafter(args.small_lm, target).to(target.device, target.dtype)
        chain = make_policy({"policy": "chain", "length": args.length})
        found.append(engine_contender("small-lm, same draft", target, drafter, chain))
    for path in args.best.split(",") if args.best else []:
        drafter = load_drafter(path, target).to(target.device, target.dtype)
        stepwise = "chain" in family(drafter.family).policies
        for length in map(int, args.lengths.split(",")):
            serve = {"policy": "chain"} if stepwise else DIRECT
            name = f"{Path(path).parent.name} length {length}"
            found.append(
                engine_contender(name, target, drafter, make_policy({**serve, "length": length}))
            )
    return found


DIRECT = {"policy": "direct", "length": 5, "nodes": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small-lm", default=None, help="package of a small-lm drafter")
    parser.add_argument("--best", default=None, help="packages of other drafters, comma-separated")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--lengths", default="3,5,7")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = [list(p.ids) for p in heldout_prompts(target, args.prompts)]
    settings = [
        Sampling(temperature=float(t), max_new_tokens=args.tokens, ignore_eos=True)
        for t in args.temperatures.split(",")
    ]
    with tempfile.TemporaryDirectory() as folder:
        ways = contenders(target, args, Path(folder))
        report = bench(target, ways, prompts, settings, repeats=args.repeats)
    if args.json:
        print(json.dumps(report.to_json()))
        return
    print(f"{report.target} inflated={report.inflated} {report.dtype} threads={report.threads}")
    for row in report.rows:
        tau = "-" if row.tau is None else f"{row.tau:.2f}"
        same = {True: "identical", False: "DIFFERS", None: ""}[row.identical]
        print(
            f"{row.name:34s} {row.setting:7s} tau {tau:>5s} {row.tokens_per_second:8.1f} tok/s "
            f"{row.speedup:5.2f}x {same}"
        )


if __name__ == "__main__":
    main()
