"""Batch policies beside each other, on the embedded target and on a device whose costs are given.

Several users are asked at once and always, for ROUNDS rounds: nobody leaves, so that the load stays
as it is. A round takes as long as the device says, so that nothing is timed: one unit for a forward
pass of up to `fills` tokens (None: of any number), in proportion beyond, and `price` for each level
that is drafted for all rows together. The policy is told these costs, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ablation_lines import LONGEST, Batched
from quality import write

from specctl import load_drafter, load_target
from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.tree import DraftTree
from specctl.runtime.batching import Batching, RowView, make_batching
from specctl.runtime.batching.base import Choosing
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.cost_table import BatchCosts, CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.train.data.prompts.heldout import heldout_prompts

ROUNDS, GROUPS = 64, 8
SIZES, LENGTHS = (1, 2, 4, 8, 16, 32), range(LONGEST + 1)


@dataclass(frozen=True, slots=True)
class BatchArm:
    """A batch policy with its setting (length of fixed, capacity of tetris), at a load."""

    batching: str
    setting: int | None
    users: int
    fills: int | None
    price: float
    seed: int
    trained: str = "small-lm"

    @property
    def name(self) -> str:
        setting = "" if self.setting is None else f"-{self.setting}"
        device = f"-price{self.price:g}" + ("" if self.fills is None else f"-fills{self.fills}")
        return f"{self.batching}{setting}-users{self.users}{device}-{self.trained}-{self.seed}"

    def file(self, out: Path) -> Path:
        return out / "batched" / f"{self.name}.json"

    def seconds(self, rows: int, length: int) -> float:
        """Of a round of so many rows, the deepest of which drafts `length` tokens."""
        tokens = rows * (length + 1)
        verify = 1.0 if self.fills is None else max(1.0, tokens / self.fills)
        return verify + self.price * length

    def made(self) -> Batching:
        tables = {
            rows: CostTable(
                {k: self.price * k for k in LENGTHS},
                {k: self.seconds(rows, k) - self.price * k for k in LENGTHS},
                "given", "float32", rows,
            )
            for rows in SIZES
        }  # fmt: skip
        keys = {"fixed": "length", "tetris": "capacity"}
        given = {keys[self.batching]: self.setting} if self.batching in keys else {}
        return make_batching(self.batching, LONGEST, BatchCosts(tables), **given)


@dataclass(slots=True)
class OnDevice:
    """A batch policy whose rounds take what the arm says. One writer: the engine."""

    arm: BatchArm
    inner: Batching
    rounds: int = 0
    clock: float = 0.0
    spent: list[float] = field(default_factory=list)

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        found = self.inner.lengths(rows)
        self.rounds += 1
        self.spent.append(self.arm.seconds(len(rows), max(found, default=0)))
        self.clock += self.spent[-1]
        return found

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return self.inner.would_draft(rows)

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.inner.observe(outcome, RoundSeconds(0.0, self.spent[-1], 0.0))

    def to_json(self) -> Mapping[str, Any]:
        return self.inner.to_json()


@dataclass(slots=True)
class ChoosingOnDevice(OnDevice):
    """The same of one that chooses among what was drafted."""

    def chosen(self, tree: DraftTree) -> DraftTree:
        assert isinstance(self.inner, Choosing)
        return self.inner.chosen(tree)


def batch_arms(line: Batched, seed: int) -> tuple[list[BatchArm], list[BatchArm]]:
    """The policy, and what it is compared with: the best of these."""
    load = (line.users, line.fills, line.price, seed)
    return (
        [BatchArm(line.batching, line.setting, *load)],
        [BatchArm("fixed", length, *load) for length in line.fixed],
    )


def serve_batches(arm: BatchArm, out: Path) -> None:
    """Tokens of a row per unit of cost, of every group of users, into the arm's file."""
    torch.set_num_threads(1)
    torch.manual_seed(arm.seed)
    if arm.file(out).exists():
        return
    target = load_target("tiny", dtype="float32")
    drafter = load_drafter(str(out / "runs" / f"{arm.trained}-tokens-{arm.seed}/package"), target)
    prompts = heldout_prompts(target, arm.users * GROUPS)
    sampling = Sampling(max_new_tokens=ROUNDS * (LONGEST + 1), ignore_eos=True)
    found = []
    for first in range(0, len(prompts), arm.users):
        asked = prompts[first : first + arm.users]
        policy, inner = make_policy({"policy": "chain", "length": LONGEST}), arm.made()
        kind = ChoosingOnDevice if isinstance(inner, Choosing) else OnDevice
        device = kind(arm, inner)
        engine = Engine(target, drafter, policy, num_slots=arm.users, batching=device)
        engine.open(max(len(p.ids) for p in asked) + sampling.max_new_tokens)
        for index, prompt in enumerate(asked):
            engine.submit(index, Request(tuple(prompt.ids), sampling))
        tokens = 0
        while device.rounds < ROUNDS:
            tokens += sum(len(emission.tokens) for emission in engine.step())
        found.append(tokens / arm.users / device.clock)
    write(arm.file(out), found)
