"""Random texts, and a training row of several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specctl.core.batch import TrainBatch


def random_text(length: int, seed: int = 0, vocab: int = 48) -> list[int]:
    """So many token ids below `vocab`."""
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab, (length,), generator=draw).tolist()
    return ids


def packed(*documents: Sequence[int]) -> TrainBatch:
    """One row of several documents, every token of which is learned from."""
    ids_1S = torch.tensor([[token for one in documents for token in one]])
    number_S = torch.cat([torch.full((len(one),), i) for i, one in enumerate(documents)])
    position_S = torch.cat([torch.arange(len(one)) for one in documents])
    mask_1S = torch.ones_like(ids_1S, dtype=torch.bool)
    return TrainBatch(ids_1S, mask_1S, number_S[None], position_S[None])
