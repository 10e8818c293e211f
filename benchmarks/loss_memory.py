"""Peak memory of a distillation loss over a large vocabulary, forward and backward, by process.

naive              all logits of draft and target at once, float32 distributions over all rows
recomputed         slices of rows, each slice's logits computed again in the backward pass
sliced             slices of rows, differentiated while their logits are alive
sliced, by rows    the same, and target logits computed from its last states slice by slice
torch              torch's linear_cross_entropy in chunks, given the target's distributions
labels             sliced, against labels instead of a target (with `--loss ce`)
labels, torch      the same by torch's linear_cross_entropy in chunks

What is counted: the highest resident memory of a fresh process while it computes loss and
gradients, minus what it held before (states and both heads). So the target's logits in bfloat16
count, which the last way never holds. Gradients must agree with the naive ones.

    python benchmarks/loss_memory.py --vocab 128256 --tokens 4096
    python benchmarks/loss_memory.py --vocab 32000 --ways "sliced, by rows; torch"
    python benchmarks/loss_memory.py --vocab 32000 --loss ce --ways "labels; labels, torch"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import HeadRows
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import KINDS, LinearHead, LossOptions, head_loss

WAYS = ("naive", "recomputed", "sliced", "sliced, by rows")
NAIVE_COPIES = 6  # float32 logits alive at once, draft and target together; for the room check
MIB = 2**20


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))


def naive_kl(state_ND: Tensor, weight_VD: Tensor, teacher_NV: Tensor) -> Tensor:
    """KL(p || q) as one would write it down."""
    log_q_NV = F.log_softmax(F.linear(state_ND, weight_VD), dim=-1)
    log_p_NV = F.log_softmax(teacher_NV.float(), dim=-1)
    return F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True)


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One loss and its gradients in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    state_ND = torch.randn(args.tokens, args.width, requires_grad=True)
    weight_VD = (torch.randn(args.vocab, args.width) * args.width**-0.5).requires_grad_()
    source = HeadRows(
        torch.randn(args.tokens, args.target_width, dtype=torch.bfloat16),
        torch.randn(args.vocab, args.target_width, dtype=torch.bfloat16) * args.target_width**-0.5,
    )
    row_Q = torch.arange(args.tokens)
    held = memory("VmRSS")
    teacher = source if way == "sliced, by rows" else None
    if "labels" not in way and teacher is None:
        teacher = source[row_Q]
    began = time.thread_time()
    if way == "naive":
        loss = naive_kl(state_ND, weight_VD, teacher)
    elif way.endswith("torch"):
        wanted = row_Q % args.vocab if teacher is None else teacher.float().softmax(-1)
        how: Any = {"reduction": "sum", "options": torch.nn.LinearCrossEntropyOptions()}
        loss = F.linear_cross_entropy(state_ND, weight_VD, wanted, **how)  # since torch 2.13
    else:
        linear = LinearHead(weight_VD)
        head = (lambda x: linear(x)) if way == "recomputed" else linear
        aim = AlignedRows(row_Q, row_Q % args.vocab, row_Q, teacher)
        loss = head_loss(state_ND, head, aim, None, LossOptions(args.loss)).sum
    (loss / args.tokens).backward()
    seconds = time.thread_time() - began
    assert state_ND.grad is not None
    assert weight_VD.grad is not None
    return {
        "way": way,
        "bytes": memory("VmHWM") - held,
        "gradient_bytes": 4 * (weight_VD.numel() + state_ND.numel()),
        "seconds": seconds,
        "loss": loss.item() / args.tokens,
        "checks": [float(g.double().pow(2).sum().sqrt()) for g in (state_ND.grad, weight_VD.grad)],
    }


def child(way: str) -> dict[str, Any] | None:
    """The way measured by a process of its own; None if it ended without an answer."""
    words = [sys.executable, __file__, *sys.argv[1:], "--child", way]
    ran = subprocess.run(words, capture_output=True, text=True)
    if ran.returncode:
        sys.stderr.write(ran.stderr)
        return None
    return dict(json.loads(ran.stdout))


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    lines = [
        f"Loss {args.loss}, V = {args.vocab:,}, {args.tokens:,} tokens, draft width {args.width}, "
        f"target width {args.target_width}, float32 draft, bfloat16 target; the head's gradient "
        f"alone is {rows[0]['gradient_bytes'] / MIB:,.0f} MiB.",
        "",
        "| way | peak MiB | of naive | CPU-s of one thread |",
        "|---|---|---|---|",
    ]
    first = next((row["bytes"] for row in rows if row["way"] == "naive"), None)
    for row in rows:
        share = "-" if first is None else f"1/{first / row['bytes']:.1f}"
        lines.append(
            f"| {row['way']} | {row['bytes'] / MIB:,.0f} | {share} | {row['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--target-width", type=int, default=512)
    parser.add_argument("--loss", choices=KINDS, default="kl", help="of the sliced ways")
    parser.add_argument("--ways", default="; ".join(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args)))
        return
    rows = []
    for way in [way.strip() for way in args.ways.split(";")]:
        need = NAIVE_COPIES * 4 * args.vocab * args.tokens
        if way == "naive" and need > 0.8 * available():
            print(
                f"naive left out: about {need / MIB:,.0f} MiB, {available() / MIB:,.0f} free; "
                f"--tokens {args.tokens // 2} would need half",
                file=sys.stderr,
            )
            continue
        found = child(way)
        if found is not None:
            rows.append(found)
    for row in rows[1:]:
        for one, other in zip(rows[0]["checks"], row["checks"], strict=True):
            same = args.loss == "kl" or row["way"] != "naive"
            assert not same or abs(one - other) <= 1e-3 * abs(one), (rows[0], row)
    print(json.dumps(rows) if args.json else markdown(rows, args))


if __name__ == "__main__":
    main()
