"""What the sources of a run are and which share of its data each has, before they are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.recipes.schema import DataPart
from specctl.train.data.sources import find_source, names_of

BYTES_PER_TOKEN = 4
UNKNOWN_TOKENS = 10_000_000  # of a source whose size is not known


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source of data: what it is in words, its bytes on disk, and its share of those of all
    sources; None where they are not known."""

    name: str
    what: str
    bytes: int | None
    share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def source_shares(part: DataPart) -> tuple[SourceShare, ...]:
    """Every source of the data, in order. Nothing is asked of the hub."""
    found = [(name, *_size(part, name)) for name in names_of(part.source)]
    sizes = [size for _, _, size in found]
    whole = 0 if None in sizes else sum(size or 0 for size in sizes)
    return tuple(
        SourceShare(name, what, size, None if not whole or size is None else size / whole)
        for name, what, size in found
    )


def _size(part: DataPart, name: str) -> tuple[str, int | None]:
    try:
        source = find_source(name, part.format, part.split)
        return source.what, source.bytes
    except (SpecctlError, OSError):
        return "not here yet", None


def tokens_in(part: DataPart) -> int:
    """About how many tokens the sources hold."""
    sizes = [share.bytes for share in source_shares(part)]
    return sum(UNKNOWN_TOKENS if size is None else size // BYTES_PER_TOKEN for size in sizes)
