"""Proof T10: two runs never share a folder; the second leaves at once and says who holds it.

    PYTHONPATH=src python benchmarks/proof_lock.py --races 100

While a run holds its folder, others are started on it: each must leave with exit code 4 within two
seconds and name the holder's process and host, and the holder must not notice. In races, several
runs start on one folder at the same moment: exactly one may train. A holder that was killed is
replaced by the next run at once.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from proof_common import (
    Check,
    checked,
    parser,
    report,
    small_recipe,
    small_target,
    start_child,
    wait,
    write_text,
)

from specctl.core.errors import Exit
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.integrity import saved_steps

AT_ONCE = 2.0  # seconds


def begin(recipe: Recipe, out: Path, target: Target, trace: Path) -> int:
    """Start a run in a child."""
    return start_child(partial(train_draft, recipe, out, target=target), trace)


def until_saved(out: Path, above: int) -> int:
    """Wait until the run has saved a step above that one; returns it."""
    for _ in range(3000):
        steps = saved_steps(out / "checkpoints")
        if steps and steps[-1] > above:
            return steps[-1]
        time.sleep(0.01)
    raise AssertionError(f"nothing was saved in {out}")


def intrude(recipe: Recipe, out: Path, target: Target, holder: int) -> str | None:
    """A second run on a held folder: what is wrong with how it leaves."""
    trace = out.with_suffix(".trace")
    trace.unlink(missing_ok=True)
    began = time.monotonic()
    code = wait(begin(recipe, out, target, trace))
    took = time.monotonic() - began
    if code != Exit.FILE or took > AT_ONCE:
        return f"exit {code} after {took:.1f} s"
    text = trace.read_text()
    names = f"process {holder} on {socket.gethostname()}"
    return None if names in text else f"does not name {names}: {text}"


def held(recipe: Recipe, out: Path, target: Target, tries: int) -> list[Check]:
    """Intruders on a running run; then its death, and the next run."""
    holder = begin(recipe, out, target, out.with_suffix(".holder"))
    step = until_saved(out, 0)
    found = [intrude(recipe, out, target, holder) for _ in range(tries)]
    until_saved(out, step)  # it goes on undisturbed
    os.kill(holder, signal.SIGKILL)
    wait(holder)
    step = saved_steps(out / "checkpoints")[-1]
    heir = begin(recipe, out, target, out.with_suffix(".heir"))
    until_saved(out, step)
    os.kill(heir, signal.SIGTERM)
    code = wait(heir)
    after = None if code == Exit.INTERRUPTED else f"exit {code}"
    return [
        checked("a second run on a held folder: exit 4, holder named", found, tries),
        checked("a killed holder is replaced at once", [after]),
    ]


def race(recipe: Recipe, out: Path, target: Target, runners: int) -> str | None:
    """Runs that start together in one folder: one trains, the others leave."""
    traces = [out.with_suffix(f".{i}") for i in range(runners)]
    go, gone = os.pipe()

    def run() -> None:
        os.close(gone)
        os.read(go, 1)  # returns to all of them when the parent closes its end
        train_draft(recipe, out, target=target)

    children = [start_child(run, trace) for trace in traces]
    os.close(go)
    os.close(gone)
    codes = sorted(wait(child) for child in children)
    steps = recipe.train.steps
    # One that comes after the first has ended finds a finished run and has nothing to do.
    wrong = [code for code in codes if code not in (Exit.OK, Exit.FILE)]
    if wrong or codes[0] != Exit.OK:
        return f"exit codes {codes}"
    found = Checkpoints(out / "checkpoints", SilentReporter()).newest()
    log = (out / "metrics.jsonl").read_text().count('"loss"')
    is_whole = found is not None and found.step == steps == log
    return None if is_whole else f"ended at {found and found.step}, {log} lines of loss"


def prove(tries: int, races: int, runners: int = 3) -> list[Check]:
    """Intruders, succession, races."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, target = write_text(folder / "text.txt"), small_target()
        checks = held(small_recipe("medusa", text), folder / "held", target, tries)
        short = small_recipe("medusa", text, train__steps=3)
        found = [race(short, folder / f"race{i}", target, runners) for i in range(races)]
        return [*checks, checked(f"{runners} runs start at once, one trains", found, races)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tries", type=int, default=20)
    options.add_argument("--races", type=int, default=50)
    given = options.parse_args()
    report(prove(given.tries, given.races), given.json)


if __name__ == "__main__":
    main()
