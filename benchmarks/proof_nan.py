"""Proof T5: numbers that are not finite never reach the weights, wherever they come from.

    PYTHONPATH=src python benchmarks/proof_nan.py

In real runs, three steps in a row get NaN or Inf in the loss, in the gradient, in one row of
the target's features that are the drafter's input, in one row of the target's logits, or a loss so
large that its gradient overflows. Proved if weights and optimizer state are bit for bit those of
before, the run ends with exit code 10 and names the rows, and the same command without the fault
goes on to the end. A single finite spike is clipped and leaves finite weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.errors import Exit
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train import run as run_module
from specctl.train.loop import Job
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints, Snapshot

STEPS, GOOD, BAD = 12, 4, (5, 6, 7)
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, slots=True)
class Fault:
    """`value` goes into `where` (loss, gradient, input, teacher) of a run of `kind`."""

    kind: str
    where: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.where} {self.value:g}"


FAULTS = (
    *(
        Fault("medusa", where, value)
        for where in ("loss", "gradient")
        for value in (NAN, INF, -INF)
    ),
    *(Fault("eagle3", "input", value) for value in (NAN, INF, -INF)),
    Fault("medusa", "input", NAN),
    *(Fault(kind, "teacher", v) for kind in ("eagle3", "distill") for v in (NAN, INF)),
    *(Fault("small-lm", "spike", size) for size in (1e30, 3e38)),
)
SPIKE = Fault("small-lm", "spike", 1e4)


def struck(tensor: Tensor, mask_BS: Tensor, value: float) -> Tensor:
    """A copy with `value` all over the row of one position in the middle of what is trained on."""
    rows_RX = tensor.clone().reshape(-1, tensor.shape[-1])
    places = mask_BS.reshape(-1).nonzero()
    rows_RX[places[len(places) // 2]] = value
    return rows_RX.view_as(tensor)


def bad_batch(batch: TrainBatch, fault: Fault) -> TrainBatch:
    if fault.where == "input":
        taps = {k: struck(v, batch.loss_mask_BS, fault.value) for k, v in batch.taps.items()}
        return replace(batch, taps=taps)
    if fault.where != "teacher":
        return batch
    rows = getattr(batch, "teacher_rows", None)
    if rows is not None:
        state_RD = struck(rows.state_RD, batch.loss_mask_BS, fault.value)
        return replace(batch, teacher_rows=replace(rows, state_RD=state_RD))
    assert batch.teacher_BSV is not None, f"{fault.kind} has no teacher"
    return replace(batch, teacher_BSV=struck(batch.teacher_BSV, batch.loss_mask_BS, fault.value))


def bad_loss(out: LossOut, fault: Fault) -> LossOut:
    if fault.where == "loss":
        return LossOut(out.sum + fault.value, out.count, out.metrics)
    if fault.where == "spike":
        return LossOut(out.sum * fault.value, out.count, out.metrics)
    if fault.where == "gradient":
        out.sum.register_hook(lambda gradient: gradient * fault.value)
    return out


def train_with(
    fault: Fault | None, steps: Sequence[int], out: Path, text: Path, target: Target
) -> int:
    """A whole run in a child of its own with the fault at those steps; returns its exit code."""
    kind = "small-lm" if fault is None else fault.kind
    recipe = small_recipe(kind, text, train__steps=STEPS, train__keep=STEPS)

    def body() -> None:
        build: Callable[..., Job] = run_module.make_job
        count = [0]

        def building(*given: Any, **named: Any) -> Job:
            job = build(*given, **named)
            loss = job.drafter.loss

            def losing(batch: TrainBatch) -> LossOut:
                count[0] += 1
                if fault is None or count[0] not in steps:
                    return loss(batch)
                return bad_loss(loss(bad_batch(batch, fault)), fault)

            job.drafter.loss = losing  # type: ignore[method-assign]
            return job

        run_module.make_job = building
        train_draft(recipe, out, target=target)

    return wait(start_child(body, out.with_suffix(".trace")))


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether weights and optimizer state are equal bit for bit."""
    return all(
        set(one.tensors[part]) == set(other.tensors[part])
        and all(torch.equal(t, other.tensors[part][n]) for n, t in one.tensors[part].items())
        for part in ("model", "optimizer")
    )


def is_finite(snapshot: Snapshot) -> bool:
    return all(bool(t.isfinite().all()) for t in snapshot.tensors["model"].values())


def judge(fault: Fault, folder: Path, text: Path, target: Target) -> str | None:
    """What is wrong after that fault, None if all is well."""
    out = folder / fault.name.replace(" ", "-").replace(",", "")
    code = train_with(fault, BAD, out, text, target)
    if code != Exit.DIVERGED:
        path = out.with_suffix(".trace")
        trace = path.read_text()[-300:] if path.exists() else "no error"
        return f"{fault.name}: exit code {code} ({trace})"
    saved = Checkpoints(out / "checkpoints", SilentReporter())
    if not all(same(saved.load(step), saved.load(GOOD)) for step in BAD[:-1]):
        return f"{fault.name}: the weights moved"
    noted = json.loads((out / "nan_batches.json").read_text())["batches"]
    if [entry["step"] for entry in noted] != list(BAD) or not all(e["rows"] for e in noted):
        return f"{fault.name}: noted {noted}"
    again = train_with(replace(fault, where="nothing"), (), out, text, target)
    if again != Exit.OK or not is_finite(saved.load(STEPS)):
        return f"{fault.name}: exit code {again} when continued"
    return None


def judge_spike(folder: Path, text: Path, target: Target) -> str | None:
    """A finite spike: the run goes on to its end with finite weights."""
    out = folder / "spike"
    code = train_with(SPIKE, (5,), out, text, target)
    saved = Checkpoints(out / "checkpoints", SilentReporter())
    if code != Exit.OK or saved.steps()[-1] != STEPS or not is_finite(saved.load(STEPS)):
        return f"{SPIKE.name}: exit code {code}"
    return "the spike moved nothing" if same(saved.load(GOOD), saved.load(BAD[0])) else None


def prove(faults: Sequence[Fault] = FAULTS) -> list[Check]:
    """All faults, and the spike that is finite."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, target = write_text(folder / "text.txt"), small_target()
        found = [judge(fault, folder, text, target) for fault in faults]
        spike = [judge_spike(folder, text, target)]
    return [
        checked("weights unchanged, exit 10, run goes on", found, min(12, len(faults))),
        checked("a finite spike is clipped", spike),
    ]


def main() -> None:
    given = parser(__doc__).parse_args()
    report(prove(), given.json)


if __name__ == "__main__":
    main()
