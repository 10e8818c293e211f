"""The service: asks of many users meet the one thread that owns the engine."""

from __future__ import annotations

from specctl.runtime.server.contract import (
    Ask,
    Busy,
    Counters,
    Finished,
    Piece,
    Serving,
    Status,
    Ticket,
    TokenLogprob,
    TooLong,
    Unavailable,
)
from specctl.runtime.server.limits import Limits

__all__ = [
    "Ask",
    "Busy",
    "Counters",
    "Finished",
    "Limits",
    "Piece",
    "Serving",
    "Status",
    "Ticket",
    "TokenLogprob",
    "TooLong",
    "Unavailable",
]
