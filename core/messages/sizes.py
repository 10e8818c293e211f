"""Sizes of memory and files, as every message writes them.

One unit everywhere, the decimal one: in it models, disks and features are named elsewhere, and a
plan can be compared with the error that refuses it.
"""

from __future__ import annotations

GB = 1e9  # bytes


def size_text(count: float) -> str:
    """Bytes in three digits, so that what is there and what is needed can be compared:
    1540 -> "1.54 kB"."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    decimals = 0 if unit == "B" else max(0, 3 - len(str(int(count))))
    return f"{count:,.{decimals}f} {unit}"
