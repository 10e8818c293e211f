"""Does any family mix tensors of the CPU and of a GPU? Asked without a GPU.

    python benchmarks/pretend_gpu.py
    python benchmarks/pretend_gpu.py --only eagle3,medusa

On the GPU that tests/specctl_testing/pretend_gpu.py pretends: loss and gradient of every family
that is trained, and texts by every policy at temperatures 0 and 0.8, once more with rounds and
drafting steps that are recorded; over a draft vocabulary the first policy alone. All must be what
the CPU gives, but for sampled text of a family that drafts with other numbers on a CPU. Prints a
line a family; exit code 8 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from specctl.core.drafter import Family
from specctl.core.errors import Exit
from specctl.drafters import families, family
from specctl.drafters.states import recorded
from specctl.models.compiled import CompiledLM
from specctl_testing.pretend_gpu import CPU, FamilySteps, pretend_gpu

HERE = Path(__file__).resolve().parents[1]
TEMPERATURES = (0.0, 0.8)
ROUNDED_HERE = {"quantspec"}  # a CPU reads the draft's 4-bit weights by its own compiled product


def loss_fault(here: FamilySteps, there: FamilySteps) -> str | None:
    """What is wrong with loss and gradient; None if nothing is."""
    loss, gradient = here.loss_and_gradient()
    with pretend_gpu():
        other, moved = there.loss_and_gradient()
    off = float((moved - gradient).norm() / gradient.norm().clamp(min=1e-12))  # 0 is compared, too
    if abs(other - loss) <= 1e-4 * abs(loss) and off <= 1e-3:
        return None
    return f"loss {loss:g} here, {other:g} there; gradient off by {off:.2g}"


def text_fault(
    here: FamilySteps, there: FamilySteps, policy: str, temperature: float
) -> str | None:
    """What is wrong with the texts; None if nothing is."""
    is_other = temperature > 0 and here.drafter.family in ROUNDED_HERE
    with pretend_gpu():
        found = there.texts(policy, temperature)
    wanted = found if is_other else here.texts(policy, temperature)
    if found != wanted:
        return "another text than on the CPU"
    with pretend_gpu():
        lm = CompiledLM(there.target.lm)
        replayed = replace(there, target=replace(there.target, lm=lm))
        with mock.patch.object(recorded, "PATIENCE", 2):
            same = replayed.texts(policy, temperature) == wanted
    return None if same else "another text than on the CPU, from recordings"


def raised(error: Exception) -> str:
    """An error, and the lines of ours that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if str(HERE) in f.filename and ".venv" not in f.filename]
    ours = [f for f in ours if "specctl_testing" not in f.filename]
    places = [f"{f.filename.removeprefix(f'{HERE}/')}:{f.lineno}" for f in ours[:-4:-1]]
    return f"{type(error).__name__}: {str(error)[:200]} (at {' < '.join(places)})"


def faults(of: Family, is_trimmed: bool) -> Iterator[str | None]:
    """Of every case of a family: what is wrong, or None."""
    here = FamilySteps.of(of.name, CPU, is_trimmed)
    with pretend_gpu() as device:
        there = FamilySteps.of(of.name, device, is_trimmed)
    calls: list[tuple[str, Callable[..., str | None], tuple[object, ...]]] = []
    if of.trainable:
        calls.append(("loss", loss_fault, ()))
    policies = of.policies[: 1 if is_trimmed else None]
    calls += [
        (f"{policy} at {temperature:g}", text_fault, (policy, temperature))
        for policy in policies
        for temperature in TEMPERATURES
    ]
    for what, call, given in calls:
        try:
            found = call(here, there, *given)
        except Exception as error:  # whatever one case does, the others are tried
            found = raised(error)
        kind = " over a draft vocabulary" if is_trimmed else ""
        yield None if found is None else f"{what}{kind}: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="families, separated by commas")
    only = parser.parse_args().only
    chosen = [family(name) for name in only.split(",")] if only else list(families().values())
    torch.set_num_threads(1)  # the tensors are tiny
    num_failed = 0
    for each in chosen:
        began = time.monotonic()
        kinds = (False, True) if each.trainable else (False,)
        found = [fault for is_trimmed in kinds for fault in faults(each, is_trimmed)]
        wrong = [fault for fault in found if fault is not None]
        num_failed += bool(wrong)
        told = f"{len(wrong)} of {len(found)} failed: {'; '.join(wrong)}" if wrong else "ok"
        seconds = time.monotonic() - began
        print(f"{each.name}: {told} ({len(found)} cases, {seconds:.1f} s)", flush=True)
    return Exit.GATE if num_failed else Exit.OK


if __name__ == "__main__":
    sys.exit(main())
