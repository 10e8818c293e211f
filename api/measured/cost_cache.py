"""Measured round costs, kept between commands: $XDG_CACHE_HOME/specctl/costs/KEY.json.

A table holds for one device, dtype, target, drafter, policy and batch; all of that is the key, so a
table is never used for anything else. Whatever cannot be read counts as not measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import __version__
from specctl.api.measured.machine import chip
from specctl.core.storage.cache_folder import cache_folder
from specctl.models.native.library import INT8_SWITCH, SWITCH
from specctl.models.native.threads import threads_used

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.runtime.measure.cost_table import CostTable
    from specctl.runtime.policies import Policy
    from specctl.runtime.target.target import Target

MAX_BYTES = 1 << 20
METHOD = 3  # of measuring: raised where a table would mean something else


def describe(
    target: Target, drafter: Drafter, policy: Policy, source: str, batch: int
) -> dict[str, Any]:
    """All that a table depends on. `source` is the digest of a package, or a name."""
    import torch

    return {
        "specctl": __version__,
        "method": METHOD,
        "torch": torch.__version__,
        "device": f"{target.device.type} {chip(target.device)}",
        "threads": torch.get_num_threads(),
        "dtype": target.dtype_name,
        "target": target.fingerprint,
        "inflated": target.inflated,
        "runs_as": type(target.lm).__name__,
        "switches": [os.environ.get(name, "1") for name in (SWITCH, INT8_SWITCH)],
        "family": drafter.family,
        "members": getattr(drafter, "names", []),  # of a team, which depend on the target
        "drafter": source,
        "policy": repr(policy),
        "batch": batch,
    }


def read_costs(about: dict[str, Any]) -> CostTable | None:
    """The table that was measured for exactly this, if there is one."""
    from specctl.runtime.measure.cost_table import CostTable

    path = _path(about)
    try:
        if path is None:
            return None
        found = json.loads(_read(path))
        if found["about"] != about:
            return None
        draft, verify = (
            {int(k): float(v) for k, v in found[name].items()} for name in ("draft", "verify")
        )
        read = float(found.get("read", 0.0))
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError
    ):  # fmt: skip
        return None
    if not draft or set(draft) != set(verify) or 0 not in verify:
        return None
    costs = (read, *draft.values(), *verify.values())
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        return None
    if min(draft) < 0 or verify[0] == 0:
        return None
    return CostTable(draft, verify, about["device"], about["dtype"], about["batch"], read)


def _read(path: Path) -> bytes:
    """The text of a table; a pipe is not waited for, and what is too long is no table."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("not a regular file")
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError("too long for a table")
    return raw


def write_costs(about: dict[str, Any], costs: CostTable) -> Path | None:
    """Where the table is kept; None where there is no place that can be written, and beside other
    work that took cores: such prices are those of the moment."""
    import torch

    path, threads = _path(about), torch.get_num_threads()
    if path is None or threads_used(threads) < threads:
        return None
    tables = {"draft": dict(costs.draft), "verify": dict(costs.verify)}
    body = {"about": about, **tables, "read": costs.read}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*"):
            left.unlink()
        partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        return None
    return path


def _path(about: dict[str, Any]) -> Path | None:
    folder = _folder()
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / f"{key[:32]}.json"


def _folder() -> Path | None:
    """Where the tables are kept; None where nobody has a home."""
    try:
        return cache_folder("costs")
    except OSError:  # no place for it
        return None


def count_since(moment: float) -> int:
    """How many tables were written here since that time (seconds since the epoch)."""
    folder = _folder()
    if folder is None or not folder.is_dir():
        return 0
    return sum(path.stat().st_mtime >= moment for path in folder.glob("*.json"))
