"""EasySpec (arXiv 2502.02493): the layers of the draft in groups that read the same state.

The draft is the whole target in another order. Of a group of consecutive layers every attention
reads the residual in front of the group, so that they do not wait for each other; what they put out
is then added layer by layer, each followed by its MLP (layer-parallel, or fuzzy, drafting):

    a_i = attention_i(x),  i in the group;    x <- x + a_i,  x <- x + mlp_i(x),  in order

Each attention could be another device's; here they run one after the other, which shows what the
order costs in acceptance and saves no time. The last layer runs as it is.

Bonus calibration: keys and values of known tokens are exact, so that errors do not add up. The
paper reads the accepted tokens once more through the draft model; as the draft is the target, its
verification has made their exact states already. `calibrate: false` leaves the answer's keys as the
fuzzy order makes them.
Letters: B rows, D hidden width, M new nodes, T fed tokens, V target vocabulary, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import Family, Outcome, Space
from specctl.core.forward.sub_layers import NOTHING, SubLayers
from specctl.core.language_model import Feed, LanguageModel
from specctl.drafters.frames.self_drafter import SelfDrafter
from specctl.drafters.option_checks import Count, Options
from specctl.drafters.states.borrowed_state import BorrowedState


@dataclass(frozen=True, slots=True)
class EasySpecOptions(Options):
    """`group` layers read one state; 1 is the target in its own order. `calibrate`: the keys of the
    answer are exact."""

    group: Count = 4
    calibrate: bool = True

    def groups(self, num_layers: int) -> list[range]:
        """All layers but the last, in groups."""
        last = num_layers - 1
        firsts = range(0, last, self.group)
        return [range(first, min(first + self.group, last)) for first in firsts]


class EasySpec(SelfDrafter):
    """Every layer runs."""

    family = "easyspec"
    options: EasySpecOptions

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.spec.num_layers))

    def open(self, space: Space) -> EasySpecState:
        return EasySpecState(self, self.lm, space)


class EasySpecState(BorrowedState):
    """A forward in groups, for drafted tokens and, without calibration, for those of the answer."""

    def __init__(self, drafter: EasySpec, lm: LanguageModel, space: Space) -> None:
        super().__init__(lm, drafter.attention, space)
        self.options = drafter.options
        self._every = SubLayers.span(0, lm.spec.num_layers)

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self._every

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        last = self.lm.spec.num_layers
        state_BMD = self._grouped(feed)
        parts = SubLayers.span(last - 1, last)
        top = replace(feed, taps=(last,), parts=parts, residual_BTD=state_BMD)
        out = self.lm.run(top, self.kv)
        assert out.logits_BTV is not None
        self._ready_BMD = out.taps[last]
        return out.logits_BTV

    def _grouped(self, feed: Feed) -> Tensor:
        """[B, M, D]: the residual in front of the last layer."""
        state_BMD = self._part(feed, NOTHING, None, 0)
        for group in self.options.groups(self.lm.spec.num_layers):
            if len(group) == 1:
                (layer,) = group
                state_BMD = self._part(feed, SubLayers.span(layer, layer + 1), state_BMD, layer + 1)
                continue
            front_BMD = state_BMD
            added = [
                self._part(feed, SubLayers((layer,), ()), front_BMD, layer + 1) - front_BMD
                for layer in group
            ]
            for layer, added_BMD in zip(group, added, strict=True):
                mlp = SubLayers((), (layer,))
                state_BMD = self._part(feed, mlp, state_BMD + added_BMD, layer + 1)
        return state_BMD

    def _part(self, feed: Feed, parts: SubLayers, state_BMD: Tensor | None, tap: int) -> Tensor:
        """[B, M, D]: the residual behind those sub-layers."""
        part = replace(feed, taps=(tap,), logits=False, parts=parts, residual_BTD=state_BMD)
        return self.lm.run(part, self.kv).taps[tap]

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        if self.options.calibrate:
            super().observe(outcome)
            return
        self._growth, view = None, outcome.view
        roots = view.root_B.tolist()
        known = [[root, *new[:-1]] for root, new in zip(roots, outcome.emitted, strict=True)]
        W, starts = max(map(len, known)), [self.num_known[slot] for slot in view.slots]
        ids_BW = torch.tensor([ids + [0] * (W - len(ids)) for ids in known]).to(view.root_B)
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, W, max(starts) + W)
        masks = self.lm.chain_masks(view.kept_len_B, W, max(starts) + W)
        position_BW = view.kept_len_B[:, None] + torch.arange(W, device=ids_BW.device)
        self.read(Feed(ids_BW, self.within(position_BW), masks), range(len(known)))
        for slot, new in zip(view.slots, outcome.emitted, strict=True):
            self.num_known[slot] += len(new)


FAMILY = Family(
    name="easyspec",
    summary=(
        "The target drafts for itself with the attentions of several layers reading the same "
        "state, which as many devices could compute at once. Nothing to train; the keys of known "
        "tokens are exact, so that errors do not add up. Here the layers run one after the other: "
        "it shows what the order costs in acceptance, and saves no time."
    ),
    paper="https://arxiv.org/abs/2502.02493",
    options=EasySpecOptions,
    build=EasySpec,
    trainable=False,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
