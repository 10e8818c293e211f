"""Stores: what drafters remember of token sequences.

`NgramStore` maps a key (token ids) to continuations (token ids) with weights: counts, probabilities
or nothing but recency. It is capped in bytes and per key, may be frozen, and is written as plain
tensors. `store_registry` says which rows share one.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specctl.core.errors import IntegrityError, RecipeError
from specctl.drafters.retrieval.store_registry import Guarded, Scope, StoreRegistry

Ids = tuple[int, ...]

KEY_BYTES, ENTRY_BYTES, ID_BYTES = 420, 180, 32  # what CPython takes, measured; ids are objects


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """`per_key` continuations of a key are kept: the newest ones if `newest_first`, else the
    heaviest. Above `max_bytes` the key that has gone unwritten for longest is dropped, whole."""

    max_bytes: int = 32 << 20
    per_key: int = 8
    newest_first: bool = False

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.per_key < 1:
            raise RecipeError(
                "a store of no size remembers nothing",
                found=f"max_bytes {self.max_bytes}, per_key {self.per_key}",
                expected="positive numbers",
                do="leave them out to take the defaults",
            )


@dataclass(frozen=True, slots=True)
class Continuation:
    ids: Ids
    weight: float


class NgramStore(Guarded):
    """Continuations of keys. Writers of several threads take turns; a frozen one ignores writes."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.is_frozen, self.num_bytes = False, 0
        self._of: OrderedDict[Ids, dict[Ids, float]] = OrderedDict()
        super().__init__()

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Ids) -> bool:
        return key in self._of

    def add(self, key: Ids, ids: Ids, weight: float = 1.0, fade: float = 1.0) -> None:
        """Add `weight` to a continuation of `key`, which becomes its newest; `fade` multiplies what
        the key's continuations weighed before (1: plain counting)."""
        self.update(key, ((ids, weight),), fade)

    def update(self, key: Ids, entries: Iterable[tuple[Ids, float]], fade: float = 1.0) -> None:
        """`add` for several continuations of one key at once; too many are dropped at the end."""
        if self.is_frozen:
            return
        with self._lock:
            found = self._of.get(key)
            if found is None:
                found = self._of[key] = {}
                self.num_bytes += KEY_BYTES + ID_BYTES * len(key)
            self._of.move_to_end(key)
            if fade != 1.0:
                for other in found:
                    found[other] *= fade
            for ids, weight in entries:
                before = found.pop(ids, None)
                found[ids] = weight + (before or 0.0)
                if before is None:
                    self.num_bytes += _entry_bytes(ids)
            if (excess := len(found) - self.limits.per_key) > 0:
                worst = found if self.limits.newest_first else sorted(found, key=found.__getitem__)
                for dropped in list(worst)[:excess]:
                    del found[dropped]
                    self.num_bytes -= _entry_bytes(dropped)
            self._shrink()

    def get(self, key: Ids) -> tuple[Continuation, ...]:
        """What followed the key, best first: heaviest (of equals the newest), or newest."""
        found = self._of.get(key)
        return () if found is None else tuple(self._ranked(found))

    def weights(self, key: Ids) -> Mapping[Ids, float]:
        """What followed the key and what it weighs, oldest first; to be read at once."""
        return self._of.get(key, {})

    def longest(self, tokens: Sequence[int], lengths: range) -> tuple[Continuation, ...]:
        """What followed the first of these suffix lengths of `tokens` that is a key."""
        size = len(tokens)
        for n in lengths:
            found = self._of.get(tuple(tokens[size - n :])) if n <= size else None
            if found is not None:
                return tuple(self._ranked(found))
        return ()

    def freeze(self) -> None:
        """From now on nothing is learned: drafts depend on their own row alone."""
        self.is_frozen = True

    def _ranked(self, found: dict[Ids, float]) -> list[Continuation]:
        newest = [Continuation(ids, weight) for ids, weight in reversed(found.items())]
        return newest if self.limits.newest_first else sorted(newest, key=lambda c: -c.weight)

    def _shrink(self) -> None:
        while self.num_bytes > self.limits.max_bytes and self._of:
            key, found = self._of.popitem(last=False)
            self.num_bytes -= KEY_BYTES + ID_BYTES * len(key) + sum(map(_entry_bytes, found))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The store as plain tensors, oldest key first: ids end to end, and where each run ends."""
        keys = list(self._of)
        entries = [(ids, weight) for key in keys for ids, weight in self._of[key].items()]
        sizes = np.array([len(self._of[key]) for key in keys], dtype=np.int64)
        columns = {
            "key_ids": np.array([i for key in keys for i in key], dtype=np.int32),
            "key_end": np.cumsum([len(key) for key in keys], dtype=np.int64),
            "entry_end": np.cumsum(sizes, dtype=np.int64),
            "ids": np.array([i for ids, _ in entries for i in ids], dtype=np.int32),
            "ids_end": np.cumsum([len(ids) for ids, _ in entries], dtype=np.int64),
            "weight": np.array([weight for _, weight in entries], dtype=np.float32),
        }
        return {prefix + name: torch.from_numpy(column) for name, column in columns.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], limits: StoreLimits | None = None, prefix: str = ""
    ) -> NgramStore:
        """What `tensors` wrote; anything that does not fit together is refused."""
        store = cls(limits)
        try:
            columns = {name: tensors[prefix + name].numpy() for name in cls().tensors()}
            keys = _runs(columns["key_ids"], columns["key_end"])
            entries = _runs(columns["ids"], columns["ids_end"])
            weights = columns["weight"].tolist()
            last = 0
            for key, end in zip(keys, columns["entry_end"].tolist(), strict=True):
                for ids, weight in zip(entries[last:end], weights[last:end], strict=True):
                    store.add(key, ids, weight)
                last = end
            if last != len(entries) or last != len(weights):
                raise ValueError(f"{len(entries)} continuations, {last} of them under a key")
        except (KeyError, ValueError, TypeError) as error:
            raise IntegrityError(
                "the store cannot be read",
                found=str(error)[:200],
                expected="tensors that a store has written",
                do="build the store again",
            ) from error
        return store


def _entry_bytes(ids: Ids) -> int:
    return ENTRY_BYTES + ID_BYTES * len(ids)


def _runs(ids: np.ndarray, end: np.ndarray) -> list[Ids]:
    """The runs that end at these ascending places and cover `ids`."""
    ends, flat = [0, *end.tolist()], ids.tolist()
    if ends != sorted(ends) or ends[-1] != len(flat):
        raise ValueError(f"runs that end at {ends[-3:]} of {len(flat)} ids")
    return [tuple(flat[a:b]) for a, b in itertools.pairwise(ends)]


class NgramStores(StoreRegistry[NgramStore]):
    """A registry of n-gram stores."""

    def __init__(
        self, scope: Scope, limits: StoreLimits | None = None, disk: NgramStore | None = None
    ) -> None:
        super().__init__(scope, partial(NgramStore, limits or StoreLimits()), disk)
