"""Drafters, rows and steps for tests of joint training, on random targets.

Loaded by path (tests are no package). B rows, S sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.drafters import families
from specctl.recipes.low_rank import JointPart
from specctl.runtime.target.target import Target
from specctl.train.joint.joint import JointModel

AT_ONCE = JointPart(rank=4, warmup=0.0, weight=1.0)
VOCAB = 24


def rows(seed: int = 1, vocab: int = VOCAB) -> TrainBatch:
    """Four rows of text whose next token mostly follows from the last one, to be predicted from the
    third token on."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, vocab, (4, 20), generator=generator)
    is_free_BS = torch.rand(4, 20, generator=generator) < 0.15
    for t in range(1, 20):
        follows_B = (5 * ids_BS[:, t - 1] + 1) % vocab
        ids_BS[:, t] = torch.where(is_free_BS[:, t], ids_BS[:, t], follows_B)
    at_BS = torch.arange(20).expand(4, 20)
    return TrainBatch(ids_BS, at_BS >= 2, torch.zeros_like(ids_BS), at_BS)


def make(target: Target, name: str = "medusa", **options: Any) -> Drafter:
    torch.manual_seed(3)
    drafter = families()[name].build(families()[name].options(**options), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def steps(joint: JointModel, number: int, progress: float = 0.5) -> None:
    """Adam steps on four batches in turn, which `rows(7)` is none of."""
    optimizer = torch.optim.Adam(joint.trainable().values(), lr=5e-3)
    for step in range(number):
        optimizer.zero_grad()
        out = joint.loss(replace(rows(100 + step % 4), progress=progress))
        (out.sum / out.count).backward()
        optimizer.step()


def logits(target: Target, batch: TrainBatch) -> Tensor:
    masks = target.lm.document_masks(batch.document_BS)
    with torch.no_grad():
        found = target.lm.dense(batch.ids_BS, batch.position_BS, masks).logits_BTV
    assert found is not None
    return found


def perturb(joint: JointModel, size: float = 0.05) -> None:
    with torch.no_grad():
        for name, factor in joint.trainable().items():
            if name.startswith("target."):
                factor.add_(size * torch.randn_like(factor))
