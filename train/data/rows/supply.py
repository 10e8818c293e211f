"""Which rows a step reads (`Order`), and where they come from while a run goes on (`Text`;
DistillSpec, arXiv 2310.08461, table 1).

fixed            the data's own answers       data.regenerate: false      `Prepared`
target-written   answered by the target       data.regenerate: true       `Prepared`
drafter-written  by the drafter of that time  data.on_policy: 1           `Mixed` with `OnPolicy`
mixed            a share of the batch         data.on_policy: 0.5         `Mixed` with `OnPolicy`

Prompts are always those of the training rows. B rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import SpecctlError
from specctl.train.data.rows.rows import TokenData


class Order:
    """The endless shuffled stream of row numbers: every epoch reads every row exactly once.

    Row n of the stream lies in epoch n // num_rows, whose permutation comes from (seed, epoch); so
    a saved position is all that a resumed run needs, and any number of processes reads the same
    stream. An even `fresh` share of the positions is for rows yet to be written: they are numbered
    from num_rows upwards, each is read once.
    """

    def __init__(self, num_rows: int, seed: int, fresh: float = 0.0) -> None:
        if num_rows < 1:
            raise SpecctlError(
                "there is nothing to train on",
                found="0 rows",
                expected="at least one row of tokens",
                do="give more text: raise data.prompts or lower train.seq_len",
            )
        self.num_rows, self.seed, self.fresh = num_rows, seed, fresh
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def take(self, position: int, count: int) -> list[int]:
        """Row numbers at positions position .. position + count - 1."""
        return [self._row(place) for place in range(position, position + count)]

    def num_fresh(self, position: int) -> int:
        """Positions before this one that are for fresh rows."""
        return int(position * self.fresh + 1e-9)

    def _row(self, position: int) -> int:
        number = self.num_fresh(position)
        if self.num_fresh(position + 1) > number:
            return self.num_rows + number
        epoch, place = divmod(position - number, self.num_rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return int(self._permutation[place])


def share(rows: list[int], accumulate: int, rank: int, size: int) -> list[list[int]]:
    """This rank's part of each of the `accumulate` micro-batches of a step.

    The rows of a step do not depend on how they are divided, so neither does its gradient.
    """
    each = len(rows) // accumulate
    micro_batches = [rows[i * each : (i + 1) * each] for i in range(accumulate)]
    return [micro_batch[rank::size] for micro_batch in micro_batches]


class Text:
    """Rows by number. A text that changes while the run goes on writes itself anew when a step
    begins, and what it wrote is saved with every checkpoint; this one never changes."""

    def refresh(self, step: int, position: int) -> None:
        """Called before `step` reads rows from `position` of the stream on, by every process."""

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        """Those rows, without taps and teacher."""
        raise AssertionError(f"{type(self).__name__} has no rows")

    def tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs to read on."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""


class Prepared(Text):
    """The rows in OUT/data."""

    def __init__(self, data: TokenData) -> None:
        self.data = data

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        return self.data.batch(rows)


class Mixed(Text):
    """Rows below `num_rows` from one text, the others from one that changes."""

    def __init__(self, still: Text, fresh: Text, num_rows: int) -> None:
        self.still, self.fresh, self.num_rows = still, fresh, num_rows

    def refresh(self, step: int, position: int) -> None:
        self.fresh.refresh(step, position)

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        old = [row for row in rows if row < self.num_rows]
        new = [row - self.num_rows for row in rows if row >= self.num_rows]
        parts = [text.batch(part) for text, part in ((self.still, old), (self.fresh, new)) if part]
        return joined(parts) if parts else self.still.batch([])

    def tensors(self) -> dict[str, Tensor]:
        return self.fresh.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.fresh.load_tensors(tensors)


def joined(batches: Sequence[TrainBatch]) -> TrainBatch:
    """One batch of all rows, padded to the widest."""
    width = max(batch.ids_BS.shape[1] for batch in batches)

    def whole(values: list[Tensor], fill: int) -> Tensor:
        return torch.cat([F.pad(x_BS, (0, width - x_BS.shape[1]), value=fill) for x_BS in values])

    return TrainBatch(
        whole([b.ids_BS for b in batches], 0),
        whole([b.loss_mask_BS for b in batches], 0),
        whole([b.document_BS for b in batches], -1),
        whole([b.position_BS for b in batches], 0),
    )
