"""Latency of one decode forward, ours against transformers', by number of fed tokens.

    python benchmarks/forward.py [--target tiny] [--inflate 100m 300m] [--dtype float32] [--context 512]

Prints milliseconds (minimum of repeats) with a cache of `--context` positions, for the embedded
target and its inflations. Without `--target` files a random model of the same shape serves: the
time does not depend on the weights.
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
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specctl.drafters.parts.hf_lm import HfLM
from specctl.drafters.parts.lean import lean_from_hf
from specctl.drafters.parts.lm import LanguageModel, Masks
from specctl.drafters.parts.masks import chain_mask

WIDTHS = (1, 2, 4, 8, 16, 32)
SHAPES: dict[str, dict[str, Any]] = {
    "8m": {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 640},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2304},
    "300m": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816},
}


def random_llama(size: str, dtype: torch.dtype) -> Any:
    """A random Llama of about that many parameters, heads of width 64 in groups of two."""
    shape = SHAPES[size]
    heads = shape["hidden_size"] // 64
    config = LlamaConfig(
        vocab_size=6144,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        **shape,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def milliseconds(step: Callable[[], object], seconds: float) -> float:
    """Minimum over as many calls as fit in `seconds` (at least five)."""
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best * 1e3


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["8m"], choices=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"context {options.context}, {options.threads} threads, torch {torch.__version__}, ms")
    print(f"{'model':>6} {'dtype':>9} {'path':>24} " + " ".join(f"T={w:<6}" for w in WIDTHS))
    for size in options.sizes:
        for dtype in options.dtype:
            model = random_llama(size, getattr(torch, dtype))
            lean = lean_from_hf(model)
            assert lean is not None
            paths: dict[str, Callable[[int], Callable[[], object]]] = {
                "transformers": lambda w, m=model: hf_step(m, options.context, w),
                "transformers + SlotKV": lambda w, m=model: lm_step(HfLM(m), options.context, w),
                "lean": lambda w, m=lean: lm_step(m, options.context, w),
            }
            for name, make in paths.items():
                with torch.no_grad():
                    cells = [milliseconds(make(w), options.seconds) for w in WIDTHS]
                row = " ".join(f"{c:<8.2f}" for c in cells)
                print(f"{size:>6} {dtype:>9} {name:>24} {row}", flush=True)


if __name__ == "__main__":
    main()
