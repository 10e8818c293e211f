"""Long rows over several processes (`train.sequence_parallel`): which of them share a row.

So many consecutive processes form a group that reads the same rows, and each computes one stretch
of them (`core/forward/row_part.py`). Groups divide the rows of a batch among themselves, as
processes do otherwise.
"""

from __future__ import annotations

import torch.distributed as dist

from specctl.core.drafter import Drafter, Family
from specctl.core.errors import RecipeError
from specctl.core.forward.row_part import RowPart
from specctl.drafters import families
from specctl.train.distributed.ranks import Ranks

WHERE = "train.sequence_parallel"


def _splits(family: Family) -> bool:
    return bool(getattr(family.build, "splits_rows", False))


def row_part(count: int, drafter: Drafter, ranks: Ranks) -> RowPart | None:
    """This process' part of every row, of which `count` processes compute one together; None where
    it computes rows whole. Every process must ask, because asking forms the groups."""
    if count == 1:
        return None
    if not drafter.splits_rows:
        raise RecipeError(
            f"{drafter.family} computes whole rows",
            where=WHERE,
            found=f"sequence_parallel {count}",
            expected="a family that looks at other positions by attention alone: "
            + ", ".join(
                sorted(name for name, each in families().working().items() if _splits(each))
            ),
            do=f"--set {WHERE}=1",
        )
    if ranks.size % count:
        raise RecipeError(
            "the processes do not divide into groups that share a row",
            where=WHERE,
            found=f"sequence_parallel {count}, {ranks.size} processes",
            expected=f"a multiple of {count} processes",
            do=f"--processes {count} or --gpus {count}, or --set {WHERE}=1",
        )
    group, _ = dist.new_subgroups(group_size=count)  # type: ignore[no-untyped-call]
    return RowPart(ranks.rank % count, count, group)
