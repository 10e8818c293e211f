"""Whether a plan fits here: its files on the disk, what it holds into the memory of the device.

Disk is counted and memory traced, so that a run that cannot end is refused before it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.core.errors import ResourceError
from specctl.core.messages.sizes import size_text
from specctl.core.storage.files import Disk
from specctl.train.joint.joint_target import FOLDER
from specctl.train.planning.hardware import Cluster, machine_bytes
from specctl.train.planning.memory import Held
from specctl.train.planning.weighing import Weighing
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
ELSEWHERE = (
    "take a smaller target, or a machine that holds it; what a GPU needs is shown by: "
    "specctl plan --target {target} --recipe {recipe} --gpu h100"
)

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
    kept = [(out, {"features": parts["features"]}) for out, parts in needs if "features" in parts]
    others = need - sum(_unwritten(out, parts) for out, parts in kept)
    tenths = int((free - others) / max(1, len(kept)) / 1e8)
    if kept and tenths > 0:
        do += f", or keep fewer features: --set data.features_gb={tenths / 10:g}"
    return [Lack(f"disk at {there}", need, free, do)]


def _unwritten(out: Path, parts: Mapping[str, int]) -> int:
    """Bytes beyond those that a run has written in earlier lives."""
    left = 0
    for name, need in parts.items():
        place = out / PLACES[name] if name in PLACES else None
        left += max(0, need - size_of(place)) if place is not None and place.exists() else need
    return left


def lacking_memory(
    weighing: Weighing, is_exact: bool = True, pipeline: Weighing | None = None
) -> list[Lack]:
    """The host or the fullest device, if a run would hold more than there is, with the change of
    recipe or hardware that would be enough, for all of the `pipeline` if it is part of one.
    Unless the answer shall be exact, a run that surely fits is not weighed."""
    cluster = weighing.cluster
    held = weighing.least()
    if fits(held, cluster):
        if not is_exact and fits(weighing.most(), cluster):
            return []
        held = weighing.held()
    if fits(held, cluster):
        return []
    do = weighing.way_out(fits, pipeline) or _elsewhere(weighing)
    found = list[Lack]()
    if cluster.gpu is not None and held.device_bytes > cluster.gpu.memory:
        what = f"memory of each GPU ({cluster.gpu.name}), fullest when {held.moment}"
        found.append(Lack(what, held.device_bytes, cluster.gpu.memory, do))
    machine = machine_bytes() if cluster.is_here else None
    if machine is not None and held.host_bytes > machine:
        found.append(Lack("memory of this machine", held.host_bytes, machine, do))
    return found


def _elsewhere(weighing: Weighing) -> str:
    recipe = weighing.recipe
    return ELSEWHERE.format(target=recipe.target.name, recipe=recipe.name)


def fits(held: Held, cluster: Cluster) -> bool:
    """Whether the device and, where it can be asked, the host have room for what is held."""
    if cluster.gpu is not None and held.device_bytes > cluster.gpu.memory:
        return False
    machine = machine_bytes() if cluster.is_here else None
    return machine is None or held.host_bytes <= machine


def refuse_lacks(lacks: Sequence[Lack], what: str, where: Path) -> None:
    """ResourceError (exit 6) that names all of them."""
    if lacks:
        raise ResourceError(
            f"{what} does not fit here",
            where=str(where),
            found="; ".join(f"{lack.what}: {size_text(lack.have)}" for lack in lacks),
            expected="; ".join(f"{lack.what}: {size_text(lack.need)}" for lack in lacks),
            do="; ".join(dict.fromkeys(lack.do for lack in lacks)),
        )
