"""What a round of several rows costs beside a round of one: processor time by width and dtype.

One thread, one row of T fed tokens behind --kept ones, as rounds call it; the least of many, all
widths in turn. Figures depend on the memory and the instructions of the CPU, which is named.

    python benchmarks/round_cost.py --target FOLDER     # of packed types random blocks
    python benchmarks/round_cost.py --target FOLDER --dtypes float32,int8 --widths 1,8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from specctl import load_target
from specctl.core.language_model import LanguageModel
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.library import LayerAddresses
from specctl.models.native.packed import TYPES, PackedMatrix, PackedWeights, from_gguf, row_bytes
from specctl.models.native.step import MATRICES

BITS = {"int8": 8, "int4": 4}


def model(target: str, dtype: str) -> LanguageModel:
    """Its matrices as the compiled step reads them; of a GGUF type all of them, with numbers of no
    meaning: an embedding that is the head as well stays in float32 beside it."""
    lm = load_target(target, dtype="bfloat16" if dtype == "bfloat16" else "float32").lm
    assert isinstance(lm, FastLlama)
    if dtype in BITS:
        return lm.in_bits(BITS[dtype])
    if dtype not in TYPES:
        return lm
    stack = lm.module.stack()
    assert stack is not None
    layers = [dict(zip(LayerAddresses.NAMES, layer, strict=True)) for layer in stack.weights()]
    own = tuple({name: packed(layer[name], dtype) for name in MATRICES} for layer in layers)
    assert lm.module.keep_packed(PackedWeights(own, packed(stack.head, dtype)))
    return lm.in_bits("packed")


def packed(weight: Tensor | None, name: str) -> PackedMatrix:
    """A matrix of that shape; its scales are small numbers of half precision."""
    assert weight is not None
    rows, columns = weight.shape
    blocks = torch.randint(0, 256, (rows, row_bytes(name, columns)), dtype=torch.uint8)
    each = blocks.view(rows, -1, TYPES[name].bytes)
    for at in (208,) if name == "Q6_K" else (0, 2) if TYPES[name].has_least else (0,):
        each[..., at : at + 2] = torch.tensor([1e-4]).half().view(torch.uint8)
    return from_gguf(blocks, name, rows, columns)


def costs(
    lm: LanguageModel, vocabulary: int, widths: list[int], repeats: int, kept: int
) -> list[float]:
    """Milliseconds of processor time of a forward of each width."""
    most, start, slot = max(widths), torch.tensor([kept]), torch.tensor([0])
    kv, ids = lm.new_kv(1, kept + most), torch.randint(0, vocabulary, (1, most))
    for store in (*kv.key_ZJLE, *kv.value_ZJLE):
        store.normal_()
    spent = [float("inf")] * len(widths)
    for _ in range(repeats):
        for at, width in enumerate(widths):
            position, span = start[:, None] + torch.arange(width), kept + width
            masks = lm.chain_masks(start, width, span)
            kv.begin((0,), slot, start, width, span, kept)
            began = time.process_time()
            lm.forward(ids[:, :width], position, masks, kv)
            spent[at] = min(spent[at], (time.process_time() - began) * 1e3)
    return spent


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8,int4,Q4_0,Q4_1,Q5_0,Q8_0")
    parser.add_argument("--widths", default="1,2,4,6,8,16,32")
    parser.add_argument("--kept", type=int, default=200, help="tokens that were read before")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    widths, found = [int(width) for width in args.widths.split(",")], {}
    for dtype in args.dtypes.split(","):
        vocabulary = load_target(args.target).spec.vocab_size
        found[dtype] = costs(model(args.target, dtype), vocabulary, widths, args.repeats, args.kept)
        first, *more = found[dtype]
        if not args.json:
            row = " ".join(f"{each / first:8.2f}x" for each in more)
            print(f"{dtype:9s} {first:7.2f} ms {row}", flush=True)
    if args.json:
        print(json.dumps({"processor": processor(), "widths": widths, "ms": found}))
    else:
        print(f"rows {widths}; {processor()}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
