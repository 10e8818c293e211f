"""Data with images before a run: how many there are, and what of a recipe cannot go with them.

Images are found by reading the records, which is done for multimodal targets alone; for others the
first record with an image stops the run when its data are read.
"""

from __future__ import annotations

from specctl.core.errors import FileError, IncompatibleError, SpecctlError
from specctl.drafters import family
from specctl.recipes.schema import DataPart, DrafterPart, TargetPart, TrainPart
from specctl.runtime.target.target import Target
from specctl.train.data.images.shown_images import no_images_here
from specctl.train.data.records.layouts import field_choices
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import (
    CORPUS,
    HUB,
    SELF,
    find_source,
    names_of,
    read_samples,
)
from specctl.train.planning.target_shape import is_multimodal_target

WITHOUT = "leave it out, or learn the texts alone: --set data.images=drop"


def count_images(data: DataPart, most: int | None = None, is_run: bool = False) -> int:
    """The images of the data that are to be read, up to `most` (None: all). Data sets of the hub
    are looked at by a run alone, which downloads them."""
    others = (CORPUS, SELF) if is_run else (CORPUS, HUB, SELF)
    names = [name for name in names_of(data.source) if _kind(name, data) not in others]
    if data.images == "drop" or not names:
        return 0
    count, choices = 0, field_choices(data)
    for sample in read_samples(names, data.format, data.split, data.seed, Defects(), choices):
        count += len(sample.images)
        if most is not None and count >= most:
            return count
    return count


def _kind(name: str, data: DataPart) -> str:
    return find_source(name, data.format, data.split).kind


def check_parts(data: DataPart, train: TrainPart, name: str, processes: int = 1) -> None:
    """IncompatibleError for a run that cannot learn from images, by what of it reads text alone.
    `name`: of its family."""
    if family(name).borrows_layers:
        raise runs_layers(name)
    wrong: list[tuple[bool, str, str]] = [
        (data.features == "offline", "data.features=offline", "--set data.features=online"),
        (data.kept_features is not None, "data.kept_features", WITHOUT),
        (data.target_source != "inprocess", f"data.target_source={data.target_source}", WITHOUT),
        (data.endpoint is not None, "data.endpoint", "leave it out: the target here writes"),
        (data.on_policy > 0, "data.on_policy", "--set data.on_policy=0"),
        (train.joint is not None, "a target that learns (train.joint)", WITHOUT),
        (train.sequence_parallel > 1, "train.sequence_parallel", "leave it out"),
        (train.parallel == "fsdp" and processes > 1, "train.parallel=fsdp", "leave it out"),
    ]
    for is_wrong, what, do in wrong:
        if is_wrong:
            raise no_images_here(what, do)


def runs_layers(name: str) -> IncompatibleError:
    """The error for a family whose training runs layers of the target, which would read ids alone
    where an image stands."""
    return no_images_here(
        f"family {name}, which runs layers of the target,",
        "a family with layers of its own (eagle3, small-lm), or --set data.images=drop",
    )


def shows_images(
    data: DataPart,
    train: TrainPart,
    drafter: DrafterPart,
    part: TargetPart,
    target: Target | None = None,
    processes: int = 1,
    is_run: bool = True,
) -> bool:
    """Whether a run reads images: its data hold some, and its target (None: that of the `part`,
    which is yet to be loaded) may see them. Raises IncompatibleError as `check_parts`. Without
    `is_run` nothing is downloaded."""
    if data.images == "drop":
        return False
    may_see = _may_see(part) if target is None else bool(target.vision)
    if not may_see or not count_images(data, 1, is_run):
        return False
    check_parts(data, train, drafter.family, processes)
    return True


def _may_see(part: TargetPart) -> bool:
    """Whether the target of that part reads images; one whose configuration is not to be had does
    not, and whoever loads it says why."""
    try:
        return is_multimodal_target(part)
    except SpecctlError:
        return False


def planned_images(data: DataPart, train: TrainPart, drafter: DrafterPart, part: TargetPart) -> int:
    """How many images the run will show its target, of data that are here; IncompatibleError where
    it cannot learn from them."""
    try:
        found = shows_images(data, train, drafter, part, is_run=False)
        return count_images(data) if found else 0
    except FileError:  # data that are not here yet
        return 0
