"""LayerSkip's training (arXiv 2404.16710, section 4.1): a target that can be read early.

Every layer is an exit: the final norm and the LM head behind it. With L layers, of which l = 0 ..
L - 1 is one, a loss J of what an exit says, and C(t, l) 1 where the exit has a loss at step t,

    L(t) = sum_l w(t, l) J(exit l),   w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i),
    e(l) = scale (0 + 1 + .. + l) below the last layer,   e(L - 1) = L - 1 + scale (0 + .. + L - 2).

J is the loss that keeps the target near itself (`train.joint.keep`): KL to what the original says
behind all of its layers, or the paper's cross-entropy with the text. The last exit always has one;
of the others every R-th, which the paper takes in turn and which here is drawn, so that a resumed
run needs to know no step; or they join from the top down over the first half of the steps.

Layer l is left out of a row with probability dropout (2^(l / (L - 1)) - 1), drawn for each row: its
attention and MLP add nothing.
Letters: B rows, D hidden width, S sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.core.forward.sub_layers import SubLayers
from specctl.recipes.low_rank import EarlyExitPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import read

TEACHER = Needs(teacher=True, teacher_rows=True)
NOTHING = SubLayers((), ())


def exit_weights(num_layers: int, part: EarlyExitPart, on: set[int]) -> dict[int, float]:
    """w(t, l) by layer, of the exits `on` and of the last layer."""
    last = num_layers - 1
    plain = {layer: part.scale * layer * (layer + 1) / 2 for layer in on if layer < last}
    plain[last] = last + part.scale * last * (last - 1) / 2
    total = sum(plain.values())
    return {layer: weight / total for layer, weight in sorted(plain.items()) if weight > 0}


def exits_on(num_layers: int, part: EarlyExitPart, progress: float) -> set[int]:
    """The exits below the last layer that have a loss now. The first layer's weight is zero."""
    if part.every is not None:
        first = int(torch.randint(min(part.every, num_layers), ()))
        return set(range(first, num_layers - 1, part.every))
    joined = int(2 * num_layers * progress)  # layers, from the last one down
    return {layer for layer in range(num_layers - 1) if layer >= num_layers - 1 - joined}


def kept_layers(num_layers: int, part: EarlyExitPart) -> SubLayers:
    """The layers that run for one row."""
    growth = 2.0 ** (torch.arange(num_layers) / max(num_layers - 1, 1)) - 1
    kept = tuple((torch.rand(num_layers) >= part.dropout * growth).nonzero()[:, 0].tolist())
    return SubLayers(kept, kept)


def read_at_exits(
    target: Target, batch: TrainBatch, part: EarlyExitPart
) -> list[tuple[int, float, TrainBatch]]:
    """Layer, weight, and the batch as the target has read it up to there (its last state among the
    taps, what the teacher's logits are made of beside it), the last layer first."""
    num_layers = target.spec.num_layers
    weights = exit_weights(num_layers, part, exits_on(num_layers, part, batch.progress))
    below = tuple(layer + 1 for layer in weights if layer < num_layers - 1)
    needs = replace(TEACHER, taps=(*below, num_layers))
    if part.dropout:
        rows = [
            read(target, _row(batch, at), needs, kept_layers(num_layers, part))
            for at in range(len(batch.ids_BS))
        ]
        whole = _joined(batch, rows)
    else:
        whole = read(target, batch, needs)
    found = [(num_layers - 1, weights[num_layers - 1], whole)]
    for tap in below:
        behind = replace(TEACHER, taps=(num_layers,))
        seen = read(target, batch, behind, NOTHING, whole.taps[tap])
        found.append((tap - 1, weights[tap - 1], seen))
    return found


def _row(batch: TrainBatch, at: int) -> TrainBatch:
    here = slice(at, at + 1)
    return replace(
        batch,
        ids_BS=batch.ids_BS[here],
        loss_mask_BS=batch.loss_mask_BS[here],
        document_BS=batch.document_BS[here],
        position_BS=batch.position_BS[here],
    )


def _joined(batch: TrainBatch, rows: list[TrainBatch]) -> TrainBatch:
    """The rows' taps and what their logits are made of, as one batch."""
    taps = {tap: torch.cat([row.taps[tap] for row in rows]) for tap in rows[0].taps}
    heads = [row.teacher_rows for row in rows if row.teacher_rows is not None]
    logits = [row.teacher_BSV for row in rows if row.teacher_BSV is not None]
    return replace(
        batch,
        taps=taps,
        teacher_BSV=torch.cat(logits) if logits else None,
        teacher_rows=(
            replace(heads[0], state_RD=torch.cat([head.state_RD for head in heads]))
            if heads
            else None
        ),
    )
