"""What drawing tokens takes on a CPU: the argmax of scores and Gumbel noise, summed and compiled;
and top-k, top-p and min-p, by sorting and compiled.

Summed: the noise of the whole vocabulary is computed and added. Compiled: only the noise of tokens
that can still win (`models/native/draw.h`). By sorting: torch and numpy sort the vocabulary.
Compiled: the lowest score that is kept is found without that (`models/native/cut.h`). Random
scores, rows of one round, both ways in turn at one thread; medians of microseconds for all rows.
Tokens, and what is kept, must be equal.

    python benchmarks/draw_cost.py
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from specctl.core.language_model import Truncation
from specctl.models.native.library import library
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.truncation import Truncations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    assert library().functions is not None, library().missing
    torch.set_num_threads(1)
    print("| vocabulary | rows | summed, us | compiled, us | |\n|---|---|---|---|---|")
    for vocab_size in (2048, 32_000, 128_256):
        for rows in (1, 5):
            print(row(vocab_size, rows, args.repeats), flush=True)
    print("\n| vocabulary | rows | kept | by sorting, us | compiled, us | |")
    print("|---|---|---|---|---|---|")
    for vocab_size in (2048, 32_000, 128_256):
        for words in ({"top_k": 20, "top_p": 0.95}, {"top_p": 0.95}, {"min_p": 0.05}):
            print(cut_row(vocab_size, Truncation(**words), words, args.repeats // 4), flush=True)


def row(vocab_size: int, rows: int, repeats: int) -> str:
    scores_1TV = 3.0 * torch.randn(1, rows, vocab_size)
    depth_1T = torch.arange(rows)[None]
    spent: dict[str, list[float]] = {"summed": [], "compiled": []}
    for again in range(repeats):
        noise = RoundNoise([1], [again], [again])
        began = time.perf_counter()
        summed_1T = best_token(scores_1TV + noise.target_BTV(depth_1T, vocab_size))
        between = time.perf_counter()
        compiled_1T = noise.target_draw_BT(scores_1TV, None)
        ended = time.perf_counter()
        assert torch.equal(summed_1T, compiled_1T)
        spent["summed"].append(between - began)
        spent["compiled"].append(ended - between)
    summed, compiled = (1e6 * median(seconds) for seconds in spent.values())
    ratio = summed / compiled
    return f"| {vocab_size:,} | {rows} | {summed:,.0f} | {compiled:,.0f} | {ratio:.1f}x |"


def cut_row(vocab_size: int, how: Truncation, words: dict[str, float], repeats: int) -> str:
    scores_1TV = 4.0 * torch.randn(1, 5, vocab_size)
    cuts = Truncations([how], torch.device("cpu"))
    spent: dict[str, list[float]] = {"sorted": [], "compiled": []}
    for _ in range(repeats):
        mine, other = scores_1TV.clone(), scores_1TV.clone()
        began = time.perf_counter()
        cuts._by_sorting(other)
        between = time.perf_counter()
        cuts.apply_(mine)
        ended = time.perf_counter()
        assert torch.equal(mine, other)
        spent["sorted"].append(between - began)
        spent["compiled"].append(ended - between)
    by_sorting, compiled = (1e6 * median(seconds) for seconds in spent.values())
    kept = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in words.items())
    ratio = by_sorting / compiled
    return f"| {vocab_size:,} | 5 | {kept} | {by_sorting:,.0f} | {compiled:,.0f} | {ratio:.1f}x |"


if __name__ == "__main__":
    main()
