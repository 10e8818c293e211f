"""What weights of 8 and 4 bits change: KL a token, the same most probable token, perplexity.

    python benchmarks/few_bits.py                    # the embedded target, int8 and int4
    python benchmarks/few_bits.py --ways             # other ways of 4 bits, too
    python benchmarks/few_bits.py --target FOLDER --texts 16
    python benchmarks/few_bits.py --target MODEL.gguf --file specbench.jsonl    # as it is packed

Held-out prompts are read whole by the target as it is stored and by the one in few bits, as
`--dtype` loads it. KL is of the published distribution to the changed one; standard errors are over
texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specctl import load_target
from specctl.models.native import bits, step
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

MOST = 512  # tokens of a text


def log_probs(target: Target, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each text [T, V]."""
    found, start = [], torch.tensor([0])
    for ids in texts:
        masks = target.lm.chain_masks(start, len(ids), len(ids))
        out = target.lm.dense(torch.tensor([list(ids)]), torch.arange(len(ids))[None], masks)
        assert out.logits_BTV is not None
        found.append(out.logits_BTV[0].float().log_softmax(-1))
    return found


def perplexity(found: list[Tensor], texts: Sequence[Sequence[int]]) -> float:
    """Of all tokens but the first of each text."""
    pairs = zip(found, texts, strict=True)
    each = [own[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for own, ids in pairs]
    return float(torch.cat(each).mean().neg().exp())


def line(before: list[Tensor], after: list[Tensor], texts: Sequence[Sequence[int]]) -> str:
    pairs = list(zip(before, after, strict=True))
    apart = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs]
    same = [float((p.argmax(-1) == q.argmax(-1)).float().mean()) for p, q in pairs]

    def shown(x: list[float], places: int) -> str:
        return f"{mean(x):.{places}f} ± {stdev(x) / len(x) ** 0.5:.{places}f}"

    return f"{shown(apart, 5)} | {shown(same, 4)} | {perplexity(after, texts):.3f}"


@contextmanager
def head_in_4_bits() -> Iterator[None]:
    """As if the LM head were a matrix like the others: rounded to 4 bits, then read in 8."""
    packed = step.packed

    def twice(weight_OI: Tensor, wanted: int) -> Tensor:
        return packed(bits.rounded(weight_OI, 4) if wanted == 8 else weight_OI, wanted)

    with patch.object(step, "packed", twice):
        yield


def without_search() -> AbstractContextManager[Any]:
    return patch.object(bits, "SPANS", (1.0,))


WAYS = {"whole spans": without_search, "head in 4 bits": head_in_4_bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--file", default=None, help="of prompts; otherwise the embedded ones")
    parser.add_argument("--ways", action="store_true")
    args = parser.parse_args()
    file = resolve(args.target).file
    stored = load_target(args.target, device="cpu", dtype="auto" if file is None else "float32")
    prompts = heldout_prompts(stored, args.texts, path=args.file)
    texts = [prompt.ids[:MOST] for prompt in prompts]
    before = log_probs(stored, texts)
    print(f"{sum(map(len, texts))} tokens of {len(texts)} texts")
    print("| | KL | same token | perplexity |\n|---|---|---|---|")
    print(f"| {stored.dtype_name} | 0 | 1 | {perplexity(before, texts):.3f} |")
    for name in ("int8", "int4") if file is None else ("gguf", "bfloat16", "int8", "int4"):
        few = load_target(args.target, dtype=name, device="cpu")
        print(f"| {name} | {line(before, log_probs(few, texts), texts)} |", flush=True)
    for name, chosen in WAYS.items() if args.ways else ():
        with chosen():
            few = load_target(args.target, dtype="int4", device="cpu")
            print(f"| int4, {name} | {line(before, log_probs(few, texts), texts)} |", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
