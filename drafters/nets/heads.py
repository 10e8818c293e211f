"""Heads: residual blocks on a target state, rows of an LM head under a draft vocabulary, and what
drafters share that read with the target's own embedding.

Letters: D hidden width, K draft vocabulary, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.models.weights.copies import num_writes


class ResBlock(nn.Module):
    """x + SiLU(Wx + b) with W and b zero at first: a fresh block is the identity (Medusa)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class BorrowingDrafter(Drafter):
    """A trained drafter that reads tokens by the target's embedding."""

    module: nn.Module

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.borrowed: Borrowed | None = None
        self._is_fresh = True

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def head_width(self) -> int | None:
        return self.spec.hidden_size

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._is_fresh = False

    def embed(self, ids_X: Tensor) -> Tensor:
        """[X, D]: the target's embeddings."""
        assert self.borrowed is not None, "bind() the target's embedding first"
        rows_XD = F.embedding(ids_X, self.borrowed.embedding_VD)
        scale = self.borrowed.embed_scale
        return (rows_XD if scale == 1.0 else rows_XD * scale).to(self.dtype)

    def version(self) -> int:
        """Changes whenever a weight does."""
        return num_writes(self.module)


def draft_size(vocab: VocabMap | None, target_size: int) -> int:
    return target_size if vocab is None else vocab.size


def head_rows(borrowed: Borrowed, vocab: VocabMap | None) -> Tensor:
    """[K, D]: rows of the target's LM head that the draft vocabulary keeps."""
    if vocab is None:
        return borrowed.head_VD
    if vocab.is_prefix:  # a view: no copy of a large head
        return borrowed.head_VD[: vocab.size]
    return borrowed.head_VD[vocab.ids_K.to(borrowed.head_VD.device)]


def fitting_rows(embedding_VD: Tensor, size: int) -> Tensor:
    """An embedding of exactly `size` rows, for a vocabulary padded otherwise than the target's:
    surplus rows are never read; missing ones are read as the last."""
    rows = embedding_VD.shape[0]
    if rows == size:
        return embedding_VD
    if rows > size:
        return embedding_VD[:size].clone()
    return torch.cat([embedding_VD, embedding_VD[-1:].expand(size - rows, -1)])


def cut_rows(weight_KD: Tensor, old: VocabMap | None, new: VocabMap) -> Tensor:
    """Rows of a draft head for a smaller vocabulary; every kept id must be speakable now."""
    return weight_KD[kept_rows(old, new).to(weight_KD.device)].clone()


def kept_rows(old: VocabMap | None, new: VocabMap) -> Tensor:
    """Which rows of a draft head the ids of a smaller vocabulary have."""
    if old is None:
        return new.ids_K
    rows_K = old.to_draft()[new.ids_K.to(old.ids_K.device)]
    if bool((rows_K < 0).any()):
        raise IncompatibleError(
            "the new draft vocabulary keeps ids that the present one has already cut",
            found=f"{int((rows_K < 0).sum()):,} such ids",
            expected="a subset of the present draft vocabulary",
            do="trim from the untrimmed drafter",
        )
    return rows_K
