"""Batch policies: how long every row of a batch drafts in a round. One file per policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.core.errors import RecipeError, unknown
from specctl.runtime.batching.base import Batching, RowView
from specctl.runtime.batching.fixed import Bass, Fixed
from specctl.runtime.batching.goodput import Goodput
from specctl.runtime.batching.table import BySize
from specctl.runtime.batching.tetris import Tetris
from specctl.runtime.measure.cost_table import BatchCosts

BATCHINGS = ("fixed", "goodput", "tetris", "table", "bass")
ALPHA = 0.6  # for a table that is made before anything was drafted


def make_batching(
    name: str,
    depth: int,
    costs: BatchCosts | None = None,
    *,
    length: int | None = None,
    capacity: int | None = None,
    table: Mapping[int, int] | None = None,
) -> Batching:
    """A fresh policy for one engine, whose tree policy drafts at most `depth` levels. `length` is
    of "fixed" (None: the depth), `capacity` of "tetris", `table` of "table"; "goodput", and a table
    that is not given, need `costs`."""
    given: dict[str, Any] = {"length": length, "capacity": capacity, "table": table}
    takes = {"fixed": "length", "tetris": "capacity", "table": "table"}.get(name)
    if name not in BATCHINGS:
        raise unknown("batch policy", name, BATCHINGS, "batching", "specctl serve --help")
    for key, value in given.items():
        if value is not None and key != takes:
            raise RecipeError(f"batch policy {name} has no {key}", do=f"leave {key} out")
    if name == "fixed":
        return Fixed(depth if length is None else min(length, depth))
    if name == "bass":
        return Bass(most=depth)
    if name == "tetris":
        return Tetris(longest=depth) if capacity is None else Tetris(capacity, depth)
    if table is not None:
        return BySize({int(size): min(int(k), depth) for size, k in table.items()})
    if costs is None:
        raise RecipeError(
            f"batch policy {name} needs measured costs",
            expected="the costs of this pair on this device",
            do="measure them (measure_batch_costs), or choose fixed, bass or tetris",
        )
    if name == "goodput":
        return Goodput(costs, depth)
    return BySize.measured(costs, ALPHA, depth)


__all__ = [
    "BATCHINGS",
    "Bass",
    "BatchCosts",
    "Batching",
    "BySize",
    "Fixed",
    "Goodput",
    "RowView",
    "Tetris",
    "make_batching",
]
