"""PaSS (arXiv 2311.13581): the target reads look-ahead tokens and says several tokens at once.

A round reads the newest token and the learned embeddings of `num_heads` - 1 look-ahead tokens
behind it, in one forward of the target: the newest token predicts the next one, look-ahead token i
predicts the one that comes i later (Ak). They are sampled, and a second forward verifies them. The
target is frozen; the embeddings, learned behind random places of the text against what the target
says there, are all there is to train. The first draft is the target's own and always accepted, so
that a round of two forwards emits two tokens at least.
Letters: A anchors, B rows, D hidden width, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family, RoundView, Space
from specctl.core.language_model import Feed
from specctl.drafters.frames.place_chain import PlaceChainState
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.option_checks import Within

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


class LookAheadState(PlaceChainState):
    """Look-ahead tokens stand at the places behind the newest token."""

    def __init__(self, drafter: LookAhead, space: Space) -> None:
        super().__init__(drafter, space)
        self.drafter = drafter

    def ready(self, view: RoundView, root_B1D: Tensor, feed: Feed) -> Tensor:
        x_BTD = self.drafter.behind(root_B1D)
        return self.drafter.through(replace(feed, residual_BTD=x_BTD), self.kv, self.lm)


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
