"""No step mixes tensors of the CPU and of a GPU: shown without one, by `pretend_gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.device.cuda_graph import CudaGraph
from specctl.drafters import family
from specctl.runtime.engine.device_clock import mark, seconds_between, settle
from specctl.train.metrics.metrics import Totals
from specctl_testing.pretend_gpu import CPU, CUDA, DevicesMixed, FamilySteps, pretend_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="benchmarks/gpu_checks.py uses the real GPU"
)
NAMES = ("dflash", "eagle3", "medusa", "prompt-lookup", "small-lm")
OWNERS = (torch, torch.cuda, Tensor, torch.inference_mode, CudaGraph)


@pytest.mark.parametrize("name", [name for name in NAMES if family(name).trainable])
def test_a_training_step_stays_on_its_device(name: str) -> None:
    loss, gradient = FamilySteps.of(name, CPU).loss_and_gradient()
    with pretend_gpu() as device:
        found, moved = FamilySteps.of(name, device).loss_and_gradient()
    assert found == pytest.approx(loss, rel=1e-5)
    assert (moved - gradient).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("name", NAMES)
def test_rounds_stay_on_their_device_and_write_the_same(name: str) -> None:
    """Drawn, and of two states of different kinds greedily as well."""
    policy = family(name).policies[0]
    temperatures = (0.0, 0.8) if name in ("eagle3", "prompt-lookup") else (0.8,)
    plain = FamilySteps.of(name, CPU)
    wanted = [plain.texts(policy, temperature) for temperature in temperatures]
    with pretend_gpu() as device:
        steps = FamilySteps.of(name, device)
        assert [steps.texts(policy, temperature) for temperature in temperatures] == wanted


def test_figures_of_a_loss_there_are_added_to_those_of_a_batch_here() -> None:
    """Joint training's batch stays on the CPU: its first step stacked both."""
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = TrainBatch(ids, ids == 0, ids, ids)
    with pretend_gpu() as device:
        total, count = (torch.tensor(number, device=device) for number in (6.0, 3))
        totals = Totals().plus(LossOut(total, count, {"alpha": (count, count)}), batch)
        assert totals.to_floats() == {"loss": (6.0, 3.0), "tokens": (8.0, 8.0), "alpha": (3.0, 3.0)}


MIXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda here, there: there + here,
    "sum in place": lambda here, there: here.add_(there),
    "sum with a number there": lambda here, there: here + there.sum(),
    "product": lambda here, there: here @ there,
    "cat": lambda here, there: torch.cat([here, there]),
    "stack of numbers": lambda here, there: torch.stack([here.sum(), there.sum()]),
    "CPU tensor by a CUDA index": lambda here, there: here[there.long()],
    "CPU tensor by a CUDA mask": lambda here, there: here[there > 0],
    "CPU tensor written at a CUDA index": lambda here, there: here.__setitem__(there.long(), 1.0),
    "CUDA tensor written from a CPU one": lambda here, there: there.__setitem__([0, 1], here),
    "gather by a CPU index": lambda here, there: there.gather(0, here.long()),
    "where": lambda here, there: torch.where(there > 0, here, there),
    "numpy": lambda here, there: there.numpy(),
    "array": lambda here, there: there.__array__(),  # type: ignore[no-untyped-call]
    "CPU generator": lambda here, there: there.uniform_(generator=torch.Generator()),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_refused(mix: str) -> None:
    here = torch.ones(2, 2)
    MIXES[mix](here, here.clone())  # so what is refused is the mix
    with pretend_gpu() as device, pytest.raises(DevicesMixed):
        MIXES[mix](here, here.to(device))


def test_what_a_real_gpu_allows_is_allowed() -> None:
    with pretend_gpu() as device:
        there = torch.arange(4, device=device)
        assert there.device == CUDA
        assert there.is_cuda
        assert (there * torch.tensor(2))[torch.tensor([1, 3])].tolist() == [2, 6]
        there[[0, 1]] = 7
        there[2] = torch.tensor(8)
        there[3:].copy_(torch.tensor([9]))
        assert there.cpu().numpy().tolist() == [7, 7, 8, 9]
        assert torch.zeros_like(there).add_(1).to("cpu", torch.float32).sum() == 4.0
        assert torch.nonzero(there == 8).item() == 2
        assert there[None].squeeze_(0).shape == (4,)


def test_gradients_go_back_to_where_the_weight_lies() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pretend_gpu() as device:
        (weight.to(device) * torch.tensor([1.0, 2.0], device=device)).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.device == CPU
    assert weight.grad.tolist() == [1.0, 2.0]


def test_a_weight_that_is_made_there_has_its_gradient_there() -> None:
    with pretend_gpu() as device:
        for weight in (
            torch.ones(2, device=device, requires_grad=True),
            torch.tensor([1.0, 1.0], device=device, requires_grad=True),
        ):
            (3 * weight).sum().cpu().backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            assert weight.grad.device == CUDA
            assert weight.grad.tolist() == [3.0, 3.0]


def test_a_tensor_is_copied_to_the_gpu() -> None:
    here = torch.zeros(2)
    with pretend_gpu() as device:
        here.to(device).add_(1)
    assert here.tolist() == [0.0, 0.0]


def test_the_device_clock_runs() -> None:
    with pretend_gpu() as device:
        start = mark(device)
        settle(device)
        assert 0.0 <= seconds_between(start, mark(device)) < 60.0


def attributes() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(owner).items()} for owner in OWNERS]


def test_pytorch_is_afterwards_what_it_was() -> None:
    before = attributes()
    with pretend_gpu():
        assert all(a != b for a, b in zip(before, attributes(), strict=True))
    assert attributes() == before
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")
    with torch.inference_mode():
        assert torch.zeros(1).is_inference()


def test_an_error_meanwhile_leaves_pytorch_as_it_was() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), pretend_gpu():
        divmod(1, 0)
    assert attributes() == before
