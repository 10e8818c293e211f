"""How many rows' features lie in a shared folder already, for a plan: nothing is read or written.

Features lie under a key that names target, form and rows with their number, so that those of the
same rows are found by whoever made them. How many rows there will be is not known before they are
packed: the number is the one whose key names a folder that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.core.drafter import Needs
from specctl.core.errors import SpecctlError
from specctl.recipes.schema import DataPart, TrainPart
from specctl.runtime.target.target import Target
from specctl.train.data.preparation import Preparation
from specctl.train.data.prepare import rows_digest
from specctl.train.features.kept import Form
from specctl.train.features.offline import features_key, local_folder
from specctl.train.features.reading import reading_target
from specctl.train.features.shards import ShardLayout, Shards

MOST_ROWS = 100_000  # numbers that are tried, which takes seconds


@dataclass(frozen=True, slots=True)
class StoredRows:
    """So many of `rows` have their features on disk."""

    there: int
    rows: int

    @property
    def missing(self) -> float:
        """The share that is yet to be read."""
        return 1.0 - self.there / self.rows

    def text(self) -> str:
        return f"features: {self.there:,} of {self.rows:,} rows already there"


def stored_rows(
    made: Preparation, train: TrainPart, needs: Needs, out: Path, most: int
) -> StoredRows | None:
    """Of the rows that a run in `out` would have, at most so many; None where none
    are there, and where its rows cannot be named yet: questions that are still to be written,
    features at a URL."""
    data = made.data
    root = local_folder(data)
    if data.features != "offline" or root is None or not root.is_dir():
        return None
    keys = {path.name for path in root.iterdir() if path.is_dir()}
    if not keys or not (needs.taps or needs.teacher):
        return None
    with suppress(SpecctlError):  # data that are not as they should be; the run will say it
        digest = rows_digest(made, out)
        reading = reading_target(made.target, train)
        for form in _forms(data, reading, needs):
            for number in range(1, min(most, MOST_ROWS) + 1):
                layout = ShardLayout.of(number, made.seq_len * form.bytes_per_token)
                key = features_key(data, reading, form, digest, layout)
                if key in keys:
                    return StoredRows(_there(Shards(root / key, layout)), number)
    return None


def _forms(data: DataPart, target: Target, needs: Needs) -> Iterator[Form]:
    """The form of these needs, and the one of a vocabulary whose size is yet unknown."""
    form = Form.of(data, target, needs)
    yield form
    if form.teacher == "state":
        yield replace(form, has_log_z=not form.has_log_z)


def _there(shards: Shards) -> int:
    layout = shards.layout
    return sum(len(layout.rows(i)) for i in range(layout.num_shards) if shards.is_there(i))
