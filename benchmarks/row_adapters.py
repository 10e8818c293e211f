"""Adapters that requests choose (`serve --set api.adapters`): tokens a second, and how many drafted
tokens are accepted, beside the target alone.

Random LoRA factors of a rank are added to all linear layers of so many adapters. Prompts of a file
(one JSON object with `prompt` or `messages` a line) are answered greedily: by the target as it is
loaded, with the compiled step where it has one; by the target without it; by one adapter; and by
all of them in turn, in batches of one and of --batch. Settings take turns, and the median over
--repeats is shown with the ratio to the first.

    python benchmarks/row_adapters.py --target smollm2-135m --prompts specbench.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from specctl import load_target
from specctl.core.forward.row_additions import ATTENTION, MLP
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS, plain_config
from specctl.runtime.target.variants.row_adapted import with_row_adapters


def write(target: Target, folder: Path, rank: int, seed: int) -> str:
    """A folder in peft's format."""
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(target.spec.num_layers):
        for name in ATTENTION + MLP:
            part = "self_attn" if name in ATTENTION else "mlp"
            shape = target.lm.linear_at(layer, name)
            assert shape is not None, f"layer {layer} has no {name}"
            key = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, shape[1]) / shape[1] ** 0.5
            tensors[f"{key}.lora_B.weight"] = 0.02 * torch.randn(shape[0], rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS)
    config = plain_config(rank, float(rank), None, [*ATTENTION, *MLP])
    (folder / CONFIG).write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    target = load_target(options.target, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"lora-{at}" for at in range(options.adapters)]
        folders = {n: write(target, Path(folder, n), options.rank, i) for i, n in enumerate(names)}
        adapted = with_row_adapters(target, folders)
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    step = max(1, len(rows) // options.limit)
    prompts = [_ids(target, row) for row in rows[::step][: options.limit]]
    ways = {
        "the target, as loaded": (target, [None]),
        "the target beside adapters": (adapted, [None]),
        "one adapter": (adapted, names[:1]),
        f"{len(names)} adapters in turn": (adapted, names),
        "adapters and the target in turn": (adapted, [None, *names]),
    }
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.repeats):
        for batch in (1, options.batch):
            for way, (model, chosen) in ways.items():
                speed = run(model, prompts, chosen, batch, options.tokens)
                speeds.setdefault((way, batch), []).append(speed)
                print(f"{way}, batch {batch}: {speed:.1f} tokens/s", flush=True)
    print()
    for batch in (1, options.batch):
        first = statistics.median(speeds["the target, as loaded", batch])
        for way in ways:
            speed = statistics.median(speeds[way, batch])
            print(f"batch {batch}, {way}: {speed:.1f} tokens/s, {speed / first:.2f}")


def _ids(target: Target, row: dict) -> tuple[int, ...]:
    if "messages" in row:
        return tuple(target.encode_chat(row["messages"][:1]))
    return tuple(target.encode(row["prompt"]))


def run(
    target: Target, prompts: list[tuple[int, ...]], names: list[str | None], batch: int, count: int
) -> float:
    """Tokens a second, prompts included."""
    sampling = Sampling(max_new_tokens=count, ignore_eos=True)
    engine = Engine(target, None, None, num_slots=batch)
    requests = [
        Request(ids, sampling, adapter=names[at % len(names)]) for at, ids in enumerate(prompts)
    ]
    begun = time.perf_counter()
    done = engine.run(requests)
    return sum(len(one.tokens) for one in done) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
