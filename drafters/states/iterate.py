"""Iterate: the target's newest guess of the tokens that come next, refreshed by every round.

One Jacobi step of y_i = argmax p(. | x, y_<i) is one forward over the root and the guesses behind
it: the guesses that agree are final, and the argmax at every fed token, accepted or not, is the
next guess of the position after it (arXiv 2305.10427, eq. 4). Whatever drafts a chain of such
guesses keeps them here.
Letters: B rows, C candidates, N nodes, P path, T fed tokens, W window (guesses), Z slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space
from specctl.core.spec import ModelSpec


def blank_token(spec: ModelSpec) -> int:
    """What stands where nothing has been guessed yet: padding, else end of text, else token 0."""
    if spec.pad_id is not None:
        return spec.pad_id
    return spec.eos_ids[0] if spec.eos_ids else 0


class Iterate:
    """`guess_ZW[s, i]` is the guess of the token i + 1 places behind the root of slot s. One
    writer: the DraftState that owns it. Nothing here reads a tensor on the host."""

    def __init__(self, space: Space, blank: int) -> None:
        self.width, self.blank = max(space.max_nodes, 1), blank
        self.guess_ZW = torch.full(
            (space.num_slots, self.width), blank, dtype=torch.long, device=space.device
        )

    def reset(self, slot: int) -> None:
        self.guess_ZW[slot] = self.blank

    def ahead(self, view: RoundView, length: int) -> Tensor:
        """[B, N]: the next `length` guesses."""
        return self.guess_ZW[view.slot_B, :length]

    def advance(self, outcome: Outcome) -> Tensor:
        """Move behind the tokens of a round whose tree was a chain of these guesses; returns how
        many they are, [B, 1]. Places that were not fed keep their guess."""
        assert outcome.topk_BTC is not None, "the next guesses are the target's argmax"
        best_BT, slot_B = outcome.topk_BTC[:, :, 0], outcome.view.slot_B
        num_final_B1 = (outcome.path_BP >= 0).sum(1, keepdim=True)
        at_BW = num_final_B1 + torch.arange(self.width, device=slot_B.device)
        old_BW = self.guess_ZW[slot_B].gather(1, at_BW.clamp(max=self.width - 1))
        old_BW = old_BW.masked_fill(at_BW >= self.width, self.blank)
        new_BW = best_BT.gather(1, at_BW.clamp(max=best_BT.shape[1] - 1))
        self.guess_ZW[slot_B] = torch.where(at_BW < best_BT.shape[1], new_BW, old_BW)
        return num_final_B1
