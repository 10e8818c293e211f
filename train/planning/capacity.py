"""Whether a plan fits here: its files on the disk, what it holds into the memory of the device.

Disk is counted, so that a run is refused before it starts. Memory is an estimate, unless it was
rehearsed: a plan says that it does not fit, a run is not stopped by it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specctl.core.errors import ResourceError
from specctl.core.files import Disk
from specctl.runtime.target.device import choose_device
from specctl.train.joint.joint_target import FOLDER
from specctl.train.runs.folders import size_of

# Where in a run folder lies what a plan counts; what has no place there is only needed for a while.
PLACES = {
    "data": "data",
    "features": "features",
    "reference": "reference",
    "checkpoints": "checkpoints",
    "package": "package",
    "changed target": FOLDER,
}
HOST = ("process", "measured in a rehearsal", "more rows")  # memory that is not the GPU's
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Needs = Sequence[tuple[Path, Mapping[str, int]]]  # run folder, bytes on disk by purpose


@dataclass(frozen=True, slots=True)
class Lack:
    """Something of which there is too little: bytes that are needed, and that there are."""

    what: str
    need: int
    have: int
    do: str

    def to_json(self) -> dict[str, str | int]:
        return {"what": self.what, "need_bytes": self.need, "have_bytes": self.have}


def lacking_disk(needs: Needs) -> list[Lack]:
    """The disk, if what is yet to be written has no room on it."""
    need = sum(_unwritten(out, parts) for out, parts in needs)
    folder = Path(os.path.abspath(needs[0][0]))
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = Disk().free(there)
    if need <= free:
        return []
    do = "free some space, or choose an --out on another disk"
    if any("features" in parts for _, parts in needs):
        do += ", or keep fewer features: --set data.features_gb=N"
    return [Lack(f"disk at {there}", need, free, do)]


def _unwritten(out: Path, parts: Mapping[str, int]) -> int:
    """Bytes beyond those that a run has written in earlier lives."""
    left = 0
    for name, need in parts.items():
        place = out / PLACES[name] if name in PLACES else None
        left += max(0, need - size_of(place)) if place is not None and place.exists() else need
    return left


def lacking_memory(memory: Mapping[str, int], is_spread: bool) -> list[Lack]:
    """The machine or the GPU, if the plan holds more than its whole memory. `is_spread`: all GPUs
    share what a plan puts on one."""
    device, found = choose_device("auto"), list[Lack]()
    is_gpu = device.type == "cuda"
    on_host = sum(n for name, n in memory.items() if name in HOST or not is_gpu)
    on_gpu = sum(memory.values()) - on_host
    do = "--set train.rows=4 --set train.accumulate=4, a smaller target, or another machine"
    if is_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
        total *= torch.cuda.device_count() if is_spread else 1
        if on_gpu > total:
            found.append(Lack("GPU memory", on_gpu, total, do))
    machine = machine_bytes()
    if machine is not None and on_host > machine:
        found.append(Lack("memory", on_host, machine, do))
    return found


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


def refuse_lacks(lacks: Sequence[Lack], what: str, where: Path) -> None:
    """ResourceError (exit 6) that names all of them."""
    if lacks:
        raise ResourceError(
            f"{what} does not fit here",
            where=str(where),
            found="; ".join(f"{lack.what}: {lack.have / 1e9:,.1f} GB" for lack in lacks),
            expected="; ".join(f"{lack.what}: {lack.need / 1e9:,.1f} GB" for lack in lacks),
            do="; ".join(dict.fromkeys(lack.do for lack in lacks)),
        )
