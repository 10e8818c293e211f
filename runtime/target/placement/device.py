"""Where a target runs: its device, its dtype, and whether it fits there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from specctl.core.errors import ResourceError, SpecctlError, nearest
from specctl.core.messages.sizes import size_text

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SHOWN = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "gguf")  # what help names
PACKED = "gguf"  # matrices as a GGUF file packs them, on a CPU; all else in float32
FEW_BITS = {"int8": 8, "int4": 4}  # of a weight, on a CPU; all else is of the "auto" dtype
NVIDIA = "0x10de"  # the vendor's number on the PCI bus
LARGE = 200_000_000  # parameters from which bfloat16 is the default on a CPU that has it


def choose_dtype(
    name: str,
    device: torch.device,
    stored: torch.dtype | None = None,
    num_parameters: int = 0,
) -> torch.dtype:
    """The dtype called `name`. "auto", and beside weights in few bits: float32 on CPU, but bfloat16
    from `LARGE` parameters on a CPU that multiplies bfloat16; on other devices the checkpoint's."""
    if name == PACKED:
        return torch.float32
    if name != "auto" and name not in FEW_BITS:
        if name not in DTYPES:
            raise SpecctlError(
                f"unknown dtype {name!r}",
                found=repr(name),
                expected=f"{', '.join(SHOWN[:-1])} or {SHOWN[-1]}",
                do=f"--dtype {_near_dtype(str(name))}",
            )
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if num_parameters >= LARGE and has_fast_bf16() else torch.float32
    return stored or torch.bfloat16


def _near_dtype(name: str) -> str:
    """The one of SHOWN that is nearest to a mistyped name, or to its short form."""
    short = {n: full for n, d in DTYPES.items() if (full := str(d).split(".")[1]) in SHOWN}
    known = {**short, **{n: n for n in SHOWN}}
    return known[nearest(name, known, 1)]


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """What PyTorch is slow at on this device, which training pays for (products of bfloat16 take 50
    times as long on CPUs with AVX2 alone); the compiled step widens numbers as it reads them."""
    is_fast = dtype == torch.float32 or (dtype == torch.bfloat16 and has_fast_bf16())
    if device.type != "cpu" or is_fast:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"this CPU has no instructions for {name}, so that training in it may take far longer"


def has_fast_bf16() -> bool:
    checks = (getattr(torch.cpu, f"_is_{n}_supported", None) for n in ("avx512_bf16", "amx_tile"))
    return any(check() for check in checks if check is not None)


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecctlError(
            f"unknown device {name!r}",
            found=repr(name),
            expected="auto, cpu, cuda or cuda:N",
            do="--device auto",
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "no CUDA device is usable here",
            found=f"torch {torch.__version__}",
            expected="a CUDA build of torch and a visible GPU",
            do="use --device cpu",
        )
    return device


def idle_cuda() -> str | None:
    """How to mend that a CUDA build of torch finds no GPU although one is meant; None where it
    finds one, for a build without CUDA, where no sign of a GPU is (pip brings CUDA builds to
    machines without any), and where CUDA_VISIBLE_DEVICES hides all devices on purpose."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1") or not is_gpu_meant():
        return None
    if shutil.which("nvidia-smi") is None:
        return "install the NVIDIA driver (nvidia-smi is not found)"
    return (
        f"nvidia-smi: the driver must run and be new enough for CUDA {torch.version.cuda}; in a "
        "container, hand the GPU in (docker run --gpus all)"
    )


def is_gpu_meant() -> bool:
    """Whether this machine has an NVIDIA card or its driver, or is to use one (GPU=1 of our
    Makefile, devices given out by Slurm or by hand)."""
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
    if os.environ.get("GPU") == "1" or any(os.environ.get(name) for name in names):
        return True
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return True
    cards = Path("/sys/bus/pci/devices")
    return any(_read(card / "vendor") == NVIDIA for card in cards.glob("*"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def refuse_idle_cuda() -> None:
    """Raise where a CUDA build of torch finds no usable device: whoever installed it meant a GPU,
    and would learn from the clock alone that the CPU works instead."""
    remedy = idle_cuda()
    if remedy is not None:
        raise ResourceError(
            "torch was built for CUDA, and no GPU is usable",
            found=f"torch {torch.__version__} for CUDA {torch.version.cuda}, no device",
            expected="a GPU that torch can use, or a word that the CPU is meant",
            do=f"{remedy}; or --device cpu, or CUDA_VISIBLE_DEVICES= for commands without it",
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device, None where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check_memory(need: int, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raise when `need` bytes of weights do not fit on the device."""
    free = available_bytes(device)
    if free is not None and need > free:
        raise ResourceError(
            f"{what} does not fit in memory",
            found=f"{size_text(free)} free on {device}",
            expected=f"{size_text(need)} for its weights in {str(dtype).split('.')[-1]}",
            do="use bfloat16, a smaller target, or a machine with more memory",
        )
