"""Reading prompts, ours beside llama.cpp's on the same GGUF file: tokens of the prompt a second.

Texts of so many tokens in turn, one token behind each; llama.cpp says itself how long its prompt
took. Medians.

    python benchmarks/prompt_speed.py --target MODEL.gguf --file specbench.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from llama_common import built_server, complete, serving

from specctl import Sampling, generate, load_target
from specctl.runtime.target.target import Target


def seconds(target: Target, ids: Sequence[int]) -> float:
    began = time.perf_counter()
    generate(target, [list(ids)], sampling=Sampling(max_new_tokens=1))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a GGUF file")
    parser.add_argument("--file", type=Path, required=True, help="of records with messages")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1500])
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", default=None, help="built before; see llama_common.py")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    ways = {dtype: load_target(args.target, dtype=dtype) for dtype in ("auto", "float32")}
    records = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]
    text = " ".join(record["messages"][0]["content"] for record in records)
    ids = ways["auto"].encode(text)[: max(args.lengths) * args.texts]
    server = args.llama_server or built_server(args.out)
    context = 2 * max(args.lengths)
    with serving(server, Path(args.target), 1, context, args.threads) as url:
        for length in args.lengths:
            rates: dict[str, list[float]] = {}
            for at in range(0, length * args.texts, length):
                part = ids[at : at + length]
                for name, target in ways.items():
                    rates.setdefault(name, []).append(length / seconds(target, part))
                took = complete(url, part, 1)["timings"]["prompt_ms"] / 1e3
                rates.setdefault("llama.cpp", []).append(length / took)
            print(length, {name: round(median(each)) for name, each in rates.items()}, flush=True)


if __name__ == "__main__":
    main()
