"""Recycled tokens: what the target ranked highest after each token, remembered between rows.

While a row lives, its memory is a page of `Pages`: a matrix that is read and written in a few
tensor operations for all rows at once. Between rows it is a `RecycledStore`, which holds only the
tokens that came up, and which a `Room` gives to whom the scope allows.
Letters: F tokens, V target vocabulary, R ranks per token, P pages, W = V + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from specctl.drafters.retrieval.store_registry import Guarded

ID_BYTES, RANK_BYTES = 8, 4
UNWRITTEN = -1


class RecycledStore(Guarded):
    """The best `num_ranks` continuations of the tokens that came up, the least recently written
    first; above `max_bytes` those are dropped. Writers of several threads take turns."""

    def __init__(self, num_ranks: int, max_bytes: int) -> None:
        self.token_F = torch.zeros(0, dtype=torch.long)
        self.best_FR = torch.zeros(0, num_ranks, dtype=torch.int32)
        self.most = max(max_bytes // (ID_BYTES + RANK_BYTES * num_ranks), 1)
        self.is_frozen = False
        super().__init__()

    @classmethod
    def of(cls, best_VR: Tensor) -> RecycledStore:
        """A store of a whole matrix."""
        store = cls(best_VR.shape[1], best_VR.shape[0] * (ID_BYTES + RANK_BYTES * best_VR.shape[1]))
        store.update(torch.arange(len(best_VR)), best_VR)
        return store

    def __len__(self) -> int:
        return len(self.token_F)

    def update(self, token_F: Tensor, best_FR: Tensor) -> None:
        """These tokens' continuations are now those; a frozen store ignores it."""
        if self.is_frozen:
            return
        token_F, best_FR = token_F.cpu(), best_FR.cpu()
        with self._lock:
            stays_F = ~torch.isin(self.token_F, token_F)
            self.token_F = torch.cat([self.token_F[stays_F], token_F])[-self.most :]
            self.best_FR = torch.cat([self.best_FR[stays_F], best_FR])[-self.most :]

    def read(self) -> tuple[Tensor, Tensor]:
        """Tokens [F] and their continuations [F, R], of one moment."""
        with self._lock:
            return self.token_F, self.best_FR

    def freeze(self) -> None:
        """From now on nothing is learned."""
        self.is_frozen = True


class Pages:
    """Matrices of the live rows, [P, W, R] int32. Unwritten entries hold the number V, which is
    also the index of an extra row that stays unwritten: so missing tokens have missing children.
    A cell is a row of all pages end to end. One writer: the DraftState that owns it."""

    def __init__(self, num_pages: int, vocab_size: int, ranks: int, device: torch.device) -> None:
        self.V, self.W, self.R = vocab_size, vocab_size + 1, ranks
        shape = (num_pages, self.W, ranks)
        self.best_PWR = torch.full(shape, self.V, dtype=torch.int32, device=device)
        self._newest_PW = torch.full((num_pages, self.W), UNWRITTEN, device=device)

    def begin(self, page: int, known: Iterable[RecycledStore]) -> None:
        """Forget the page, then read those stores into it, the later over the earlier."""
        best_WR = self.best_PWR[page]
        best_WR.fill_(self.V)
        for store in known:
            token_F, best_FR = (x.to(best_WR.device) for x in store.read())
            best_WR[token_F] = best_FR
        self._newest_PW[page] = UNWRITTEN

    def learned(self, page: int) -> tuple[Tensor, Tensor]:
        """Tokens written since the page began or was last asked this, and their continuations."""
        newest_V = self._newest_PW[page, : self.V]
        token_F = (newest_V != UNWRITTEN).nonzero()[:, 0]
        newest_V.fill_(UNWRITTEN)
        return token_F, self.best_PWR[page, token_F]

    def write(self, cell_F: Tensor, best_FR: Tensor) -> None:
        """Overwrite cells; of equal ones the last wins, and row V of a page stays unwritten."""
        order_F = torch.arange(cell_F.numel(), device=cell_F.device)
        newest_C = self._newest_PW.view(-1)
        newest_C.scatter_reduce_(0, cell_F, order_F, "amax", include_self=False)
        newest_FR = best_FR[newest_C[cell_F]].to(torch.int32)
        self.best_PWR.view(-1, self.R)[cell_F] = newest_FR
        self.best_PWR[:, self.V] = self.V


def followers(texts: Iterable[Sequence[int]], vocab_size: int, ranks: int) -> Tensor:
    """[V, R] int32: what followed each token in those texts, the commonest first."""
    pairs = [np.asarray(t[:-1]) * vocab_size + np.asarray(t[1:]) for t in texts if len(t) > 1]
    best_VR = torch.full((vocab_size, ranks), vocab_size, dtype=torch.int32)
    if not pairs:
        return best_VR
    code_M, count_M = np.unique(np.concatenate(pairs), return_counts=True)
    code_M = code_M[np.lexsort((-count_M, code_M // vocab_size))]
    token_M, next_M = np.divmod(code_M, vocab_size)
    rank_M = np.arange(len(token_M)) - np.searchsorted(token_M, token_M)
    is_kept_M = rank_M < ranks
    at = torch.from_numpy(token_M[is_kept_M]), torch.from_numpy(rank_M[is_kept_M])
    best_VR[at] = torch.from_numpy(next_M[is_kept_M].astype(np.int32))
    return best_VR
