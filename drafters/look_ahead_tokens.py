"""PaSS (arXiv 2311.13581): the target reads look-ahead tokens and says several tokens at once.

A round reads the newest token and the learned embeddings of `num_heads` - 1 look-ahead tokens
behind it, in one forward of the target: the newest token predicts the next one, look-ahead token i
predicts the one that comes i later (Ak). They are sampled, and a second forward verifies them. The
target is frozen; the embeddings, learned behind random places of the text against what the target
says there, are all there is to train. The first draft is the target's own and always accepted, so
that a round of two forwards emits two tokens at least.
Letters: A anchors, B rows, D hidden width, M new nodes, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family, RoundView, Space
from specctl.core.language_model import Feed
from specctl.core.sub_layers import NOTHING
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.option_checks import Within
from specctl.drafters.states.borrowed_state import KnownTokensState

LOUD = 16.0  # embeddings are kept this much smaller, to learn as fast as other weights do


@dataclass(frozen=True, slots=True)
class LookAheadOptions(PlacesOptions):
    """`num_heads` tokens are drafted, by the newest token and `num_heads` - 1 look-ahead tokens;
    trained behind `anchors` positions of each row."""

    num_heads: Annotated[int, Within(2)] = 4


class LookAheadNet(nn.Module):
    """The embeddings, as they stand in front of the first layer."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(count, width) * 0.02 / LOUD)

    def forward(self) -> Tensor:
        return self.tokens * LOUD


class LookAhead(PlacesDrafter):
    """All layers of the target run. The newest token is the first place."""

    family = "pass"
    reach, replaces_anchor = 1, True
    first = 0
    module: LookAheadNet
    options: LookAheadOptions

    def make_net(self) -> LookAheadNet:
        return LookAheadNet(self.options.num_heads - 1, self.spec.hidden_size)

    def behind(self, state_BAD: Tensor) -> Tensor:
        """[B, A T, D]: each newest token with the look-ahead tokens behind it."""
        B, A, D = state_BAD.shape
        ahead = self.module().to(state_BAD.dtype).expand(B, A, -1, D)
        return torch.cat([state_BAD[:, :, None], ahead], dim=2).flatten(1, 2)

    def open(self, space: Space) -> LookAheadState:
        return LookAheadState(self, space)


class LookAheadState(KnownTokensState):
    """All of a draft is there when its first token is asked for."""

    may_draft_nothing = True

    def __init__(self, drafter: LookAhead, space: Space) -> None:
        super().__init__(drafter.lm, drafter.attention, space, extra=drafter.options.num_heads)
        self.drafter, self._depth = drafter, 0
        self._ready_BMD = torch.empty(0)
        self._head = served_head(drafter.head_weight(), drafter.options)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        lm, T = self.lm, self.drafter.options.num_heads
        kept = [self.num_known[slot] for slot in view.slots]
        root_B1, at_B1 = view.root_B[:, None], view.kept_len_B[:, None]
        same = kept[0] if min(kept) == max(kept) else None
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, T, max(kept) + T, same)
        any_mask = lm.chain_masks(view.kept_len_B, 1, max(kept) + T)
        first = lm.run(
            Feed(root_B1, self.within(at_B1), any_mask, (0,), False, None, NOTHING), None
        )
        position_BT = self.within(at_B1 + torch.arange(T, device=at_B1.device))
        x_BTD = self.drafter.behind(first.taps[0])
        masks = lm.chain_masks(view.kept_len_B, T, max(kept) + T)
        none_BT = torch.zeros_like(position_BT)
        feed = Feed(none_BT, position_BT, masks, logits=False, residual_BTD=x_BTD)
        self._ready_BMD, self._depth = self.drafter.through(feed, self.kv, lm), 0
        return read_head(self._ready_BMD[:, 0], self._head)

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self._depth += 1
        if self._depth < self.drafter.options.num_heads:
            return read_head(self._ready_BMD[:, self._depth], self._head)[:, None]
        size = self.drafter.head_weight().shape[0]
        shape = (*token_BM.shape, size)
        return torch.full(shape, -torch.inf, device=token_BM.device)

    def hidden(self) -> Tensor:
        return self._ready_BMD[:, min(self._depth, self._ready_BMD.shape[1] - 1)]


FAMILY = Family(
    name="pass",
    summary=(
        "The target drafts several tokens in one forward, at a few look-ahead tokens whose "
        "embeddings are all that is trained (thousands of weights), and verifies them in a second. "
        "Every round emits two tokens at least; it pays where more than two of a draft are taken "
        "and memory for nothing else is left."
    ),
    paper="https://arxiv.org/abs/2311.13581",
    options=LookAheadOptions,
    build=LookAhead,
    trainable=True,
    policies=("chain",),
    borrows_layers=True,
)
