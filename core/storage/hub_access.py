"""Whether the hub may be used, what says so, and the way on where it may not."""

from __future__ import annotations

import os
from collections.abc import Sequence

FLAG = "--offline"
VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # the hub's library reads both
DATA_VARIABLE = "HF_DATASETS_OFFLINE"
_BY_FLAG = "SPECCTL_OFFLINE"  # names the variables that the flag set, for processes started later
_TRUE = ("1", "ON", "YES", "TRUE")


def go_offline() -> None:
    """Never use the hub, in this process and those it starts: neither for models nor for data.
    To be called before transformers or datasets is imported."""
    wanted = (VARIABLES[0], DATA_VARIABLE)
    if not os.environ.get(_BY_FLAG):
        os.environ[_BY_FLAG] = " ".join([FLAG, *(name for name in wanted if not _is_set(name))])
    for name in wanted:
        os.environ[name] = "1"


def forbidden_by(is_data: bool = False) -> list[str]:
    """All that forbids the hub, the flag or variables of the environment. `is_data`: for a
    data set."""
    names = (*VARIABLES, DATA_VARIABLE) if is_data else VARIABLES
    by_flag = os.environ.get(_BY_FLAG, "").split()
    found = [FLAG] if by_flag else []
    return found + [name for name in names if _is_set(name) and name not in by_flag]


def way_online(forbidden: Sequence[str]) -> str:
    """How to allow the hub where these forbid it."""
    names = [name for name in forbidden if name != FLAG]
    parts = [f"leave out {FLAG}"] if FLAG in forbidden else []
    parts += [f"unset {' '.join(names)}"] if names else []
    return " and ".join(parts)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in _TRUE
