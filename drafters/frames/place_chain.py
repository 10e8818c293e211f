"""PlaceChainState: a chain that stands ready when its first token is asked for.

One forward of the target's layers reads a place for each token of the draft; what each place says
does not depend on the tokens that are drafted in front of it.
Letters: B rows, D hidden width, M new nodes, T fed tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from specctl.core.drafter import RoundView, Space
from specctl.core.forward.sub_layers import NOTHING
from specctl.core.language_model import Feed, LanguageModel
from specctl.drafters.frames.places import PlacesDrafter
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.states.borrowed_state import KnownTokensState


class PlaceChainState(KnownTokensState):
    """`num_heads` places behind the text; a family says what stands at them."""

    may_draft_nothing = True

    def __init__(self, drafter: PlacesDrafter, space: Space) -> None:
        self._num_places = drafter.options.num_heads
        super().__init__(drafter.lm, drafter.attention, space, extra=self._num_places)
        self._places, self._depth = drafter, 0
        self._ready_BMD = torch.empty(0)
        self._head = served_head(drafter.head_weight(), drafter.options)

    @abstractmethod
    def ready(self, view: RoundView, root_B1D: Tensor, feed: Feed) -> Tensor:
        """[B, T, D]: what the LM head reads at the places, the first of which is the newest token,
        in front of the first layer. `feed`: where they stand and what they see; the cache is aimed
        at them."""

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        T, at_B1 = self._num_places, view.kept_len_B[:, None]
        kept = [self.num_known[slot] for slot in view.slots]
        same, span = kept[0] if min(kept) == max(kept) else None, max(kept) + T
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, T, span, same)
        root_B1D = embedded(self.lm, view.root_B[:, None], self.within(at_B1), span)
        position_BT = self.within(at_B1 + torch.arange(T, device=at_B1.device))
        masks = self.lm.chain_masks(view.kept_len_B, T, span)
        feed = Feed(torch.zeros_like(position_BT), position_BT, masks, logits=False)
        self._ready_BMD, self._depth = self.ready(view, root_B1D, feed), 0
        return read_head(self._ready_BMD[:, 0], self._head)

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """Of a chain: what the next place says, whatever the token."""
        self._depth += 1
        if self._depth < self._num_places:
            return read_head(self._ready_BMD[:, self._depth], self._head)[:, None]
        shape = (*token_BM.shape, self._places.head_weight().shape[0])
        return torch.full(shape, -torch.inf, device=token_BM.device)

    def hidden(self) -> Tensor:
        return self._ready_BMD[:, min(self._depth, self._ready_BMD.shape[1] - 1)]


def embedded(lm: LanguageModel, ids_BT: Tensor, position_BT: Tensor, span: int) -> Tensor:
    """[B, T, D]: tokens at positions below `span`, in front of the first layer."""
    any_mask = lm.chain_masks(position_BT[:, 0] * 0, ids_BT.shape[1], span)
    return lm.run(Feed(ids_BT, position_BT, any_mask, (0,), False, None, NOTHING), None).taps[0]
