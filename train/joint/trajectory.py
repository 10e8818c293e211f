"""Consistency LLMs (CLLM, arXiv 2403.00835): from any state of a Jacobi trajectory to its end.

Jacobi decoding guesses a window of n tokens and reads all of them at once, again and again, until
nothing changes: then they are the target's greedy answer y*. A trajectory is what the window held
on the way. The target learns to say behind any state y of it what it says behind y* (section 3.2.1,
global consistency):

    L = L_own + w  mean_t KL( sg p'(. | x, y*_<t) || p'(. | x, y_<t) )

over the places t behind the first that differs; before it both sides read the same. L_own keeps the
target near itself (`train.joint.keep`). The paper mines trajectories beforehand, from the target
that is to learn, and takes one state of each. Here they are run in the training step, by the target
as it was: one window of every document starts as random tokens of what stands before, and takes a
random number of Jacobi iterations, `most` at most. After as many as the window has tokens it has
arrived at the answer, so that `most` = `window` draws from whole trajectories, at as many readings
of the batch a step.
Rows have to hold greedy answers (`data.greedy_share: 1`): of other text the window is no fixed
point, and the loss then is that of wrong guesses alone.
Letters: B rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.recipes.low_rank import TrajectoryPart
from specctl.train.joint.noise import earlier_tokens

# of ids [B, S] and flat places [Q]: [Q], the most probable token behind each
Reading = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TrajectoryState:
    """`ids_BS` with the windows as a trajectory held them, and the places that then learn."""

    ids_BS: Tensor
    learns_BS: Tensor


@torch.no_grad()
def trajectory_state(batch: TrainBatch, part: TrajectoryPart, read: Reading) -> TrajectoryState:
    """One window of every document that has room for one, after some iterations."""
    inside_BS, first_BS = windows(batch, part.window)
    state_BS = torch.where(inside_BS, earlier_tokens(batch, first_BS), batch.ids_BS)
    count_B = torch.randint(0, part.most + 1, (len(state_BS),), device=state_BS.device)
    for step in range(part.most):
        moves_Q = (inside_BS & (count_B > step)[:, None]).flatten().nonzero()[:, 0]
        if len(moves_Q):  # what stands before a place says what it holds next
            state_BS = state_BS.flatten().index_copy(0, moves_Q, read(state_BS, moves_Q - 1))
            state_BS = state_BS.view_as(batch.ids_BS)
    differs_BS = inside_BS & (state_BS != batch.ids_BS)
    return TrajectoryState(state_BS, inside_BS & _behind_first(differs_BS, batch.document_BS))


def windows(batch: TrainBatch, size: int) -> tuple[Tensor, Tensor]:
    """Bool [B, S], inside a window of `size` tokens, one in each document, drawn from those of
    which every token is to be predicted; and [B, S], the position at which the document's window
    starts (1 where it has none)."""
    inside_BS = torch.zeros_like(batch.loss_mask_BS)
    first_BS = torch.ones_like(batch.position_BS)
    for row in range(len(inside_BS)):
        document_S, wanted_S = batch.document_BS[row], batch.loss_mask_BS[row]
        for document in sorted(set(document_S.tolist()) - {-1}):
            is_own_S = (document_S == document) & wanted_S & (batch.position_BS[row] > 0)
            starts = is_own_S.unfold(0, size, 1).all(-1).nonzero()[:, 0]
            if len(starts) == 0:
                continue
            at = int(starts[int(torch.randint(len(starts), ()))])
            inside_BS[row, at : at + size] = True
            first_BS[row, document_S == document] = batch.position_BS[row, at]
    return inside_BS, first_BS


def _behind_first(differs_BS: Tensor, document_BS: Tensor) -> Tensor:
    """Bool [B, S]: some earlier place of the same document differs."""
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    earlier_SS = torch.ones_like(same_BSS[0]).tril(-1)
    return (same_BSS & earlier_SS & differs_BS[:, None, :]).any(-1)
