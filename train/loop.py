"""THE training loop.

A step: text that changes is written anew where due -> rows -> micro-batches -> drafter.loss (sums
and counts) -> backward -> one sum over ranks -> norm, guard against NaN -> one division by the
global count, which clips -> update. Between steps: a short real decode measures tau now and then,
the best checkpoint is the one with the highest measured tau (loss keeps falling after acceptance
has peaked), state is saved, a request to stop is honoured. Pretraining a target is the same loop,
with its held-out loss in the place of tau (train/pretrain).
Letters: N trainable numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specctl.core.batch import TrainBatch
from specctl.core.device.kept_memory import give_back_gaps
from specctl.core.drafter import Drafter
from specctl.core.errors import DivergedError
from specctl.core.storage.files import write_json
from specctl.recipes.schema import TrainPart
from specctl.runtime.measure.reporter import Advance, Reporter
from specctl.train.data.rows.supply import Order, Text, share
from specctl.train.distributed.ranks import Ranks
from specctl.train.metrics.metrics import (
    HeldOutMeasurement,
    MetricsLog,
    Totals,
    Window,
    alphas,
    means,
    merged,
    simulated_tau,
)
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.integrity import step_name
from specctl.train.saving.state import (
    Optimizers,
    load_optimizer_state,
    optimizer_state,
    random_state,
    set_random_state,
    untouched_random_state,
)
from specctl.train.step.optim import Gradient, Schedule, set_learning_rate
from specctl.train.step.products import faster_products, usual_products
from specctl.train.step.step_threads import StepThreads
from specctl.train.stop import Stop


@dataclass(slots=True)
class TrainProgress:
    """Where the run stands, saved with every checkpoint. `began`: the step at which its schedule
    began, where it went on with more data. One writer: the loop."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    window: Window = field(default_factory=dict)
    tau_step: int = 0
    best_step: int | None = None
    best: dict[str, Any] | None = None
    began: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the loop works with. `batch` turns row numbers of `text` into a batch with the
    target's features; `measure` decodes for real, before the first step as well if
    `measures_start`, on all ranks if `measures_together`; `log_more` hands figures to trackers;
    `between` does what else may be due between two steps; `ahead` is told the rows of the next
    step; `settle` waits until nothing uses the target."""

    drafter: Drafter
    settings: TrainPart
    schedule: Schedule
    order: Order
    batch: Callable[[list[int]], TrainBatch]
    measure: Callable[[], HeldOutMeasurement]
    optimizers: Optimizers
    gradient: Gradient
    checkpoints: Checkpoints
    log: MetricsLog
    stop: Stop
    reporter: Reporter
    out: Path
    draft_length: int
    autocast: Callable[[], AbstractContextManager[Any]]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    measures_start: bool = False
    measures_together: bool = False
    log_more: Callable[[dict[str, float], int], None] = lambda figures, step: None
    between: Callable[[TrainProgress], None] = lambda progress: None
    ahead: Callable[[list[int]], None] | None = None
    settle: Callable[[], None] = lambda: None
    ranks: Ranks = field(default_factory=Ranks)
    text: Text = field(default_factory=Text)


def train(job: Job, progress: TrainProgress) -> TrainProgress:
    """Continue from `progress` to the last step. Raises Interrupted once the state is saved after a
    signal, DivergedError after too many bad steps in a row."""
    job.stop.is_deferred = True
    with job.reporter.task("train", job.schedule.steps, "step") as advance:
        advance(progress.step)
        threads = StepThreads.of(job.ranks, job.reporter)
        while True:
            if job.ranks.any(job.stop.is_requested):
                save(job, progress)
                raise job.stop.interrupted(f"{step_name(progress.step)} is saved")
            review(job, progress)
            if progress.step >= job.schedule.steps:
                return progress
            with faster_products(job.ranks), threads.step():
                take_step(job, progress, advance)
            give_back_gaps()


def take_step(job: Job, progress: TrainProgress, advance: Advance) -> None:
    """One optimizer step on the next rows of the stream."""
    settings, began = job.settings, time.perf_counter()
    job.text.refresh(progress.step, progress.position)
    rows = job.order.take(progress.position, settings.rows * settings.accumulate)
    if job.ahead is not None and progress.step + 1 < job.schedule.steps:
        later = job.order.take(progress.position + len(rows), len(rows))
        for coming in own_share(job, later):
            job.ahead(coming)
    job.gradient.zero()
    totals = Totals()
    for micro_rows in own_share(job, rows):
        with usual_products():
            batch = replace(job.batch(micro_rows), progress=progress.step / job.schedule.steps)
        with job.autocast():
            out = job.drafter.loss(batch)
        if out.sum.requires_grad:
            out.sum.backward()  # type: ignore[no-untyped-call]
        totals = totals.plus(out, batch)
    totals = totals.over(job.ranks)
    job.gradient.sum()
    figures = totals.to_floats()
    count = max(figures["loss"][1], 1e-9)
    norm = job.gradient.norm(count)
    rate = job.schedule.rate(progress.step)
    is_good = math.isfinite(norm) and math.isfinite(figures["loss"][0])
    if is_good and figures["loss"][1] > 0:
        job.gradient.divide(count, norm, settings.clip)
        set_learning_rate(job.optimizers, rate)
        for optimizer in job.optimizers.values():
            optimizer.step()
    progress.step += 1
    progress.position += len(rows)
    progress.tokens += round(figures["tokens"][0])
    progress.seconds += time.perf_counter() - began
    if is_good:
        progress.bad.clear()
        progress.window = merged(progress.window, figures)
        write_log(job, progress, rate, norm)
        advance(1, f"loss {means(figures).get('loss', 0.0):.3f}")
    else:
        advance(1, "skipped")
        skip(job, progress, {"rows": rows, "loss": repr(figures["loss"][0]), "norm": repr(norm)})


def own_share(job: Job, rows: list[int]) -> list[list[int]]:
    """The micro-batches of this process, whose rows it may share with others of its group."""
    settings, ranks = job.settings, job.ranks
    group, groups = ranks.rank // settings.sequence_parallel, settings.groups(ranks.size)
    return share(rows, settings.accumulate, group, groups)


def skip(job: Job, progress: TrainProgress, bad: dict[str, Any]) -> None:
    """Note a step without update, its loss or gradient not being finite; raise after too many."""
    progress.skipped += 1
    progress.bad.append({"step": progress.step, **bad})
    job.log.write(step=progress.step, skipped=True, loss=None)
    job.reporter.warn(f"step {progress.step}: loss or gradient is not finite; update skipped")
    if len(progress.bad) < job.settings.nan_patience:
        return
    dump = job.out / "nan_batches.json"
    if job.ranks.is_main:
        write_json(dump, {"batches": progress.bad})
    steps = job.checkpoints.steps()
    last = f"{step_name(steps[-1])} is intact" if steps else "no checkpoint was written yet"
    raise DivergedError(
        f"loss or gradient was not finite {len(progress.bad)} steps in a row",
        found=f"loss {bad['loss']}, gradient norm {bad['norm']} at step {progress.step}; {last}",
        expected="finite numbers",
        do="look at the rows listed there, or lower the rate: "
        f"--set train.learning_rate={job.settings.learning_rate / 3:.2g} --allow config",
        where=str(dump),
    )


def review(job: Job, progress: TrainProgress) -> None:
    """What is due between two steps: measure, then save. Every step is reviewed exactly once, also
    when the run was stopped before its review."""
    settings, step = job.settings, progress.step
    is_end = step >= job.schedule.steps
    is_start = job.measures_start and step == 0 and progress.best is None
    is_due = step > 0 and progress.tau_step != step and (is_end or step % settings.tau_every == 0)
    if is_start or is_due:
        found = measure(job)
        progress.tau_step = step
        key, figures = found.key, found.to_json()
        if progress.best is None or found.beats(progress.best):
            progress.best, progress.best_step = figures | {"step": step}, step
        job.log.write(step=step, **found.log_line())
        suite = figures.get("suite")
        beside = {} if suite is None else {"suite_tau": suite["tau"]}
        job.log_more({key: figures[key], **beside}, step)
        best = f"best so far {progress.best[key]:.3f} at step {progress.best_step}"
        how = "estimated" if figures.get("is_estimate") else "measured"
        also = "" if suite is None else f" held out, {suite['tau']:.3f} on {suite['name']}"
        job.reporter.say(f"step {step}: {how} {key} {figures[key]:.3f}{also} ({best})")
    is_round = step > 0 and (is_end or step % settings.save_every == 0)
    if is_round or progress.best_step == step:
        save(job, progress)
    job.between(progress)


def measure(job: Job) -> HeldOutMeasurement:
    """Measure for real on the main rank; training's random numbers do not notice."""
    module = job.drafter.module
    assert module is not None
    module.eval()
    job.settle()
    found: HeldOutMeasurement | None = None
    with job.drafter.whole(), job.ranks.together(), untouched_random_state(job.ranks.device):
        if job.ranks.is_main or job.measures_together:
            with torch.inference_mode():
                found = job.measure()
    module.train()
    result = job.ranks.gather(found)[0]
    assert result is not None
    return result


def write_log(job: Job, progress: TrainProgress, rate: float, norm: float) -> None:
    """Log the means since the last line, when a line is due."""
    step, settings = progress.step, job.settings
    if step % settings.log_every and step < job.schedule.steps:
        return
    figures = means(progress.window)
    alpha = alphas(figures)
    figures = {k: v for k, v in figures.items() if k not in ("tokens", "alpha") and "/" not in k}
    line: dict[str, Any] = {"step": step, **figures, "lr": rate, "norm": norm}
    simulated = simulated_tau(alpha, job.draft_length)
    if simulated is not None:
        line |= {"alpha": list(alpha), "simulated_tau": simulated}
    line |= {"tokens_per_second": progress.tokens / progress.seconds, "seconds": progress.seconds}
    job.log.write(**line)
    job.log_more({k: v for k, v in line.items() if isinstance(v, float)}, step)
    progress.window = {}


def save(job: Job, progress: TrainProgress) -> None:
    """Save the state of this step, once."""
    if job.checkpoints.path(progress.step).exists():
        return
    tensors, scalars = optimizer_state(job.optimizers, job.drafter.trainable())
    files = {"model": job.drafter.tensors(), "optimizer": tensors}
    text = job.text.tensors()
    snapshot = Snapshot(
        step=progress.step,
        tensors=files | {"text": text} if text else files,
        own=random_state(job.ranks.device),
        scalars={"progress": asdict(progress), "optimizer": scalars},
        fingerprint=job.fingerprint,
    )
    pinned = () if progress.best_step is None else (progress.best_step,)
    job.checkpoints.save(snapshot, pinned)


def restore(job: Job, snapshot: Snapshot) -> TrainProgress:
    """Put weights, optimizers and generators back; returns where the run stood. With more data than
    the state has seen, the stream of rows and the schedule begin anew."""
    job.drafter.load_tensors(snapshot.tensors["model"])
    tensors, scalars = snapshot.tensors["optimizer"], snapshot.scalars["optimizer"]
    load_optimizer_state(job.optimizers, job.drafter.trainable(), tensors, scalars)
    has_more = snapshot.fingerprint.get("data") != job.fingerprint.get("data")
    if not has_more:
        job.text.load_tensors(snapshot.tensors.get("text", {}))
    if snapshot.own:
        set_random_state(snapshot.own, job.ranks.device)
    fields = dict(snapshot.scalars["progress"])
    fields["window"] = {name: tuple(pair) for name, pair in fields["window"].items()}
    progress = TrainProgress(**fields)
    if has_more:
        progress.position, progress.began = 0, progress.step
    job.log.rewind(progress.step, progress.tau_step)
    return progress
