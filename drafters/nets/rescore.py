"""Rescoring: independent heads put in the light of the tokens before (arXiv 2404.09221).

Heads that predict at once cannot agree: their best tokens repeat each other or do not fit together.
A small model r of the text, which costs next to nothing, mends that: among the `top` tokens of a
head the score becomes log q(v) + weight * log r(v | tokens before). Grown as a chain this is the
paper's local rescoring, by beams over the lattice of all heads' best tokens its global one. Since
the result is what a policy draws from and reports, nothing changes for verification.
Letters: B rows, C candidates, K draft vocabulary, M new nodes, W window, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.core.vocab import VocabMap

NONE = -1  # before the first token of a text


class Rescorer(Protocol):
    """A small model of text. `reach`: how many tokens it looks back."""

    @property
    def reach(self) -> int: ...

    def score(self, context_XW: Tensor, ids_XC: Tensor, rows_XC: Tensor) -> Tensor:
        """[X, C]: log r of candidates, by target id and by draft row, after the context (oldest
        first, NONE where there is none)."""


@dataclass(frozen=True, slots=True)
class Rescoring:
    rescorer: Rescorer
    top: int
    weight: float
    vocab: VocabMap | None

    def __call__(self, logits_XK: Tensor, context_XW: Tensor) -> Tensor:
        """[X, K]: the new scores of the best tokens, -inf elsewhere."""
        logq_XK = logits_XK.float().log_softmax(-1)
        best = logq_XK.topk(min(self.top, logq_XK.shape[-1]), dim=-1)
        ids_XC = best.indices if self.vocab is None else self.vocab.ids_K[best.indices]
        logr_XC = self.rescorer.score(context_XW, ids_XC, best.indices)
        score_XC = best.values + self.weight * logr_XC
        return torch.full_like(logq_XK, -torch.inf).scatter(-1, best.indices, score_XC)


def last_tokens(view: RoundView, count: int) -> Tensor:
    """[B, count]: the last tokens of each text, the root at the end."""
    rows = [list(text[-count:]) for text in view.tokens]
    padded = [[NONE] * (count - len(row)) + row for row in rows]
    return torch.tensor(padded, device=view.root_B.device)


def extended(every_BXW: Tensor, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
    """[B, M, W]: contexts of new nodes, whose parents' stand in `every` (the root's first)."""
    at_BM1 = (parent_BM + 1)[:, :, None]
    before_BMW = every_BXW.gather(1, at_BM1.expand(-1, -1, every_BXW.shape[-1]))
    return torch.cat([before_BMW[..., 1:], token_BM[:, :, None]], dim=-1)
