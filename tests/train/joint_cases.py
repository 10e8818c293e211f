"""Drafters, rows and steps for tests of joint training, on random targets.

Loaded by path (tests are no package). B rows, S sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specctl.drafters import families
from specctl.drafters.parts.base import Drafter
from specctl.drafters.parts.batch import TrainBatch
from specctl.recipes.low_rank import JointPart
from specctl.runtime.target import Target
from specctl.train.joint import Joint

AT_ONCE = JointPart(rank=4, warmup=0.0, weight=1.0)
VOCAB = 24


def rows(seed: int = 1, vocab: int = VOCAB) -> TrainBatch:
    """Four rows of random text, to be predicted from the third token on."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, vocab, (4, 20), generator=generator)
    at_BS = torch.arange(20).expand(4, 20)
    return TrainBatch(ids_BS, at_BS >= 2, torch.zeros_like(ids_BS), at_BS)


def make(target: Target, name: str = "medusa", **options: Any) -> Drafter:
    torch.manual_seed(3)
    drafter = families()[name].build(families()[name].options(**options), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    return drafter


def steps(joint: Joint, number: int, rate: float = 1e-2, progress: float = 0.5) -> None:
    """Adam steps on the same rows."""
    optimizer = torch.optim.Adam(joint.trainable().values(), lr=rate)
    for _ in range(number):
        optimizer.zero_grad()
        out = joint.loss(replace(rows(), progress=progress))
        (out.sum / out.count).backward()
        optimizer.step()


def logits(target: Target, batch: TrainBatch) -> Tensor:
    masks = target.lm.document_masks(batch.document_BS)
    with torch.no_grad():
        found = target.lm.dense(batch.ids_BS, batch.position_BS, masks).logits_BTV
    assert found is not None
    return found


def perturb(joint: Joint, size: float = 0.05) -> None:
    with torch.no_grad():
        for name, factor in joint.trainable().items():
            if name.startswith("target."):
                factor.add_(size * torch.randn_like(factor))
