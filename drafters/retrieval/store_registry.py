"""StoreRegistry: which rows share a store.

A `StoreRegistry` belongs to a Drafter; its `Scope` says who shares a store:

    request       a row learns from itself alone; forgotten when the row ends (the default)
    conversation  rows of one `Request.conversation` share; a row without one is alone
    process       every row that this drafter ever serves shares: only for text that is no secret
    disk          read from what the drafter was loaded with; never written

A row therefore drafts the same whatever stands beside it in the batch, unless the scope is process.
Stores of different tokenizers or targets never mix: they are found by `Identity`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from specctl.core.drafter import DraftState
from specctl.core.errors import RecipeError
from specctl.core.spec import Identity

MAX_CONVERSATIONS = 256


class Scope(StrEnum):
    """Whose text may help whom."""

    REQUEST = "request"
    CONVERSATION = "conversation"
    PROCESS = "process"
    DISK = "disk"


class Guarded:
    """Holds a lock, which a copy makes anew."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = Lock()


class Store(Protocol):
    """What a registry keeps."""

    def freeze(self) -> None: ...


S = TypeVar("S", bound=Store)


class StoreRegistry(Guarded, Generic[S]):
    """The stores of one Drafter, for all engines that it serves; `new` makes an empty one. At most
    `most` conversations are kept."""

    def __init__(
        self,
        scope: Scope,
        new: Callable[[], S],
        disk: S | None = None,
        most: int = MAX_CONVERSATIONS,
    ) -> None:
        self.scope, self.disk, self._new, self.most = Scope(scope), disk, new, most
        self._shared: OrderedDict[tuple[Identity | None, str | None], S] = OrderedDict()
        super().__init__()

    def rows(self, identity: Identity | None, num_slots: int) -> RowStores[S]:
        """The stores of one engine's rows."""
        return RowStores(self, identity, num_slots)

    def store(self, identity: Identity | None, conversation: str | None) -> S:
        """The store of a row that begins. Of conversations the least recently begun are dropped."""
        if self.scope is Scope.DISK:
            if self.disk is None:
                raise RecipeError(
                    "a store of scope disk was not loaded with anything",
                    where="drafter.options.scope",
                    expected="a package that holds a store",
                    do="take scope request, or give the package that holds the store",
                )
            self.disk.freeze()
            return self.disk
        is_alone = self.scope is Scope.CONVERSATION and conversation is None
        if self.scope is Scope.REQUEST or is_alone:
            return self._new()
        key = (identity, conversation if self.scope is Scope.CONVERSATION else None)
        with self._lock:
            store = self._shared.setdefault(key, self._new())
            self._shared.move_to_end(key)
            while len(self._shared) > self.most:
                self._shared.popitem(last=False)
        return store

    def clear(self) -> None:
        """Forget all that rows have shared."""
        with self._lock:
            self._shared.clear()


class RowStores(Generic[S]):
    """Which store each slot reads and writes. One writer: the DraftState that owns it."""

    def __init__(
        self, registry: StoreRegistry[S], identity: Identity | None, num_slots: int
    ) -> None:
        self.registry, self.identity = registry, identity
        self._conversation: list[str | None] = [None] * num_slots
        self._store: list[S | None] = [None] * num_slots

    def join(self, slot: int, conversation: str | None) -> None:
        """The conversation of the row that is about to start in the slot."""
        self._conversation[slot] = conversation

    def start(self, slot: int) -> S:
        """A row starts: its store, which is a new one unless the scope shares it."""
        store = self.registry.store(self.identity, self._conversation[slot])
        self._store[slot], self._conversation[slot] = store, None
        return store

    def at(self, slot: int) -> S:
        store = self._store[slot]
        assert store is not None, f"no row has started in slot {slot}"
        return store

    def end(self, slot: int) -> None:
        self._store[slot] = None


class StoredState(DraftState):
    """A DraftState whose rows read and write the stores of a registry."""

    stores: RowStores[Any]

    def join(self, slot: int, conversation: str | None) -> None:
        self.stores.join(slot, conversation)

    def end(self, slot: int) -> None:
        self.stores.end(slot)
