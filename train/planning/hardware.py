"""What a run is planned for: this machine, or so many GPUs of a kind in so many machines."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specctl.core.errors import SpecctlError, nearest
from specctl.train.distributed.run_device import run_device

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
PER_NODE = 8  # GPUs of a machine, where nobody says


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU by its maker's data sheet: bytes of memory, bytes a second from it, dense
    bfloat16 operations a second."""

    name: str
    memory: int
    bandwidth: float
    speed: float


def _gpu(name: str, gigabytes: float, terabytes_per_second: float, teraflops: float) -> Gpu:
    return Gpu(name, int(gigabytes * 1e9), terabytes_per_second * 1e12, teraflops * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 80, 3.35, 989),
        _gpu("h200", 141, 4.8, 989),
        _gpu("b200", 180, 8.0, 2250),
        _gpu("a100", 80, 2.04, 312),
        _gpu("a100-40gb", 40, 1.56, 312),
        _gpu("l40s", 48, 0.864, 362),
        _gpu("a10", 24, 0.6, 125),
        _gpu("l4", 24, 0.3, 121),
        _gpu("rtx3090", 24, 0.936, 71),
        _gpu("rtx4090", 24, 1.01, 165),
        _gpu("rtx5090", 32, 1.79, 209),
        _gpu("mi300x", 192, 5.3, 1307),
    )
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """`processes` of a run, one on each GPU, spread over `nodes` machines. `gpu` None: on the CPU.
    `is_here`: this machine, whose disk, memory and speed can be asked."""

    processes: int = 1
    nodes: int = 1
    gpu: Gpu | None = None
    is_here: bool = True

    @property
    def per_node(self) -> int:
        return -(-self.processes // self.nodes)

    def most_processes(self, most: int) -> int:
        """Processes that there are devices for: those of this machine, or at most `most`."""
        return min(most, torch.cuda.device_count()) if self.is_here else most

    def with_processes(self, count: int) -> Cluster:
        nodes = max(self.nodes, -(-count // max(PER_NODE, self.per_node)))
        return replace(self, processes=count, nodes=nodes)

    def text(self) -> str:
        if self.gpu is None:
            return "this machine's CPU"
        place = "here" if self.is_here else f"in {self.nodes} machine{'s' * (self.nodes > 1)}"
        return f"{self.processes} x {self.gpu.name}, {self.gpu.memory / 1e9:,.0f} GB each, {place}"

    @classmethod
    def here(cls, processes: int = 1) -> Cluster:
        """This machine, with the GPU that a run here trains on."""
        device = run_device()
        if device.type != "cuda":
            return cls(processes)
        found = torch.cuda.get_device_properties(device)
        return cls(processes, 1, Gpu(found.name, found.total_memory, 0.0, 0.0))

    @classmethod
    def of(cls, kind: str, gpus: int, nodes: int | None = None) -> Cluster:
        """GPUs that need not be here."""
        if kind not in GPUS:
            raise SpecctlError(
                f"unknown kind of GPU {kind!r}",
                where="--gpu",
                found=kind,
                expected="one of " + ", ".join(GPUS),
                do=f"--gpu {nearest(kind, GPUS, 1)}",
            )
        if nodes is not None and nodes > gpus:
            raise SpecctlError(
                "more machines than GPUs",
                where="--nodes",
                found=f"--gpus {gpus} --nodes {nodes}",
                expected="--gpus counts the GPUs of all machines",
                do=f"--gpus {nodes * PER_NODE} --nodes {nodes}",
            )
        return cls(gpus, nodes or -(-gpus // PER_NODE), GPUS[kind], is_here=False)


def machine_bytes(limits: Collection[str] = LIMITS) -> int | None:
    """All memory of this machine, or of this container; None where it cannot be asked."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    for path in limits:
        try:
            whole = min(whole, int(Path(path).read_text()))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
    return whole
