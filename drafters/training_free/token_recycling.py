"""Token Recycling (arXiv 2408.08696): draft a tree from the target's own discarded candidates.

A matrix holds, for each token, the target's newest top-k continuations of it. Every token fed to
the target, accepted or not, refreshes its row; the draft reads the matrix breadth first along a
fixed template of ranks. The paper's matrix is one for all requests, so that one's text warms the
next: that is scope process. By default each request has its own; rows that share one otherwise
(a conversation) read what those before them had learned when they ended.

While a row lives, its matrix is a page of `Pages`, read and written in a few tensor operations for
all rows at once. Between rows it is a `RecycledStore`, which holds only the tokens that came up and
is shared as the scope allows.
Letters: B rows, C candidates (ranks per token), M new nodes, N nodes, R flat rows, T fed tokens, V
target vocabulary, Z slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Drafter,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
)
from specctl.core.errors import FileError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, empty_tree, fitted
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import OneOf, Options, Within, check_rank_chances
from specctl.drafters.retrieval.store_registry import Guarded, Scope, StoredState, StoreRegistry
from specctl.drafters.states.template import Template, best_paths, compile_template

TEMPLATE_NODES = 80


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions(Options):
    """`chances[r]`: how often the token of rank r is the next one; shapes the template tree and
    sets how many ranks are remembered. `max_depth` levels at most. `scope` says whose matrix may
    help whom; of scope disk, or with `freeze`, nothing is learned (needs a warm matrix). `max_mib`
    caps what is kept of each conversation, or of the process, between its rows."""

    chances: tuple[float, ...] = (0.5, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
    max_depth: int = 6
    freeze: bool = False
    scope: Annotated[str, OneOf(tuple(Scope))] = Scope.REQUEST
    max_mib: Annotated[int, Within(most=1_000_000)] = 32

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_rank_chances(self.chances)


class TokenRecycling(Drafter):
    """No weights; `matrix_VC` is an optional warm start, the one tensor a package may hold."""

    family = "token-recycling"
    holds_data = True

    def __init__(
        self, options: TokenRecyclingOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.matrix_VC: Tensor | None = None
        new = partial(RecycledStore, self.needs().topk, options.max_mib << 20)
        self.registry = StoreRegistry(Scope(options.scope), new)

    @property
    def is_frozen(self) -> bool:
        return self.options.freeze or self.registry.scope is Scope.DISK

    def needs(self) -> Needs:
        return Needs(topk=min(len(self.options.chances), self.spec.vocab_size))

    def open(self, space: Space) -> TokenRecyclingState:
        if self.is_frozen and self.matrix_VC is None:
            raise RecipeError(
                "a frozen token-recycling drafter knows nothing yet",
                where="drafter.options." + ("freeze" if self.options.freeze else "scope"),
                expected="a warm matrix",
                do="take scope request without freeze, or load a package that holds a warm matrix",
            )
        return TokenRecyclingState(self, space)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Start from what followed each token in these texts, the commonest first."""
        matrix_VC = followers(texts, self.spec.vocab_size, self.needs().topk)
        self.load_tensors({"matrix": matrix_VC})

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.matrix_VC is None else {"matrix": self.matrix_VC}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        V, C = self.spec.vocab_size, self.needs().topk
        for name, tensor in tensors.items():
            if name != "matrix" or tuple(tensor.shape) != (V, C):
                raise FileError(
                    "this is no token-recycling matrix",
                    found=f"{name} {tuple(tensor.shape)}",
                    expected=f"matrix {(V, C)}",
                    do="use a package made for this target",
                )
            self.matrix_VC = tensor.to(torch.int32)
            self.registry.disk = RecycledStore.of(self.matrix_VC)


class TokenRecyclingState(StoredState):
    """The matrices of one engine's rows: a page each, or one for all where the scope says so."""

    def __init__(self, drafter: TokenRecycling, space: Space) -> None:
        self.options, self.device, self.registry = drafter.options, space.device, drafter.registry
        self.is_frozen = drafter.is_frozen
        self.is_one = self.is_frozen or self.registry.scope is Scope.PROCESS
        self.keeps = not self.is_frozen and self.registry.scope is not Scope.REQUEST
        self.V, self.C = drafter.spec.vocab_size, drafter.needs().topk
        num_pages = 1 if self.is_one else space.num_slots
        self.pages = Pages(num_pages, self.V, self.C, space.device)
        page_Z = torch.arange(space.num_slots, device=space.device) % num_pages
        self.first_Z1 = (page_Z * (self.V + 1))[:, None]  # a slot's first cell
        self.first_rank_Z1 = self.first_Z1 * self.C
        self.stores = self.registry.rows(space.identity, space.num_slots)
        self._live: set[int] = set()
        chances = (self.options.chances[: self.C],) * self.options.max_depth
        self.paths = best_paths(chances, max(TEMPLATE_NODES, space.max_nodes))
        self._templates: dict[tuple[int, int], Template] = {}

    def snapshot(self, slot: int = 0) -> Tensor:
        """[V, C] int32: what a slot's matrix holds, to be handed to a drafter of this target."""
        return self.pages.best_ZVC[self._page(slot), : self.V].clone()

    def _page(self, slot: int) -> int:
        return 0 if self.is_one else slot

    def _known(self, slot: int) -> list[RecycledStore]:
        """What the slot's row may read: the warm matrix, and what its scope has learned."""
        store, warm = self.stores.at(slot), self.registry.disk
        return [store] if warm is None or warm is store else [warm, store]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del tokens, taps  # the prompt brings no top-k
        self.stores.start(slot)
        if not (self.is_one and self._live):
            self.pages.begin(self._page(slot), self._known(slot))
        self._live.add(slot)

    def end(self, slot: int) -> None:
        if slot in self._live and self.keeps:
            self.stores.at(slot).update(*self.pages.learned(self._page(slot)))
        self._live.discard(slot)
        super().end(slot)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        template = self._template(budget)
        if not template.levels:
            return empty_tree(len(view.slots), self.device)
        flat = self.pages.best_ZVC.view(-1)
        rank_BN = template.rank_N + self.first_rank_Z1[view.slot_B]
        parent_BM = view.root_B[:, None]
        levels: list[Tensor] = []
        for first, last in template.levels:
            if levels:
                before = template.levels[len(levels) - 1][0]
                parent_BM = levels[-1][:, template.parent_N[first:last] - before]
            levels.append(flat[parent_BM * self.C + rank_BN[:, first:last]].long())
        token_BN = torch.cat(levels, dim=1)
        valid_BN = token_BN < self.V
        return fitted(template.point_tree(token_BN.masked_fill(~valid_BN, 0), valid_BN))

    def _template(self, budget: Budget) -> Template:
        key = budget.nodes, budget.depth
        if key not in self._templates:
            self._templates[key] = compile_template(self.paths, *key, self.device)
        return self._templates[key]

    def observe(self, outcome: Outcome) -> None:
        if self.is_frozen or outcome.topk_BTC is None:
            return
        tree = outcome.tree
        fed_BT = tree.fed_token_BT(outcome.view.root_B)
        if tree.num_nodes:
            fed_BT = fed_BT.masked_fill(~tree.fed_valid_BT(), self.V)
        cell_BT = fed_BT + self.first_Z1[outcome.view.slot_B]
        self.pages.write(cell_BT.flatten(), outcome.topk_BTC.flatten(0, 1))


ID_BYTES, RANK_BYTES = 8, 4
UNWRITTEN = -1


class RecycledStore(Guarded):
    """The best `num_ranks` continuations of the tokens that came up, the least recently written
    first; above `max_bytes` those are dropped. Writers of several threads take turns."""

    def __init__(self, num_ranks: int, max_bytes: int) -> None:
        self.token_R = torch.zeros(0, dtype=torch.long)
        self.best_RC = torch.zeros(0, num_ranks, dtype=torch.int32)
        self.most = max(max_bytes // (ID_BYTES + RANK_BYTES * num_ranks), 1)
        self.is_frozen = False
        super().__init__()

    @classmethod
    def of(cls, best_VC: Tensor) -> RecycledStore:
        """A store of a whole matrix."""
        store = cls(best_VC.shape[1], best_VC.shape[0] * (ID_BYTES + RANK_BYTES * best_VC.shape[1]))
        store.update(torch.arange(len(best_VC)), best_VC)
        return store

    def __len__(self) -> int:
        return len(self.token_R)

    def update(self, token_R: Tensor, best_RC: Tensor) -> None:
        """These tokens' continuations are now those; a frozen store ignores it."""
        if self.is_frozen:
            return
        token_R, best_RC = token_R.cpu(), best_RC.cpu()
        with self._lock:
            stays_R = ~torch.isin(self.token_R, token_R)
            self.token_R = torch.cat([self.token_R[stays_R], token_R])[-self.most :]
            self.best_RC = torch.cat([self.best_RC[stays_R], best_RC])[-self.most :]

    def read(self) -> tuple[Tensor, Tensor]:
        """Tokens [R] and their continuations [R, C], of one moment."""
        with self._lock:
            return self.token_R, self.best_RC

    def freeze(self) -> None:
        """From now on nothing is learned."""
        self.is_frozen = True


class Pages:
    """Matrices of the live rows, [Z, V + 1, C] int32. Unwritten entries hold the number V, which is
    also the index of an extra row that stays unwritten: so missing tokens have missing children.
    A cell is a row of all pages end to end. They are laid out when they are first read or written:
    filling them takes as long as some rounds of a small target, and a row that nobody drafts for
    needs none. One writer: the DraftState that owns it."""

    def __init__(self, num_pages: int, vocab_size: int, ranks: int, device: torch.device) -> None:
        self.V, self.C, self.device = vocab_size, ranks, device
        self.shape = (num_pages, vocab_size + 1, ranks)
        self._begun: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by page, not yet laid out
        self._laid: tuple[Tensor, Tensor] | None = None

    def begin(self, page: int, known: Iterable[RecycledStore]) -> None:
        """Forget the page, then read those stores, as they are now, into it, the later over the
        earlier."""
        self._begun[page] = [store.read() for store in known]

    @property
    def is_laid_out(self) -> bool:
        return self._laid is not None

    @property
    def best_ZVC(self) -> Tensor:
        return self._matrices()[0]

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """What follows every token, and when that was written, pages begun included."""
        if self._laid is None:
            best_ZVC = torch.full(self.shape, self.V, dtype=torch.int32, device=self.device)
            newest_ZV = torch.full(self.shape[:2], UNWRITTEN, device=self.device)
        elif self._begun:
            best_ZVC, newest_ZV = self._laid
            for page in self._begun:
                best_ZVC[page] = self.V
                newest_ZV[page] = UNWRITTEN
        else:
            return self._laid
        for page, stores in self._begun.items():
            for token_R, best_RC in stores:
                best_ZVC[page, token_R.to(self.device)] = best_RC.to(self.device)
        self._begun.clear()
        self._laid = best_ZVC, newest_ZV
        return self._laid

    def learned(self, page: int) -> tuple[Tensor, Tensor]:
        """Tokens written since the page began or was last asked this, and their continuations."""
        if page in self._begun:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, self.C, dtype=torch.int32)
        best_ZVC, newest_ZV = self._matrices()
        newest_V = newest_ZV[page, : self.V]
        token_R = (newest_V != UNWRITTEN).nonzero()[:, 0]
        newest_V.fill_(UNWRITTEN)
        return token_R, best_ZVC[page, token_R]

    def write(self, cell_R: Tensor, best_RC: Tensor) -> None:
        """Overwrite cells; of equal ones the last wins, and row V of a page stays unwritten."""
        best_ZVC, newest_ZV = self._matrices()
        order_R = torch.arange(cell_R.numel(), device=cell_R.device)
        newest_R = newest_ZV.view(-1)
        newest_R.scatter_reduce_(0, cell_R, order_R, "amax", include_self=False)
        newest_RC = best_RC[newest_R[cell_R]].to(torch.int32)
        best_ZVC.view(-1, self.C)[cell_R] = newest_RC
        best_ZVC[:, self.V] = self.V


def followers(texts: Iterable[Sequence[int]], vocab_size: int, ranks: int) -> Tensor:
    """[V, C] int32: what followed each token in those texts, the commonest first."""
    pairs = [np.asarray(t[:-1]) * vocab_size + np.asarray(t[1:]) for t in texts if len(t) > 1]
    best_VC = torch.full((vocab_size, ranks), vocab_size, dtype=torch.int32)
    if not pairs:
        return best_VC
    code_R, count_R = np.unique(np.concatenate(pairs), return_counts=True)
    code_R = code_R[np.lexsort((-count_R, code_R // vocab_size))]
    token_R, next_R = np.divmod(code_R, vocab_size)
    rank_R = np.arange(len(token_R)) - np.searchsorted(token_R, token_R)
    is_kept_R = rank_R < ranks
    at = torch.from_numpy(token_R[is_kept_R]), torch.from_numpy(rank_R[is_kept_R])
    best_VC[at] = torch.from_numpy(next_R[is_kept_R].astype(np.int32))
    return best_VC


FAMILY = Family(
    name="token-recycling",
    summary=(
        "No training: remembers which tokens the target ranked highest after each token it has "
        "read, accepted or rejected, and drafts a tree from that memory. Learns while it runs, so "
        "the first hundred tokens gain little; helps a bit on nearly every text."
    ),
    paper="https://arxiv.org/abs/2408.08696",
    options=TokenRecyclingOptions,
    build=TokenRecycling,
    trainable=False,
    policies=("direct",),
)
