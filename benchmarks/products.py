"""Who multiplies float32 matrices faster on this CPU, MKL or oneDNN, and what a step gains by it.

The products of a layer, forward and for both gradients, and of an LM head's slice, by torch's
default and inside of `faster_products()`, in turn; then steps of recipes, every other one by the
default. Medians; the ratio of a step with the quartiles of its pairs.

    python benchmarks/products.py
    python benchmarks/products.py --recipes distill,eagle3,dflash --steps 40 --threads 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from specctl.api.train import train_and_package
from specctl.core.device.kept_memory import kept_memory
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train import loop
from specctl.train.step import products
from specctl.train.step.products import faster_products, is_onednn_faster, usual_products

SHAPES = ((1152, 256, 640), (1152, 640, 256), (1152, 256, 256), (170, 256, 6144), (256, 256, 256))


@contextmanager
def forced_products() -> Iterator[None]:
    """By oneDNN, whoever is faster."""
    with patch.object(products, "is_onednn_faster", return_value=True), faster_products():
        yield


def in_turn(work: Callable[[], Tensor], turns: int) -> tuple[float, float]:
    """Median seconds by the default and by oneDNN."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * (turns + 2)):
        own = bool(turn % 2)
        with forced_products() if own else usual_products():
            began = time.perf_counter()
            work()
            seconds[own].append(time.perf_counter() - began)
    return median(seconds[0][2:]), median(seconds[1][2:])


def show_products(turns: int) -> None:
    print("| product | forward | gradient of the left | gradient of the right |\n|---|---|---|---|")
    for rows, inner, columns in SHAPES:
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        outer, work = torch.randn(rows, columns), 2e-9 * rows * inner * columns
        pairs = ((x, weight.t()), (outer, weight), (outer.t(), x))
        found = [in_turn(partial(torch.mm, left, right), turns) for left, right in pairs]
        cells = [f"{work / default:.0f} -> {work / other:.0f}" for default, other in found]
        print(f"| [{rows}, {inner}] x [{inner}, {columns}] | {' | '.join(cells)} |", flush=True)


def steps(name: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of the recipe's steps, by the default and by oneDNN in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    take_step = loop.take_step

    def timed(*given: Any) -> None:
        own = sum(map(len, seconds)) % 2 == 1
        with forced_products() if own else usual_products():
            began = time.perf_counter()
            take_step(*given)
            seconds[own].append(time.perf_counter() - began)

    sets = ["target.dtype=float32", "data.prompts=64", f"train.steps={2 * count + 4}",
            f"train.tau_every={2 * count + 4}", "train.tau_prompts=1"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "take_step", timed):
        recipe = load_recipe(name, sets)
        train_and_package(SilentReporter(), recipe, Path(folder), command=("products.py",))
    return seconds[0][2:], seconds[1][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="distill,eagle3,dflash")
    parser.add_argument("--steps", type=int, default=20, help="by each way")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = "oneDNN" if is_onednn_faster(args.threads) else "the default"
    print(f"Chosen here: {chosen}. 10^9 operations a second, default -> oneDNN:\n")
    with kept_memory(torch.device("cpu")):  # as in training
        show_products(args.turns)
    print("\n| recipe | a step by the default | by oneDNN | ratio |\n|---|---|---|---|")
    for name in filter(None, args.recipes.split(",")):
        default, other = steps(name, args.steps)
        ratio = np.array(other) / np.array(default)
        low, high = np.quantile(ratio, [0.25, 0.75])
        print(f"| `{name}` | {median(default):.2f} s | {median(other):.2f} s | "
              f"{np.median(ratio):.2f} [{low:.2f}, {high:.2f}] |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
