"""Drafters that look at the target through cross-attention: what each depth may see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specctl.core.batch import TrainBatch


def check_no_depth_sees_a_feature_behind_its_anchor(drafter: Any, batch: TrainBatch) -> None:
    """Features from row 5 on change: drafts that begin behind row 4 or before stay as they are,
    however deep; the one behind row 5 does not."""
    for parameter in drafter.trainable().values():  # branches that are zero hide leaks
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    later = {tap: x.clone() for tap, x in batch.taps.items()}
    for x in later.values():
        x[:, 5:] += torch.randn(x.shape[-1])
    changed = replace(batch, taps=later)
    with torch.no_grad():
        for old, new in zip(drafter.unroll(batch), drafter.unroll(changed), strict=True):
            torch.testing.assert_close(old[:, :5], new[:, :5])
            assert not torch.allclose(old[:, 5], new[:, 5])
