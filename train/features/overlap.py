"""Overlap: the target reads the next batch while the drafter learns from this one
(`train.overlap`).

One batch is read ahead, by a thread of its own; on a GPU on a stream of its own, so that both are
in the device's queue at once. What is read is what would have been read: the target is frozen, and
nothing that it needs is drawn at random. The features of two batches are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.recipes.schema import DataPart, TrainPart

BatchOf = Callable[[list[int]], TrainBatch]


class Overlapped:
    """Batches by row numbers, the next announced one read ahead. One writer: the loop."""

    def __init__(self, read: BatchOf, device: torch.device) -> None:
        self._read, self._announced = read, deque[list[int]]()
        self._coming: tuple[list[int], Future[TrainBatch]] | None = None
        self._worker = ThreadPoolExecutor(1, "overlap")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ahead(self, rows: list[int]) -> None:
        """These rows will be asked for, after all that were announced before."""
        self._announced.append(rows)
        self._begin()

    def __call__(self, rows: list[int]) -> TrainBatch:
        if self._coming is None or self._coming[0] != rows:
            if self._stream is not None:  # what a forward makes once is made on one stream
                self.settle()
                torch.cuda.current_stream().wait_stream(self._stream)
            return self._read(rows)
        found, self._coming = self._coming[1].result(), None
        if self._stream is not None:
            now = torch.cuda.current_stream()
            now.wait_stream(self._stream)
            for tensor in _tensors(found):
                tensor.record_stream(now)
        self._begin()
        return found

    def settle(self) -> None:
        """Wait until the target is free; what was read is kept."""
        if self._coming is not None:
            self._coming[1].exception()

    def _begin(self) -> None:
        if self._coming is None and self._announced:
            rows = self._announced.popleft()
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            self._coming = rows, self._worker.submit(self._on_stream, rows)

    def _on_stream(self, rows: list[int]) -> TrainBatch:
        if self._stream is None:
            return self._read(rows)
        with torch.cuda.stream(self._stream):
            return self._read(rows)


def _tensors(batch: TrainBatch) -> Iterator[Tensor]:
    """All that were made for a batch."""
    yield from (batch.ids_BS, batch.loss_mask_BS, batch.document_BS, batch.position_BS)
    yield from batch.taps.values()
    if batch.image_BS is not None:
        yield batch.image_BS
    if batch.position_BS3 is not None:
        yield batch.position_BS3
    if batch.teacher_BSV is not None:
        yield batch.teacher_BSV
    if batch.teacher_rows is not None:
        rows = batch.teacher_rows
        yield from (x for x in (rows.state_RD, rows.log_z_R, rows.best_R) if x is not None)


def check_overlap(train: TrainPart, data: DataPart, drafter: Drafter) -> None:
    """Refuse text that is not written yet, and drafters whose loss runs the target's layers, which
    would then be in use twice."""
    if train.overlap and data.on_policy > 0:
        raise RecipeError(
            "text that the drafter writes is not known a batch ahead",
            where="train.overlap",
            found=f"train.overlap: true, data.on_policy: {data.on_policy:g}",
            expected="one of the two",
            do="--set train.overlap=false",
        )
    if train.overlap and drafter.runs_target:
        raise RecipeError(
            f"{drafter.family} runs the target's layers while it learns",
            where="train.overlap",
            found="train.overlap: true",
            expected="a family with layers of its own",
            do="--set train.overlap=false",
        )
