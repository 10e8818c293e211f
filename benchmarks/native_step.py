"""The compiled step beside the same forward in PyTorch: CPU milliseconds a forward, by width.

One thread, one row of T fed tokens behind 200 kept ones, alternating; medians of processor time,
which a busy neighbour disturbs less than the clock on the wall.

    python benchmarks/native_step.py
    python benchmarks/native_step.py --inflate 300m --dtype bfloat16
    python benchmarks/native_step.py --int8     # beside itself with matrices of 8 bits
    python benchmarks/native_step.py --int4     # of 4 bits beside 8
    python benchmarks/native_step.py --avx2     # both as on a processor without AVX512
    python benchmarks/native_step.py --memory --inflate 300m --dtype int8   # of a loaded target
    python benchmarks/native_step.py --bandwidth --inflate 300m --threads 2  # beside a sum
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from specctl import generate, load_target
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native import library as built
from specctl.runtime.target.target import Target

KEPT = 200
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"


def milliseconds(
    target: Target, width: int, repeats: int, bits: int | None
) -> tuple[float, float, float]:
    """Of the step with so many bits, and of what stands beside it: PyTorch, stored weights or 8
    bits; and the largest difference of a logit."""
    lm = target.lm
    torch.manual_seed(width)
    ids, start = torch.randint(0, target.spec.vocab_size, (1, width)), torch.tensor([KEPT])
    kv, slot = lm.new_kv(1, KEPT + width), torch.tensor([0])
    for store in (*kv.key_ZJLE, *kv.value_ZJLE):
        store.normal_()
    position, span = start[:, None] + torch.arange(width), KEPT + width
    masks = lm.chain_masks(start, width, span)
    assert isinstance(lm, FastLlama)
    steps, beside = lm.module.native, {None: None, 8: None, 4: 8}
    both = steps(bits), None if bits is None else steps(beside[bits])
    spent, logits = ([], []), [torch.empty(0)] * 2
    for _ in range(repeats):
        for way, chosen in enumerate(both):
            with patch.object(FastLlama, "_native", lambda self, feed, chosen=chosen: chosen):
                kv.begin((0,), slot, start, width, span, KEPT)
                began = time.process_time()
                found = lm.forward(ids, position, masks, kv).logits_BTV
                spent[way].append((time.process_time() - began) * 1e3)
            assert found is not None
            logits[way] = found.float()
    return (*map(median, spent), float((logits[0] - logits[1]).abs().max()))  # type: ignore[return-value]


def memory(target: Target) -> dict[str, float]:
    """MiB that the process holds, once the target has read something, and has held at most."""
    generate(target, "def main(", max_new_tokens=4)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"held": pages * resource.getpagesize() / 2**20, "most": most / 2**10}


def bandwidth(target: Target, repeats: int) -> dict[str, float]:
    """Bytes of weights a second that one token's forward reads, and a sum over as many numbers, in
    turn, by the clock; GB/s, medians."""
    lm = target.lm
    assert isinstance(lm, FastLlama)
    weights = [w for layer in lm.module.model.layers for w in layer.parameters()]
    weights.append(lm.module.head_weight)
    size, ones = sum(w.nbytes for w in weights), torch.ones(sum(w.numel() for w in weights))
    ones = ones.to(lm.dtype)
    ids, start, slot = torch.tensor([[5]]), torch.tensor([KEPT]), torch.tensor([0])
    kv, masks = lm.new_kv(1, KEPT + 1), lm.chain_masks(start, 1, KEPT + 1)
    spent: dict[str, list[float]] = {"forward": [], "sum": []}
    for _ in range(repeats):
        kv.begin((0,), slot, start, 1, KEPT + 1, KEPT)
        began = time.perf_counter()
        lm.forward(ids, start[:, None], masks, kv)
        spent["forward"].append(time.perf_counter() - began)
        began = time.perf_counter()
        ones.view(torch.float32).sum()
        spent["sum"].append(time.perf_counter() - began)
    found = {name: size / median(seconds) / 1e9 for name, seconds in spent.items()}
    return {**found, "share": found["forward"] / found["sum"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--widths", default="1,2,4,6,8,16,24,32")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--int8", action="store_true", help="8 bits beside the weights as stored")
    parser.add_argument("--avx2", action="store_true", help="use no wider instructions")
    parser.add_argument("--memory", action="store_true", help="MiB of the process; nothing else")
    parser.add_argument("--int4", action="store_true", help="4 bits beside 8")
    parser.add_argument("--bandwidth", action="store_true", help="GB/s of one token; nothing else")
    parser.add_argument("--threads", type=int, default=1, help="of --bandwidth")
    args = parser.parse_args()
    if args.avx2:
        if any(os.environ.get(name) != value for name, value in AVX2.items()):
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2)
        built._tuned = lambda: ("-march=haswell",)
        built.FLAGS += ("-DAVX2",)  # another name in the cache
    assert built.library().functions is not None, built.library().missing
    torch.set_num_threads(1)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    if args.memory:
        print(json.dumps({**memory(target), "dtype": target.dtype_name}))
        return
    if args.bandwidth:
        torch.set_num_threads(args.threads)
        print(json.dumps({**bandwidth(target, args.repeats), "threads": args.threads}))
        return
    bits = 4 if args.int4 else 8 if args.int8 else None
    names = {4: ("int4", "int8"), 8: ("int8", "step"), None: ("step", "PyTorch")}[bits]
    rows = []
    for width in map(int, args.widths.split(",")):
        *spent, error = milliseconds(target, width, args.repeats, bits)
        of = {f"{name.lower()}_ms": each for name, each in zip(names, spent, strict=True)}
        rows.append({"width": width, **of, "error": error})
        if not args.json:
            first, second = (f"{n} {s:7.2f} ms" for n, s in zip(names, spent, strict=True))
            ratio = spent[1] / spent[0]
            print(f"{width:3d} rows  {first}  {second}  {ratio:4.2f}x  differs by {error:.0e}")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
