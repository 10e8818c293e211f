"""A cheap LM head against the whole one and against draft vocabularies: what it finds and costs.

Of states in front of the LM head (the target's own, and with `--draft` those of a block drafter
that borrows it) the first table has, by rank, candidates and `head_smoothing` (each of SMOOTHINGS;
at first all rows weigh alike): how often the likeliest token is a candidate, and the total
variation between the softmax over all rows and the one over the candidates (what is outside them).
Draft vocabularies of the most frequent tokens stand beside them. The second has microseconds of one
call in CPU time of its thread, for one state and for several at once.
`--written-by`: the model whose ids the documents hold, where another one reads them.

    python benchmarks/cheap_head.py --target SmolLM2-135M-Instruct.Q4_1.gguf --data answers.jsonl
    python benchmarks/cheap_head.py --shape 152064x1536
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specctl import load_drafter, load_target
from specctl.core.batch import TrainBatch
from specctl.drafters.nets.shortlist import SMOOTHING, Shortlist, ShortlistHead, rough_head
from specctl.models.kernels import Weight, linear, prepared
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture, training_needs

RANKS, CANDIDATES, KEPT = (32, 64, 128, 256), (64, 256, 1024), (8192, 16384)
SMOOTHINGS = (1e9, 10_000.0, 1_000.0, 100.0)  # of the weights of rows
FIRST = 32  # position from which states count
LONGEST = 256


def documents(path: Path, target: Target, writer: Any) -> list[list[int]]:
    """The documents of a JSONL file of `input_ids`, as this target reads them."""
    lines = [json.loads(line)["input_ids"] for line in path.read_text().split("\n") if line]
    if writer is None:
        return lines
    return [target.encode(writer.decode(ids, skip_special_tokens=True)) for ids in lines]


def batches(texts: Sequence[Sequence[int]]) -> Iterator[TrainBatch]:
    """Each text by itself, all its tokens to be predicted."""
    for text in texts:
        ids_1S = torch.tensor([text[:LONGEST]])
        mask_1S = torch.ones_like(ids_1S, dtype=torch.bool)
        at_1S = torch.arange(ids_1S.shape[1])[None]
        yield TrainBatch(ids_1S, mask_1S, torch.zeros_like(ids_1S), at_1S)


@torch.no_grad()
def target_states(target: Target, texts: Sequence[Sequence[int]]) -> Tensor:
    """[R, D]: what the target's LM head reads."""
    last, found = target.spec.num_layers, []
    for batch in batches(texts):
        masks = target.lm.document_masks(batch.document_BS)
        given = batch.ids_BS, batch.position_BS, masks, (last,)
        found.append(target.lm.dense(*given, logits=False).taps[last][0, FIRST:])
    return torch.cat(found)


@torch.no_grad()
def drafter_states(target: Target, name: str, texts: Sequence[Sequence[int]]) -> Tensor:
    """[R, D]: what a block drafter has the target's LM head read behind its anchors, over all the
    target's ids."""
    trimmed: Any = load_drafter(name, target)
    drafter = type(trimmed)(trimmed.options, target.spec, None)
    drafter.load_tensors(trimmed.tensors())
    drafter.bind(target.borrowed())
    torch.manual_seed(0)
    found = []
    for batch in batches(texts):
        read = capture(target, batch, training_needs(drafter))
        for ready_BSD in drafter.unroll(read):
            state_SD = ready_BSD[0, FIRST:]
            found.append(state_SD[state_SD.abs().sum(-1) > 0])
    return torch.cat(found)


def inside(logits_RK: Tensor, row_RC: Tensor) -> tuple[float, float]:
    """How often the likeliest row is among these, and the mass outside them."""
    best_R1 = logits_RK.argmax(-1, keepdim=True)
    mass_R = logits_RK.float().softmax(-1).gather(1, row_RC).sum(-1)
    recall = (row_RC == best_R1).any(-1).float().mean()
    return float(recall), float(1.0 - mass_R.mean())


@torch.no_grad()
def quality(weight_KD: Tensor, state_RD: Tensor, order: Tensor) -> None:
    logits_RK = state_RD @ weight_KD.T
    for rank in RANKS:
        found = []
        for smoothing in SMOOTHINGS:
            rough = rough_head(weight_KD, rank, smoothing)
            rough_RK = state_RD @ rough.down_OD.T @ rough.up_KO.T
            every = rough_RK.topk(max(CANDIDATES), dim=-1).indices
            found.append([inside(logits_RK, every[:, :count]) for count in CANDIDATES])
        for count, pairs in zip(CANDIDATES, zip(*found, strict=True), strict=True):
            shown = " | ".join(f"{recall:.3f} / {outside:.3f}" for recall, outside in pairs)
            print(f"| rank {rank}, {count} candidates | {shown} |", flush=True)
    for size in KEPT:
        row_RC = order[:size].expand(len(state_RD), -1)
        recall, outside = inside(logits_RK, row_RC)
        print(f"| draft vocabulary of {size:,} | {recall:.3f} / {outside:.3f} |", flush=True)


def timed(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call; rounds are interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.thread_time()
            call()
            taken[name].append(time.thread_time() - started)
    return {name: 1e6 * median(each) for name, each in taken.items()}


@torch.no_grad()
def speed(weight_KD: Tensor, rows: int, rounds: int) -> None:
    state_QD = torch.randn(rows, weight_KD.shape[1])

    def whole(weight: Weight) -> Callable[[], Tensor]:
        return lambda: linear(state_QD, weight)

    def short(head: ShortlistHead) -> Callable[[], Tensor]:
        return lambda: head(state_QD)

    calls = {"whole head": whole(prepared(weight_KD))}
    for size in KEPT:
        calls[f"draft vocabulary of {size:,}"] = whole(prepared(weight_KD[:size].clone()))
    for rank in RANKS:
        for count in CANDIDATES:
            head = ShortlistHead.of(weight_KD, Shortlist(rank, count))
            calls[f"rank {rank}, {count} candidates"] = short(head)
    found = timed(calls, rounds)
    for name, micros in found.items():
        share = found["whole head"] / micros
        print(f"| {rows} states | {name} | {micros:,.0f} | {share:.1f}x |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--written-by")
    parser.add_argument("--draft", help="a package of a block drafter")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--states", type=int, default=800, help="of them, evenly spaced")
    parser.add_argument("--shape", help="rows x width of a random head, for times alone")
    parser.add_argument("--rounds", type=int, default=15, help="of times; 0: none are taken")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.shape:
        rows, width = map(int, given.shape.split("x"))
        weight_KD = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    else:
        target = load_target(given.target, dtype="float32")
        weight_KD = target.borrowed().head_VD.float()
        writer = load_target(given.written_by).tokenizer if given.written_by else None
        texts = documents(given.data, target, writer)
        texts = [text for text in texts if len(text) > 2 * FIRST]
        shown, counted = texts[: given.texts], texts[given.texts :]
        ids = torch.cat([torch.tensor(text) for text in counted])
        order = torch.bincount(ids, minlength=len(weight_KD)).argsort(descending=True, stable=True)
        states = {"target": target_states(target, shown)}
        if given.draft:
            states["drafter"] = drafter_states(target, given.draft, shown)
        for name, state_RD in states.items():
            print(
                f"\n{name}: {given.states} of {len(state_RD):,} states, {tuple(weight_KD.shape)}\n"
            )
            every = state_RD[torch.linspace(0, len(state_RD) - 1, given.states).long()]
            quality(weight_KD, every.float(), order)
    started = time.thread_time()
    rough_head(weight_KD, RANKS[1], SMOOTHING)
    print(f"\nfactors of rank {RANKS[1]}: {time.thread_time() - started:.2f} s of CPU time\n")
    for count in (1, 5) if given.rounds else ():
        speed(weight_KD, count, given.rounds)


if __name__ == "__main__":
    main()
