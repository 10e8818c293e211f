"""TrainBatch and LossOut: what a drafter trains on and what its loss returns.

Letters: B rows, S sequence, D width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One packed batch, all tensors on one device.

    ids_BS        token ids                     loss_mask_BS  True: this token is to be predicted
    document_BS   document number, -1 padding   position_BS   position inside the document
    taps          hidden_states index -> [B, S, D] features of the frozen target
    teacher_BSV   target logits (raw, before any temperature) or None
    """

    ids_BS: Tensor
    loss_mask_BS: Tensor
    document_BS: Tensor
    position_BS: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    teacher_BSV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOut:
    """A loss as a sum with its count; the loop divides once over all ranks and micro-batches.

    `metrics` maps a name to (sum, count), reduced in the same way, never part of the gradient.
    """

    sum: Tensor
    count: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
