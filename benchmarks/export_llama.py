"""A gguf export in llama.cpp itself: the embedded target and a draft of it, with and without.

The target is written as GGUF with the exporter's own writer, the draft is exported, and llama.cpp's
server (built by llama_common.py) answers held-out prompts greedily without and
with the draft. Prompts are token ids. It fails (exit 1) unless
- both answers are the same tokens, and those of specctl without a draft (a difference counts as
  rounding only where the target's two best logits are within a few units in the last place);
- a share of the drafts is accepted that is within 0.05 of what specctl measures with the package,
  the drafting length being the same.

    python benchmarks/export_llama.py --draft runs/distill/package --llama-server PATH --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from llama_common import complete, serving

from specctl import Sampling, generate, load_drafter, load_target
from specctl.export.formats import export
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp.target import write_target
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.policies import make_policy
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

ULPS = 8.0
NEAR = 0.05


@dataclass
class Row:
    """One way to answer all prompts."""

    way: str
    answers: list[list[int]]
    drafted: int = 0
    accepted: int = 0
    tokens_per_second: float = 0.0

    @property
    def share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def llama(way: str, url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Row:
    row, seconds = Row(way, []), 0.0
    for prompt in prompts:
        answer = complete(url, prompt, tokens)
        row.answers.append(list(answer["tokens"]))
        timings = answer["timings"]
        row.drafted += timings.get("draft_n", 0)
        row.accepted += timings.get("draft_n_accepted", 0)
        seconds += timings["predicted_ms"] / 1e3
    row.tokens_per_second = sum(map(len, row.answers)) / seconds
    return row


def ours(
    way: str, target: Target, prompts: Sequence[Sequence[int]], tokens: int, **how: Any
) -> Row:
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    found = generate(target, prompts, sampling=sampling, **how)
    stats = found.stats
    return Row(
        way,
        [list(out.token_ids) for out in found.outputs],
        stats.drafted,
        stats.accepted,
        stats.tokens / stats.seconds,
    )


@torch.inference_mode()
def is_rounding(model: Any, prompt: Sequence[int], one: list[int], two: list[int]) -> bool:
    """Two answers part where the target's two best tokens are as good as equal."""
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    logits = model(torch.tensor([[*prompt, *one[:at]]])).logits[0, -1].float()
    best = logits.topk(2)
    ulp = torch.finfo(torch.float32).eps * best.values[0].abs().clamp(min=1.0)
    is_near = bool(best.values[0] - best.values[1] <= ULPS * ulp)
    return is_near and {one[at], two[at]} == set(best.indices.tolist())


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], int, list[str]]:
    target = load_target(args.target, dtype="float32")
    prompts = [prompt.ids for prompt in heldout_prompts(target, args.prompts)]
    context = max(map(len, prompts)) + args.tokens + 32
    export(args.draft, "gguf", folder / "draft", target)
    write_target(target, folder / "target.gguf")
    rows = [ours("specctl", target, prompts, args.tokens)]
    policy = make_policy({"policy": "chain", "length": args.length})
    drafter = load_drafter(args.draft, target)
    how = {"drafter": drafter, "policy": policy}
    rows.append(ours("specctl, draft", target, prompts, args.tokens, **how))
    draft = (str(folder / "draft" / FILE), str(args.length))
    for way, given in (("llama.cpp", ()), ("llama.cpp, draft", draft)):
        file = folder / "target.gguf"
        with serving(args.llama_server, file, 1, context, args.threads, given, "f32") as url:
            rows.append(llama(way, url, prompts, args.tokens))
    assert isinstance(target.lm, FastLlama)
    rounding, faults = compared(rows, prompts, as_transformers(target.lm))
    return rows, rounding, faults


def compared(
    rows: list[Row], prompts: Sequence[Sequence[int]], model: Any
) -> tuple[int, list[str]]:
    """How many answers part by rounding, and what is wrong."""
    rounding, faults = 0, []
    for row in rows[1:]:
        for i, (one, two) in enumerate(zip(rows[0].answers, row.answers, strict=True)):
            if one == two:
                continue
            if len(one) == len(two) and is_rounding(model, prompts[i], one, two):
                rounding += 1
            else:
                faults.append(f"{row.way}: prompt {i} is answered otherwise than by specctl")
    _, here, _, there = rows
    if not there.drafted or not there.accepted:
        faults.append("llama.cpp accepted no drafted token")
    elif abs(there.share - here.share) > NEAR:
        faults.append(f"accepted share {there.share:.3f} there, {here.share:.3f} here")
    return rounding, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", required=True, help="package of a small-lm draft")
    parser.add_argument("--llama-server", required=True, metavar="PATH", help="see llama_common.py")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=5, help="tokens drafted a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows, rounding, faults = measure(args, Path(folder))
    if args.json:
        shown = [{**asdict(row), "answers": len(row.answers), "share": row.share} for row in rows]
        print(json.dumps({"rows": shown, "rounding": rounding, "faults": faults}, indent=1))
    else:
        for row in rows:
            print(
                f"{row.way:18} drafted {row.drafted:6,}  accepted {row.accepted:6,} "
                f"({row.share:.3f})  {row.tokens_per_second:8.1f} tokens/s"
            )
        print(f"{rounding} answers part by rounding; {len(faults)} faults")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
