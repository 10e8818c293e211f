"""A CUDA build of torch without a usable GPU says so, instead of working on the CPU in silence."""

from __future__ import annotations

import pytest
import torch

from specctl.core.errors import Exit, ResourceError
from specctl.runtime.target.placement import device
from specctl.runtime.target.placement.device import idle_cuda, is_gpu_meant, refuse_idle_cuda
from specctl.runtime.target.target import load_target


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the default build of torch on a machine whose driver does not work."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "is_gpu_meant", lambda: True)


@pytest.mark.usefixtures("idle")
def test_a_target_is_not_loaded_on_the_cpu_in_silence() -> None:
    with pytest.raises(ResourceError) as caught:
        load_target("tiny")
    assert "CUDA 13.0" in caught.value.found
    assert "--device cpu" in caught.value.do
    assert load_target("tiny", device="cpu").device.type == "cpu"


@pytest.mark.usefixtures("idle")
def test_hiding_all_devices_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_idle_cuda()


def test_a_cpu_build_and_a_working_gpu_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert idle_cuda() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert idle_cuda() is None


@pytest.mark.parametrize(("driver", "word"), [(None, "install"), ("/bin/nvidia-smi", "driver")])
@pytest.mark.usefixtures("idle")
def test_doctor_says_what_to_fix(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, word: str
) -> None:
    from specctl.cli.commands.doctor import RED, _device

    monkeypatch.setattr("shutil.which", lambda name: driver)
    found = next(_device())
    assert found.state == RED
    assert "built for CUDA 13.0" in found.found
    assert word in found.do
    assert Exit.RESOURCES == 6


@pytest.mark.usefixtures("idle")
def test_where_there_is_no_gpu_at_all_the_cpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip brings the CUDA build to laptops, too."""
    monkeypatch.setattr(device, "is_gpu_meant", lambda: False)
    refuse_idle_cuda()


@pytest.mark.parametrize("sign", ["GPU", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"])
def test_a_gpu_that_was_asked_for_is_meant(monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    monkeypatch.setenv(sign, "1")
    assert is_gpu_meant()


@pytest.mark.parametrize(
    ("dtype", "where", "has_bf16", "is_slow"),
    [
        (torch.float32, "cpu", False, False),
        (torch.bfloat16, "cpu", False, True),
        (torch.bfloat16, "cpu", True, False),
        (torch.float16, "cpu", True, True),
        (torch.bfloat16, "cuda", False, False),
    ],
)
def test_a_dtype_without_instructions_is_said_to_be_slow(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, where: str, has_bf16: bool, is_slow: bool
) -> None:
    monkeypatch.setattr(device, "has_fast_bf16", lambda: has_bf16)
    said = device.slow_dtype(dtype, torch.device(where))
    assert (said is not None) == is_slow
    assert said is None or str(dtype).removeprefix("torch.") in said
