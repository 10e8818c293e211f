"""The memory of modules for multi-token prediction: one that is used again and again, or several,
or such as see a window only.

Of several, module j drafts the token j + 1 places behind the root, and reads what module j - 1 made
one token earlier. All of them read the same tokens and write the same places of their own layers of
the cache: the entry of token p in module j is computed from that token and from module j - 1's
entry of token p - 1. It is written for good once token p is part of the text, so a rejected draft
leaves nothing stale behind; what is kept between rounds is one state a module. Module j has no
entry of the first j tokens that module 0 has one of, which its mask hides.
Letters: B rows, D hidden width, E head width, K draft vocabulary, L positions, M new nodes, T fed
tokens, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Outcome, Space
from specctl.core.forward.masks import chain_mask
from specctl.drafters.frames.feature_drafter import FeatureDrafter, TrunkState
from specctl.drafters.nets.blocks import Attending, attend, sink_pair
from specctl.drafters.states.tree_layout import Fed, Place
from specctl.models.hf.foreign_layer import LayerCache
from specctl.models.native.step import Stack


@dataclass(frozen=True, slots=True)
class Cached:
    """Attention to all that stands in an aimed cache, which a foreign layer writes itself."""

    cache: LayerCache
    mask: Tensor | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, has_sink: bool = False) -> Tensor:
        if not has_sink:
            return attend(query, key, value, self.mask)
        last = sink_pair(key, 1)  # behind all that stands in the cache
        key, value = (torch.cat(pair, dim=2) for pair in zip((key, value), last, strict=True))
        mask = None if self.mask is None else F.pad(self.mask, (0, 1), value=True)
        return attend(query, key, value, mask)


class MtpState(TrunkState):
    """Memory of one engine."""

    net: Any

    @property
    def is_recordable(self) -> bool:
        """Experts of transformers are chosen by the host."""
        return not self.net.is_foreign and super().is_recordable

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        state: Tensor = self.net.of_target(super().features(taps))
        return state

    def _attending(self, mask: Tensor | None) -> Callable[[int], Attending]:
        if not self.net.is_foreign:
            return super()._attending(mask)
        return lambda layer: Cached(LayerCache(self.kv, layer), mask)


class ModulesState(MtpState):
    """Memory of one engine that drafts with several modules, or through a window. `_behind`: by
    slot, what each module but the last made of the newest token of the text it has an entry of.
    `_made[j]`: what module j made of the root and of the nodes of this round, by call."""

    def __init__(self, drafter: FeatureDrafter, space: Space) -> None:
        super().__init__(drafter, space)
        self._num = len(self.net.layers)
        shape = space.num_slots, self.net.shape.hidden_size
        self._behind = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self._num - 1)
        ]
        self._made: list[list[Tensor]] = []

    @property
    def is_recordable(self) -> bool:
        return False

    def stack(self) -> Stack | None:
        return None  # the layers stand beside each other, not on one another

    def forget(self, slot: int) -> None:
        super().forget(slot)
        for behind in self._behind:
            behind[slot] = 0.0

    # -- true rows ------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, fed: Fed) -> None:
        made, _ = self._read_text(fed)
        self._keep(self.kv.aim.slot_B1[:, 0], made)

    def _keep(self, slot_B: Tensor, made: list[Tensor]) -> None:
        for behind, made_B1D in zip(self._behind, made[:-1], strict=True):
            behind[slot_B] = made_B1D[:, 0]

    @torch.no_grad()
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        made, ready_B1D = self._read_text(fed)
        self._made = [[made_B1D] for made_B1D in made]
        self._states.append(made[0])
        logits_B1K: Tensor = self.net.logits(ready_B1D, self._read)
        return logits_B1K

    def _read_text(self, fed: Fed) -> tuple[list[Tensor], Tensor]:
        """[B, 1, D] a module: what it makes of the last real row; and what the LM head reads of
        module 0's. Every row is written into the cache."""
        token_BTD, state_BTD = self.drafter.embed(fed.ids_BT), fed.state_BTD
        slot_B = self.kv.aim.slot_B1[:, 0]
        T, span = fed.ids_BT.shape[1], self.kv.aim.span
        mask = chain_mask(fed.start_B, T, span, self.net.window)
        at_1L = torch.arange(span, device=self.device)[None]
        made, ready = list[Tensor](), list[Tensor]()
        for module in range(self._num):
            look = self._attending(_without_first(mask, at_1L, module))
            x_BTD = self.net.mix(token_BTD, state_BTD, module)
            out_BTD = self.net.layers[module](x_BTD, fed.rope_BT2E, look(module))
            made_BTD = self.net.fed_back(out_BTD, module)
            made.append(fed.newest(made_BTD))
            ready.append(fed.newest(out_BTD))
            if module + 1 < self._num:
                before_B1D = self._behind[module][slot_B][:, None]
                state_BTD = torch.cat([before_B1D, made_BTD[:, :-1]], dim=1)
        return made, self.net.ready(ready[0])

    # -- nodes ----------------------------------------------------------------------------------

    @torch.no_grad()
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        """A node d tokens behind the root draws with module d, or with the last one; those of
        before have nothing to do with it, those behind it need its entry for its children."""
        growth = self._growth
        assert growth is not None, "root() begins a round"
        depth_BM = place.position_BM - growth.kept_B[:, None] + 1
        # modules are chosen by the host
        least = growth.num_nodes if place.is_next else int(depth_BM.min())
        last, token_BMD = self._num - 1, self.drafter.embed(token_BM)
        position_BL = self._positions(place)
        mask = place.mask
        if mask is None:
            shape = (*token_BM.shape[:1], 1, token_BM.shape[1], place.span)
            mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        if self.net.window is not None:
            mask = mask & growth.near(place, self.net.window)
        state_BMD = ready_BMD = token_BMD
        made = list[Tensor]()
        for module in range(self._num):
            if module < min(least, last):  # keeps the place of these nodes
                made.append(torch.zeros_like(token_BMD))
                continue
            before_BMD = self.of_parents(self._made[module - 1], parent_BM, place)
            if module == last:
                again_BMD = self.of_parents(self._made[last], parent_BM, place)
                before_BMD = torch.where((depth_BM > last)[:, :, None], again_BMD, before_BMD)
            look = self._attending(_without_first(mask, position_BL, module))
            x_BMD = self.net.mix(token_BMD, before_BMD, module)
            rope_BM2E = self._rope_L2E[place.position_BM]
            out_BMD = self.net.layers[module](x_BMD, rope_BM2E, look(module))
            made.append(self.net.fed_back(out_BMD, module))
            is_here_BM1 = (depth_BM >= module)[:, :, None]
            ready_BMD = torch.where(is_here_BM1, self.net.ready(out_BMD, module), ready_BMD)
            state_BMD = torch.where(is_here_BM1, made[-1], state_BMD)
        for stored, new in zip(self._made, made, strict=True):  # now that parents have been read
            stored.append(new)
        self._states.append(state_BMD)
        logits_BMK: Tensor = self.net.logits(ready_BMD, self._read)
        return logits_BMK

    def _positions(self, place: Place) -> Tensor:
        """[B, L] or [1, L]: of every entry of the cache. Where each text is long enough, none of
        the hidden ones is a node, and the place of an entry will do."""
        assert self._growth is not None, "root() begins a round"
        at_1L = torch.arange(place.span, device=self.device)[None]
        _, kept = self._lengths(self._growth.view)
        if min(kept) >= self._num - 1:
            return at_1L
        return self._growth.position(at_1L.expand(len(kept), -1))

    def observe(self, outcome: Outcome) -> None:
        if self._growth is not None and self._made:  # `root` has read what was pending
            self._keep(outcome.view.slot_B, [stored[0] for stored in self._made])
        self._made = []
        super().observe(outcome)


def _without_first(mask: Tensor, position_XL: Tensor, module: int) -> Tensor:
    """[B, 1, T, L]: the mask without the entries that this module has none of. Rows that would see
    nothing are hidden ones themselves; they see what the mask showed them, to stay finite."""
    if module == 0:
        return mask
    late = mask & (position_XL >= module)[:, None, None]
    return torch.where(late.any(-1, keepdim=True), late, mask)
