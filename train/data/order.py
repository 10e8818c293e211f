"""Order: which rows a step reads, from (seed, epoch, position) alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specctl.core.errors import SpecctlError


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
