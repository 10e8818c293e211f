"""Latency of one decode forward, ours against transformers', by number of fed tokens.

    python benchmarks/forward.py [--sizes tiny 100m 300m] [--dtype float32 bfloat16] [--context 512]

Prints milliseconds (minimum of repeats) with a cache of `--context` positions, for the embedded
target and its inflations. The paths of one row of the table are called in turn, so that other load
on the machine meets all of them. "SlotKV" is transformers' module on our cache, masks and kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from transformers import DynamicCache

from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import LanguageModel, Masks
from specctl.models.hf.hf_lm import HfLM
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.variants.inflate import SIZES

WIDTHS = (1, 2, 4, 8, 16, 32)


def milliseconds(steps: list[Callable[[], object]], seconds: float) -> list[float]:
    """Minimum of each step over as many turns as fit in `seconds` (at least five)."""
    best, turns, end = [float("inf")] * len(steps), 0, time.perf_counter() + seconds
    while turns < 5 or time.perf_counter() < end:
        for index, step in enumerate(steps):
            start = time.perf_counter()
            step()
            best[index] = min(best[index], time.perf_counter() - start)
        turns += 1
    return [1e3 * value for value in best]


def lm_step(lm: LanguageModel, context: int, width: int) -> Callable[[], object]:
    """One forward of `width` tokens on top of `context` through our interface."""
    kv = lm.new_kv(1, context + width)
    ids_BT = torch.randint(0, lm.spec.vocab_size, (1, width))
    kept_B, slot_B = torch.tensor([context]), torch.tensor([0])
    position_BT = kept_B[:, None] + torch.arange(width)

    def step() -> object:
        mask = chain_mask(kept_B, width, context + width)
        kv.begin((0,), slot_B, kept_B, width, context + width, context)
        return lm.forward(ids_BT, position_BT, Masks(mask), kv)

    return step


def hf_step(model: Any, context: int, width: int) -> Callable[[], object]:
    """One forward of transformers' model with its DynamicCache, cropped back after each call."""
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.randint(0, 64, (1, context)), past_key_values=cache)
    ids_BT = torch.randint(0, 64, (1, width))

    def step() -> object:
        out = model(input_ids=ids_BT, past_key_values=cache)
        cache.crop(-width)
        return out

    return step


def measure(target: Target, context: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per path and width."""
    plain, ours = (as_transformers(target.lm) for _ in range(2))
    slot = HfLM(ours)
    table: dict[str, list[float]] = {"transformers": [], "transformers + SlotKV": [], "lean": []}
    for width in WIDTHS:
        steps = [
            hf_step(plain, context, width),
            lm_step(slot, context, width),
            lm_step(target.lm, context, width),
        ]
        for row, value in zip(table.values(), milliseconds(steps, seconds), strict=True):
            row.append(value)
    return table


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["tiny"], choices=["tiny", *SIZES])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row and width")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"context {options.context}, {options.threads} threads, torch {torch.__version__}, ms")
    print(f"{'model':>6} {'dtype':>9} {'path':>22} " + " ".join(f"T={w:<6}" for w in WIDTHS))
    for size in options.sizes:
        for dtype in options.dtype:
            inflate = None if size == "tiny" else size
            target = load_target("tiny", dtype=dtype, device="cpu", inflate=inflate)
            for name, row in measure(target, options.context, options.seconds).items():
                cells = " ".join(f"{value:<8.2f}" for value in row)
                print(f"{size:>6} {dtype:>9} {name:>22} {cells}", flush=True)


if __name__ == "__main__":
    main()
