"""Batch policies: how long every row of a batch drafts in a round. One file per policy."""

from __future__ import annotations

from typing import Any

from specctl.core.errors import RecipeError, unknown
from specctl.core.plugins import Plugins, plugins
from specctl.runtime.batching.base import Batching, BatchingEntry, RowView
from specctl.runtime.measure.cost_table import BatchCosts

BATCHINGS: Plugins[BatchingEntry] = plugins(__name__, "BATCHING")


def make_batching(
    name: str, depth: int, costs: BatchCosts | None = None, **settings: Any
) -> Batching:
    """A fresh policy for one engine, whose tree policy drafts at most `depth` levels. A setting is
    of one policy: `length` of "fixed" (None: the depth), `capacity` of "tetris", `table` of
    "table"; "goodput", and a table that is not given, need `costs`."""
    if name not in BATCHINGS:
        raise unknown("batch policy", name, BATCHINGS, "batching", "specctl serve --help")
    entry, given = BATCHINGS[name], {k: v for k, v in settings.items() if v is not None}
    for key in given:
        if key != entry.setting:
            raise RecipeError(f"batch policy {name} has no {key}", do=f"leave {key} out")
    if entry.reads_costs and costs is None and not given:
        free = [other for other, found in BATCHINGS.working().items() if not found.reads_costs]
        raise RecipeError(
            f"batch policy {name} needs measured costs",
            expected="the costs of this pair on this device",
            do=f"measure them (measure_batch_costs), or choose one of {', '.join(free)}",
        )
    return entry.make(depth, costs, **given)


__all__ = ["BATCHINGS", "BatchCosts", "Batching", "RowView", "make_batching"]
