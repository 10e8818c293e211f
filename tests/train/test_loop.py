"""The training loop on a toy drafter: exact gradients and resumes, no update from bad numbers."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.batch import LossOut
from specctl.core.errors import DivergedError, Exit
from specctl.train.data.rows.supply import Order, share
from specctl.train.loop import TrainProgress, restore, take_step, train
from specctl.train.metrics.metrics import MetricsLog, read_log
from specctl.train.stop import Interrupted, Stop
from specctl_testing.train import toy


def finish(out: Path, **fields: Any) -> tuple[Any, TrainProgress]:
    """Run or continue to the end, as a new process would."""
    job = toy.make_job(out, **fields)
    saved = job.checkpoints.newest()
    return job, train(job, restore(job, saved) if saved else TrainProgress())


def state_digest(job: Any) -> str:
    """Weights and the next random number."""
    return toy.digest(job.drafter.tensors()) + str(torch.rand(1).item())


def test_every_epoch_reads_every_row_exactly_once() -> None:
    order = Order(num_rows=10, seed=3)
    stream = [row for step in range(15) for row in order.take(4 * step, 4)]
    assert len(stream) == 60
    for epoch in range(6):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10] != stream[10:20]
    assert Order(10, 3).take(37, 8) == stream[37:45]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_micro_batches_share_the_rows_of_a_step_without_loss(size: int) -> None:
    rows = Order(50, 0).take(7, 24)
    parts = [m for rank in range(size) for m in share(rows, 3, rank, size)]
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert len(parts) == 3 * size


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_gradient_does_not_depend_on_accumulation(tmp_path: Path, optimizer: str) -> None:
    flat = []
    for accumulate, rows in ((1, 8), (2, 4), (4, 2)):
        job = toy.make_job(
            tmp_path / f"{accumulate}", accumulate=accumulate, rows=rows, dropout=0.0,
            dtype=torch.float64, clip=1e9, optimizer=optimizer,
        )  # fmt: skip
        take_step(job, TrainProgress(), lambda amount, note="": None)
        flat.append(job.gradient.flat_N.clone())
    assert flat[0].norm() > 0.01
    for other in flat[1:]:
        torch.testing.assert_close(other, flat[0], rtol=0, atol=1e-14)


def test_the_gradient_is_that_of_the_mean_over_all_supervised_tokens(tmp_path: Path) -> None:
    job = toy.make_job(
        tmp_path, accumulate=2, rows=3, dropout=0.0, dtype=torch.float64, clip=1e9, steps=4
    )
    out = job.drafter.loss(toy.rows(job.order.take(0, 6)))
    parameters = list(job.drafter.trainable().values())
    expected = torch.autograd.grad(out.sum / out.count, parameters)
    take_step(job, TrainProgress(), lambda amount, note="": None)
    flat = torch.cat([g.flatten() for g in expected])
    torch.testing.assert_close(job.gradient.flat_N, flat, rtol=0, atol=1e-14)


def test_only_trainable_parameters_move_and_the_loss_falls(tmp_path: Path) -> None:
    before = {k: v.clone() for k, v in toy.make_job(tmp_path).drafter.tensors().items()}
    job, _ = finish(tmp_path, steps=60, log_every=10, dropout=0.0)
    moved = {k for k, v in job.drafter.tensors().items() if not torch.equal(v, before[k])}
    assert moved == {"embed.weight", "mix.weight", "norm.weight", "head.weight"}
    losses = [line["loss"] for line in read_log(tmp_path / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("cut", [0, 1, 3, 5, 9, 11])
def test_a_run_stopped_and_resumed_is_the_uninterrupted_run(
    tmp_path: Path, cut: int, optimizer: str
) -> None:
    whole, _ = finish(tmp_path / "whole", optimizer=optimizer, tau_every=4)
    expected = state_digest(whole)
    batches: list[list[int]] = []

    def recorded(indices: list[int]) -> Any:
        batches.append(indices)
        if len(batches) == cut:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy.rows(indices)

    out = tmp_path / "cut"
    stop = Stop("the same command")
    stop.is_deferred = True
    job = toy.make_job(out, optimizer=optimizer, tau_every=4, batch=recorded, stop=stop)
    with stop.listening():
        if cut == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            train(job, TrainProgress())
    assert caught.value.exit == Exit.INTERRUPTED == 75
    assert caught.value.command == "the same command"
    assert job.checkpoints.steps()[-1] == cut
    torch.rand(7)  # a new process starts with other random numbers
    resumed, _ = finish(out, optimizer=optimizer, tau_every=4, batch=recorded)
    assert state_digest(resumed) == expected
    stream = Order(toy.NUM_ROWS, 0)
    assert [row for batch in batches for row in batch] == stream.take(0, 4 * 12)


def test_the_log_of_a_resumed_run_equals_that_of_the_uninterrupted_run(tmp_path: Path) -> None:
    finish(tmp_path / "whole", tau_every=4)
    out = tmp_path / "cut"
    stop = Stop("again")

    def stopping(indices: list[int]) -> Any:
        stop.is_requested = len(seen) == 6
        seen.append(indices)
        return toy.rows(indices)

    seen: list[list[int]] = []
    with pytest.raises(Interrupted):
        train(toy.make_job(out, tau_every=4, batch=stopping, stop=stop), TrainProgress())
    with (out / "metrics.jsonl").open("a") as file:  # lines after the save, the last one torn
        file.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')
    finish(out, tau_every=4)

    def figures(path: Path) -> list[dict[str, Any]]:
        timed = ("seconds", "tokens_per_second")
        lines = read_log(path / "metrics.jsonl")
        return [{k: v for k, v in line.items() if k not in timed} for line in lines]

    assert figures(out) == figures(tmp_path / "whole")


def test_log_lines_that_could_not_be_written_are_written_later_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", warn=warnings.append)
    log.write(step=1, loss=3.0)

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 8:
            return real(descriptor, data[:8])  # a short write, then none
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write(step=2, loss=2.0)
        log.write(step=3, loss=1.0)
    assert len(read_log(tmp_path / "metrics.jsonl")) == 1
    assert "No space left" in warnings[0]
    log.write(step=4, loss=0.5)
    assert [line["step"] for line in read_log(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def damaged_loss(job: Any, kind: str, at: set[int]) -> None:
    """Make the toy's loss, gradient, input or teacher-like factor not finite at some calls."""
    healthy, calls = job.drafter.loss, [0]

    def loss(batch: Any) -> LossOut:
        calls[0] += 1
        out = healthy(batch)
        if calls[0] not in at:
            return out
        where, value = kind.split(":")
        bad = torch.tensor(float(value))
        if where == "loss":
            return LossOut(out.sum + bad, out.count, out.metrics)
        if where == "gradient":
            out.sum.register_hook(lambda grad: grad * bad)
            return out
        if where == "input":
            weight = job.drafter.module.norm.weight
            return LossOut(out.sum + (weight * bad).sum() * 0.0, out.count, out.metrics)
        return LossOut(out.sum * bad, out.count, out.metrics)

    job.drafter.loss = loss


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["loss", "gradient", "input", "teacher"])
def test_numbers_that_are_not_finite_never_reach_the_weights(
    tmp_path: Path, where: str, value: str
) -> None:
    job = toy.make_job(tmp_path, steps=12, save_every=2)
    damaged_loss(job, f"{where}:{value}", {5, 6, 7})
    with pytest.raises(DivergedError) as caught:
        train(job, TrainProgress())
    assert caught.value.exit == Exit.DIVERGED == 10
    reference = toy.make_job(tmp_path / "four", steps=12)
    progress = TrainProgress()
    for _ in range(4):
        take_step(reference, progress, lambda amount, note="": None)
    assert toy.digest(job.drafter.tensors()) == toy.digest(reference.drafter.tensors())
    dump = json.loads((tmp_path / "nan_batches.json").read_text())["batches"]
    assert [bad["step"] for bad in dump] == [5, 6, 7]
    assert dump[0]["rows"] == Order(toy.NUM_ROWS, 0).take(16, 4)
    last = toy.make_job(tmp_path).checkpoints.newest()
    assert last is not None
    assert last.step == 6
    assert toy.digest(last.tensors["model"]) == toy.digest(reference.drafter.tensors())


def test_bad_steps_that_are_not_in_a_row_are_skipped_and_counted(tmp_path: Path) -> None:
    job = toy.make_job(tmp_path, steps=12)
    damaged_loss(job, "loss:nan", {2, 3, 5, 8, 9})
    assert train(job, TrainProgress()).skipped == 5
    assert all(p.isfinite().all() for p in job.drafter.trainable().values())


def test_the_best_checkpoint_is_chosen_by_measured_tau_not_by_loss(tmp_path: Path) -> None:
    taus = iter([2.0, 3.5, 3.1, 2.9, 2.5, 2.4])
    job = toy.make_job(
        tmp_path, steps=18, tau_every=3, save_every=1, dropout=0.0,
        measure=lambda: toy.measured(next(taus)),
    )  # fmt: skip
    progress = train(job, TrainProgress())
    assert (progress.best_step, progress.best["tau"]) == (6, 3.5)
    assert job.checkpoints.steps() == [6, 17, 18]
    lines = read_log(tmp_path / "metrics.jsonl")
    assert [line["tau"] for line in lines if "tau" in line] == [2.0, 3.5, 3.1, 2.9, 2.5, 2.4]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[2]


def test_measuring_does_not_disturb_training(tmp_path: Path) -> None:
    def noisy() -> Any:
        torch.rand(5)
        assert not job.drafter.module.training
        return toy.measured(2.0)

    job = toy.make_job(tmp_path / "a", tau_every=2, measure=noisy)
    train(job, TrainProgress())
    other, _ = finish(tmp_path / "b", tau_every=100)
    assert toy.digest(job.drafter.tensors()) == toy.digest(other.drafter.tensors())


def test_a_stop_before_the_loop_raises_at_once_and_inside_it_is_only_noted() -> None:
    stop = Stop("again")
    with stop.listening(), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
    late = Stop("again")
    late.is_deferred = True
    with late.listening():
        os.kill(os.getpid(), signal.SIGINT)
    assert late.is_requested


def unclear_about_signals() -> None:
    """A library that reports whatever stops it as an error of its own."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted:
        raise ValueError("could not determine the shape") from None


def test_a_stop_that_a_library_reports_as_its_own_error_is_still_a_stop() -> None:
    with pytest.raises(Interrupted) as caught, Stop("again").listening():
        unclear_about_signals()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("is_signalled", [False, True])
def test_an_error_that_no_signal_caused_stays_what_it_is(is_signalled: bool) -> None:
    stop = Stop("again")
    stop.is_deferred = True

    def step() -> None:
        if is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"), stop.listening():
        step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number: int) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # as the command line has its own
        stop = Stop("again")
        stop.is_deferred = True
        with stop.listening():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number


def test_a_second_ctrl_c_in_a_notebook_only_interrupts_the_call() -> None:
    stop = Stop("again")
    stop.is_deferred = True
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_hang_ups_are_one_request_however_often_they_come_and_none_under_nohup() -> None:
    stop = Stop("again")
    stop.is_deferred = True
    with stop.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_requested
        os.kill(os.getpid(), signal.SIGHUP)
    unheard = Stop("again")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unheard.listening():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not unheard.is_requested
