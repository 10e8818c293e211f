"""What it costs to keep the features of served answers: tokens a second with and without.

One engine that keeps the states which its drafter learns from and one that keeps none decode the
same requests in turns; a recorder of each writes texts, and the features, while its rows go on and
until all is on the disk. The drafter has fresh weights: what is kept of a round depends on how many
tokens it emits alone. Ratios are paired by turn: mean and standard error.

    python benchmarks/features_cost.py --target tiny --rows 4 --turns 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from specctl.core.storage.traffic_files import Writer
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.engine.row_features import layers_kept
from specctl.runtime.generate import default_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import load_target
from specctl.server.feature_keeper import FeatureKeeper
from specctl.train.data.prompts.heldout import embedded_prompts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--family", default="eagle3")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = load_target(given.target)
    found = family(given.family)
    drafter = found.build(found.options(), target.spec, None).to(target.device, target.dtype)
    lines = embedded_prompts().read_text(encoding="utf-8").splitlines()[: given.rows]
    sampling = Sampling(0.0, max_new_tokens=given.new_tokens, ignore_eos=True)
    texts = [json.loads(line)["text"] for line in lines]
    requests = [Request(tuple(target.encode(t)), sampling, keeps_features=True) for t in texts]
    engines = [
        Engine(target, drafter, default_policy(drafter), num_slots=given.rows, features=layers)
        for layers in ((), layers_kept(drafter))
    ]
    rates: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.turns + 1):
            for at in (0, 1) if turn % 2 else (1, 0):
                keeper = FeatureKeeper(Path(folder) / str(at), 1 << 30)
                keeper.begin(Writer(target.name, target.fingerprint))
                rows: list[Row] = []
                began = time.perf_counter()
                engines[at].run(requests, lambda row, new, rows=rows: rows.append(row))
                for row in {row.index: row for row in rows}.values():
                    keeper.put({"text": target.decode(row.tokens)}, row.features)
                keeper.close()
                tokens = given.rows * given.new_tokens
                if turn:  # the first is for what is made once
                    rates[at].append(tokens / (time.perf_counter() - began))
        kept = sum(path.stat().st_size for path in (Path(folder) / "1").iterdir())
    ratios = [b / a for a, b in zip(*rates, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    means = [f"{statistics.fmean(each):.1f}" for each in rates]
    print(f"| {given.target} {given.family} | {means[0]} | {means[1]} | ", end="")
    print(f"{statistics.fmean(ratios):.3f} +- {error:.3f} | {kept / 1e6:.1f} MB |")


if __name__ == "__main__":
    main()
