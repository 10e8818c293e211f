"""Drafting in the target's own cache, and verifying from the exit layer: what each saves.

Forwards: a verifying forward of T tokens from the exit layer E on (`resume`: the last drafted token
goes through the lower layers first), as a share of the whole forward. Rounds: seconds a round of
greedy chains of five, drafted by `layer-skip` or another, as a share of the rounds of

    own       the drafter keeps a copy of the target's keys and values (before)
    shared    it drafts in the target's cache; the verification reads all tokens anew
    resumed   the same, and every verification starts at the exit layer
    served    the same, where it saves enough (`LEAST_SAVED`): what users get

One thread; the arms take turns forward by forward and prompt by prompt, and the medians of their
ratios are printed. The inflated target is run in its own numbering: exits count its own layers.

    python benchmarks/shared_layers.py                       # the embedded target, compiled step
    python benchmarks/shared_layers.py --inflate 300m --tokens 16 --prompts 4
    python benchmarks/shared_layers.py --way pytorch         # or transformers
    python benchmarks/shared_layers.py --part rounds --rows 3 --exits 2,4
    python benchmarks/shared_layers.py --part rounds --family calm --exits 4    # reads no exit
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from specctl import load_target
from specctl.core import language_model
from specctl.core.drafter import Drafter
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed, LmOut
from specctl.drafters import family
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.inflate import InflatedLM
from specctl.train.data.prompts.heldout import heldout_prompts

KEPT = 200
WAYS = ("compiled", "pytorch", "transformers")
ALWAYS, NEVER = 0.0, float("inf")
ARMS = {"own": NEVER, "shared": NEVER, "resumed": ALWAYS, "served": language_model.LEAST_SAVED}


def target_of(args: argparse.Namespace) -> Target:
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    if isinstance(target.lm, InflatedLM):
        target = replace(target, lm=target.lm.large)
    if args.way == "transformers":
        with TemporaryDirectory() as folder:
            write_target(target, Path(folder))
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
        target = replace(target, lm=HfLM(model.eval()))
    return target


@contextmanager
def saving_at_least(least: float) -> Iterator[None]:
    with patch.object(language_model, "LEAST_SAVED", least):
        yield


@torch.inference_mode()
def forwards(target: Target, width: int, exit_layer: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a whole forward, and the share of it that one from the exit layer takes."""
    lm, span = target.lm, KEPT + width
    torch.manual_seed(width)
    ids, start = torch.randint(0, target.spec.vocab_size, (1, width)), torch.tensor([KEPT])
    kv, slot = lm.new_kv(1, span), torch.tensor([0])
    for store in (*kv.key_ZJLE, *kv.value_ZJLE):
        store.normal_()
    feed = Feed(ids, start[:, None] + torch.arange(width), lm.chain_masks(start, width, span))

    def aimed(run: Callable[[], LmOut | None]) -> LmOut:
        kv.begin((0,), slot, start, width, span, KEPT)
        out = run()
        assert out is not None, "this model verifies whole"
        return out

    lower = replace(feed, taps=(exit_layer,), logits=False, parts=SubLayers.span(0, exit_layer))
    read = aimed(lambda: lm.run(lower, kv)).taps[exit_layer][:, : max(1, width - 1)]
    ways = lambda: lm.run(feed, kv), lambda: lm.resume(feed, ExitStates(exit_layer, read), kv)
    spent: tuple[list[float], list[float]] = [], []
    with saving_at_least(ALWAYS):
        for _ in range(repeats):
            for way, seconds in zip(ways, spent, strict=True):
                began = time.process_time()
                aimed(way)
                seconds.append(time.process_time() - began)
    share = median(b / a for a, b in zip(*spent, strict=True))
    return {"whole_ms": median(spent[0]) * 1e3, "share": share}


def drafter_of(target: Target, name: str, layers: int, arm: str) -> Drafter:
    """Untrained where it would be trained: its rounds take as long."""
    method = family(name)
    options = {"layers": layers} if "layers" in method.options.__dataclass_fields__ else {}
    drafter = method.build(method.options(**options), target.spec, None)
    if arm == "own":
        needs = replace(drafter.needs(), copied=())
        drafter.needs = lambda: needs  # type: ignore[method-assign]
    return drafter


def rounds(target: Target, layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a round with a cache of its own, and the shares of it that the others take."""
    policy = partial(make_policy, {"policy": "chain", "length": args.length})
    engines = {
        arm: Engine(
            target, drafter_of(target, args.family, layers, arm), policy(), num_slots=args.rows
        )
        for arm in ARMS
    }
    prompts = [tuple(each.ids) for each in heldout_prompts(target, args.prompts * args.rows)]
    sampling = Sampling(max_new_tokens=args.tokens, ignore_eos=True)
    spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for at in range(-1, args.prompts):  # the first is for warming up
        first = max(at, 0) * args.rows
        some = [Request(prompt, sampling) for prompt in prompts[first : first + args.rows]]
        order = list(ARMS)[at % len(ARMS) :] + list(ARMS)[: at % len(ARMS)]
        texts = set()
        for arm in order:
            engine = engines[arm]
            before = engine.draft_seconds + engine.verify_seconds
            with saving_at_least(ARMS[arm]):
                done = engine.run(some)
            texts.add(tuple(row.tokens for row in done))
            took = engine.draft_seconds + engine.verify_seconds - before
            if at >= 0:
                spent[arm].append(took / max(row.stats.rounds for row in done))
        assert len(texts) == 1, "texts differ"
    shares = {
        arm: median(b / a for a, b in zip(spent["own"], spent[arm], strict=True)) for arm in ARMS
    }
    return {"own_ms": median(spent["own"]) * 1e3, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("forwards", "rounds", "both"), default="both")
    parser.add_argument(
        "--way", choices=("compiled", "pytorch", "transformers"), default="compiled"
    )
    parser.add_argument("--family", default="layer-skip", help="whose rounds are measured")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exits", default=None, help="layers; a quarter and half of all")
    parser.add_argument("--widths", default="1,2,4,6,8")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = target_of(args)
    count = target.spec.num_layers
    exits = [count // 4, count // 2] if args.exits is None else map(int, args.exits.split(","))
    eager = patch.object(FastLlama, "_native", lambda self, ids: None)
    if args.way == "pytorch":
        eager.start()
    for exit_layer in exits:
        where = {"way": args.way, "exit": exit_layer, "layers": count}
        if args.part != "rounds":
            for width in map(int, args.widths.split(",")):
                found = forwards(target, width, exit_layer, args.repeats)
                show({**where, "tokens": width, **found}, args.json)
        if args.part != "forwards":
            show({**where, "rows": args.rows, **rounds(target, exit_layer, args)}, args.json)


def show(found: dict[str, Any], is_json: bool) -> None:
    if is_json:
        print(json.dumps(found), flush=True)
        return
    words = (
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
    )
    print("  ".join(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
