"""Proof T4: over a run, however divided, stopped and continued, every row is read exactly once an
epoch: none repeated, none missed.

    PYTHONPATH=src python benchmarks/proof_order.py

Runs of one process, of two, and of a number that changes between the parts (as after --allow
world-size) are stopped at random steps and resumed. Each process notes every row it reads; nothing
else is believed. There are no loader workers and no streaming sets here: a position is all there
is.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from proof_common import Check, checked, load_toy, parser, report, run_ranks

from specctl.core.errors import Exit
from specctl.train.data.rows.supply import Order, share
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, restore, train
from specctl.train.stop import Interrupted, Stop

toy = load_toy()


def part(ranks: Ranks, out: Path, at: int, settings: dict[str, Any]) -> None:
    """Go on with the run until `at` batches were read here; every row read is noted."""
    notes = out.with_suffix(f".rows{ranks.rank}").open("a")
    stop = Stop("again")
    count = [0]

    def batch(rows: list[int]) -> Any:
        count[0] += 1
        stop.is_requested |= count[0] == at and ranks.rank == ranks.size - 1
        notes.write(json.dumps(rows) + "\n")
        return toy.rows(rows)

    job = toy.make_job(out, ranks=ranks, batch=batch, stop=stop, **settings)
    saved = job.checkpoints.newest()
    try:
        train(job, restore(job, saved) if saved else TrainProgress())
    except Interrupted:
        notes.close()
        raise
    notes.close()


def read_rows(out: Path) -> Counter[int]:
    """Row -> how often it was read, by all processes together."""
    counts: Counter[int] = Counter()
    for path in out.parent.glob(f"{out.name}.rows*"):
        for line in path.read_text().splitlines():
            counts.update(json.loads(line))
    return counts


def judge(out: Path, settings: dict[str, Any]) -> str | None:
    """Every row as often as whole epochs passed, and once more at most for the last, open one."""
    num_read = settings["steps"] * settings["rows"] * settings["accumulate"]
    epochs, rest = divmod(num_read, toy.NUM_ROWS)
    last = Order(toy.NUM_ROWS, 0).take(epochs * toy.NUM_ROWS, rest)
    expected = Counter({row: epochs + (row in last) for row in range(toy.NUM_ROWS)})
    found = read_rows(out)
    return None if found == +expected else f"{settings}: {dict(found)}, not {dict(expected)}"


def whole_run(
    scratch: Path, number: int, chance: random.Random, sizes: Sequence[int]
) -> str | None:
    """One run in parts of `sizes` processes in turn, stopped at random; what is wrong, or None."""
    settings = {
        "steps": chance.randint(8, 30), "rows": chance.choice([2, 3, 4, 6, 12]),
        "accumulate": chance.choice([1, 2, 3]), "save_every": chance.randint(1, 9),
    }  # fmt: skip
    out = scratch / f"run{number}"
    for turn in range(100):
        at = chance.randint(1, settings["accumulate"] * 9)
        size = sizes[turn % len(sizes)]
        body = partial(part, out=out, at=at, settings=settings)
        codes = run_ranks(size, body, scratch / "ranks", 120)
        if codes == [Exit.OK] * size:
            return judge(out, settings)
        if codes != [Exit.INTERRUPTED] * size:
            return f"exit codes {codes}"
    return "never finished"


def shares(count: int, chance: random.Random) -> list[str | None]:
    """Steps divided over up to 8 processes and 8 micro-batches: nothing lost, nothing twice."""
    found: list[str | None] = []
    for _ in range(count):
        num_rows, accumulate, each = (
            chance.randint(1, 99),
            chance.randint(1, 8),
            chance.randint(1, 16),
        )
        size = chance.randint(1, 8)
        rows = Order(num_rows, chance.randrange(99)).take(chance.randrange(9999), accumulate * each)
        parts = [row for r in range(size) for m in share(rows, accumulate, r, size) for row in m]
        found.append(None if sorted(parts) == sorted(rows) else f"{rows} became {parts}")
    return found


def prove(runs: int, num_shares: int, seed: int = 0, sizes: Sequence[int] = (1, 2)) -> list[Check]:
    """`runs` runs of each kind of division."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    checks = [checked("rows of a step divided", shares(num_shares, chance), num_shares)]
    ways = [(size,) for size in sizes] + ([tuple(sizes)] if len(sizes) > 1 else [])
    for way in ways:
        with tempfile.TemporaryDirectory() as name:
            found = [whole_run(Path(name), i, chance, way) for i in range(runs)]
        words = " then ".join(map(str, way)) + (" processes" if way != (1,) else " process")
        checks.append(checked(f"runs of {words}: every row once an epoch", found, runs))
    return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=12, help="of each division into processes")
    options.add_argument("--shares", type=int, default=2000)
    given = options.parse_args()
    report(prove(given.runs, given.shares, given.seed), given.json)


if __name__ == "__main__":
    main()
