"""Hidden Transfer (arXiv 2404.12022): states of tokens to come, made in the midst of the target.

The residual of the newest token n that the target has read, in front of layer `layer`, is mapped to
pseudo states of the tokens behind it, h~(n + i) = W_i h(n), at positions n + i. They pass through
the rest of the target's layers, where each sees the text and the pseudo states before it, and the
target's LM head says from h~(n + i) the token n + i + 1. The root, token n + 1, is known already.
The maps are all that is trained, against what the target itself says at those places.

The paper has the pseudo states of every node of a tree ride along in the forward that verifies the
tree. Here those of the tokens that were kept alone are read, in a pass of their own through the
same layers when the verdict is known: the same tokens are drafted, for the share of a forward that
the layers above `layer` are, and no rows are spent on nodes that are rejected.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family, Outcome, RoundView, Space
from specctl.core.language_model import Feed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.frames.self_drafter import check_layer
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.option_checks import Count
from specctl.drafters.states.borrowed_state import KnownTokensState
from specctl.drafters.states.head_state import LastState


@dataclass(frozen=True, slots=True)
class HiddenTransferOptions(PlacesOptions):
    """`num_heads` pseudo states, injected in front of layer `layer` (None: three quarters of the
    way up)."""

    num_heads: Count = 3
    layer: int | None = None


class HiddenTransfer(PlacesDrafter):
    """Maps of width D to D, which begin as the identity."""

    family = "hidden-transfer"
    reach, replaces_anchor = 2, False
    module: nn.ModuleList
    options: HiddenTransferOptions

    def __init__(
        self, options: HiddenTransferOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        if options.layer is not None:
            check_layer("layer", options.layer, spec.num_layers)
        super().__init__(options, spec, vocab)

    def make_net(self) -> nn.ModuleList:
        width = self.spec.hidden_size
        maps = [nn.Linear(width, width, bias=False) for _ in range(self.options.num_heads)]
        for one in maps:
            nn.init.eye_(one.weight)
        return nn.ModuleList(maps)

    @property
    def first(self) -> int:
        chosen = self.options.layer
        return self.spec.num_layers * 3 // 4 if chosen is None else chosen

    def behind(self, state_BAD: Tensor) -> Tensor:
        """[B, A T, D]: the pseudo states."""
        maps = [cast(nn.Linear, one) for one in self.module]
        pseudo = [one(state_BAD.to(one.weight.dtype)) for one in maps]
        return torch.stack(pseudo, dim=2).flatten(1, 2).to(state_BAD.dtype)

    def open(self, space: Space) -> HiddenTransferState:
        return HiddenTransferState(self, space)


class HiddenTransferState(KnownTokensState):
    """All logits of a draft are there with those of the root: they depend on depth alone."""

    def __init__(self, drafter: HiddenTransfer, space: Space) -> None:
        lm, spec = drafter.lm, drafter.spec
        super().__init__(lm, drafter.attention, space, extra=drafter.options.num_heads)
        like = torch.empty(0, dtype=lm.dtype, device=space.device)
        self.newest = LastState(drafter.first, space.num_slots, spec.hidden_size, like)
        self.drafter, self._head = drafter, served_head(drafter.head_weight(), drafter.options)
        self._ready_BTD = self._logits_BTK = torch.empty(0)
        self._depths: list[Tensor] = []

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        self.newest.start(slot, tokens, taps)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.newest.observe(outcome)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        lm, T, last = self.lm, self.drafter.options.num_heads, self.lm.spec.num_layers
        kept = [self.num_known[slot] for slot in view.slots]
        same = kept[0] if min(kept) == max(kept) else None
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, T, max(kept) + T, same)
        place_T = torch.arange(T, device=view.kept_len_B.device)
        position_BT = self.within(view.kept_len_B[:, None] + place_T)
        masks = lm.chain_masks(view.kept_len_B, T, max(kept) + T)
        feed = Feed(
            torch.zeros_like(position_BT),
            position_BT,
            masks,
            (last,),
            logits=False,
            parts=self.drafter.parts,
            residual_BTD=self.drafter.behind(self.newest.at(view)[:, None]),
        )
        self._ready_BTD = lm.run(feed, self.kv).taps[last]
        self._logits_BTK = read_head(self._ready_BTD, self._head)
        self._depths = [torch.zeros_like(view.slot_B[:, None])]
        return self._logits_BTK[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """Behind a node at depth d the place d; past the last place, the last."""
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        self._depths.append(depth_BM)
        T, K = self._logits_BTK.shape[1:]
        at_BMK = depth_BM.clamp(max=T - 1)[:, :, None].expand(-1, -1, K)
        return self._logits_BTK.gather(1, at_BMK)

    def hidden(self) -> Tensor:
        return self._ready_BTD[:, min(len(self._depths), self._ready_BTD.shape[1]) - 1]


FAMILY = Family(
    name="hidden-transfer",
    summary=(
        "Linear maps turn the target's state of the newest token, three quarters of the way up, "
        "into states of the tokens to come, which the rest of the target's layers read. A draft of "
        "any shape costs one pass of those layers; nothing but the maps is trained."
    ),
    paper="https://arxiv.org/abs/2404.12022",
    options=HiddenTransferOptions,
    build=HiddenTransfer,
    trainable=True,
    policies=("dynamic-tree", "static-tree", "chain"),
    borrows_layers=True,
)
