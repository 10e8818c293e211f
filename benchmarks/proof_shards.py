"""Proof T9: feature shards killed while they are written; no torn shard is ever read.

    PYTHONPATH=src python benchmarks/proof_shards.py --kills 100

A run keeps the target's features on disk in small shards and is killed with SIGKILL at a random
moment while it fills them, again and again. After each kill every shard that would be read is
compared with what a run that was never killed wrote; a shard is either that or absent. Some kills
are made worse: a finished shard is truncated, as a crash of the machine may do. At the end the run
comes to the same weights as the one that was never killed. And no shard with a flipped bit is read.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from proof_common import (
    Check,
    checked,
    parser,
    report,
    small_recipe,
    small_target,
    start_child,
    state_digest,
    wait,
    write_text,
)

from specctl.core.errors import SpecctlError
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.features import shards as module
from specctl.train.features.shards import ShardLayout, Shards
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints

STEPS = 3


def shard_files(out: Path) -> dict[str, Path]:
    """Name -> file of every shard, with a manifest or without."""
    return {path.name: path for path in (out / "features").glob("*/shard-*.safetensors")}


def wrongly_read(out: Path, whole: Path) -> str | None:
    """A shard that would be read and is not as the uninterrupted run wrote it; None if none is.
    Looks at a copy, because reading drops what is damaged."""
    copy, good = out.with_name("copy"), shard_files(whole)
    shutil.rmtree(copy, ignore_errors=True)
    if not (out / "features").exists():
        return None
    shutil.copytree(out / "features", copy / "features")
    for name, path in shard_files(copy).items():
        number = int(name[6:11])
        is_damaged = path.read_bytes() != good[name].read_bytes()
        # one row a shard, so that row `number` lies in this very file
        is_read = Shards(path.parent, ShardLayout(number + 1, 1)).read(number) is not None
        if is_read and is_damaged:
            return f"{name} was read torn"
    return None


def truncate(out: Path, chance: random.Random) -> None:
    """Cut a finished shard, if there is one."""
    files = sorted(shard_files(out).values())
    if files:
        path = chance.choice(files)
        os.truncate(path, chance.randrange(path.stat().st_size))


def flipped(whole: Path, chance: random.Random) -> list[str | None]:
    """Every shard with one flipped bit: whether it would be read."""
    folder = whole.with_name("flipped")
    shutil.copytree(whole, folder)
    for path in shard_files(folder).values():
        body = bytearray(path.read_bytes())
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        path.write_bytes(body)
    return [wrongly_read(folder, whole) for _ in shard_files(folder)]


def final(out: Path) -> str:
    return state_digest(Checkpoints(out / "checkpoints", SilentReporter()).load(STEPS))


def odd_end(out: Path, whole: Path) -> str | None:
    """What is different about a run's end; None if it is that of the uninterrupted one."""
    try:
        same = final(out) == final(whole)
    except SpecctlError as error:
        return f"{out.name} never ended: {error}"
    return None if same else f"{out.name} ended differently"


def killed_run(
    recipe: Recipe, out: Path, target: Target, whole: Path, kills: int, chance: random.Random,
    seconds: float,
) -> tuple[int, list[str | None]]:  # fmt: skip
    """One run, killed up to `kills` times while it fills; how often, and what was wrong."""
    found: list[str | None] = []
    trace = out.with_suffix(".trace")
    for number in range(10_000):
        child = start_child(partial(train_draft, recipe, out, target=target), trace)
        if number < kills:
            time.sleep(chance.uniform(0.0, seconds))
            os.kill(child, signal.SIGKILL)
        code = wait(child)
        if code not in (0, -signal.SIGKILL):
            return number, [*found, f"exit {code}: {trace.read_text()[-500:]}"]
        found.append(wrongly_read(out, whole))
        if code == 0:
            return number, found
        if chance.random() < 0.3:
            truncate(out, chance)
            found.append(wrongly_read(out, whole))
    return number, [*found, "never finished"]


def prove(kills: int, seed: int = 0, shard_bytes: int = 6000) -> list[Check]:
    """At least `kills` kills, over as many runs as that takes."""
    torch.set_num_threads(1)
    few = patch.object(module, "LEAST_ROWS", 1)
    with few, patch.object(module, "SHARD_BYTES", shard_bytes):  # forked children have it too
        return _prove(kills, seed)


def _prove(kills: int, seed: int) -> list[Check]:
    chance, made = random.Random(seed), 0
    found, ends = list[str | None](), list[str | None]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, target = write_text(folder / "text.txt"), small_target()
        recipe = small_recipe("eagle3", text, data__features="offline", train__steps=STEPS)
        whole = folder / "whole"
        began = time.monotonic()
        code = wait(start_child(partial(train_draft, recipe, whole, target=target), folder / "t"))
        seconds = time.monotonic() - began
        assert code == 0, (folder / "t").read_text()
        num_shards = len(shard_files(whole))
        flips = flipped(whole, chance)
        for number in range(10 * kills):
            if made >= kills:
                break
            out = folder / f"run{number}"
            count, wrong = killed_run(recipe, out, target, whole, kills - made, chance, seconds)
            made += count
            found += wrong
            ends.append(odd_end(out, whole))
            shutil.rmtree(out)
    killed: list[str | None] = [None] * made
    several: list[str | None] = [None] * num_shards
    return [
        checked("shards of the run", several, 4),
        checked("kills", killed, kills),
        checked("every shard that is read is whole", found, kills),
        checked("no shard with a flipped bit is read", flips, 4),
        checked("runs that end as if never killed", ends),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100)
    given = options.parse_args()
    report(prove(given.kills, given.seed), given.json)


if __name__ == "__main__":
    main()
