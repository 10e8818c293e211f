"""BorrowedState: the memory of a drafter that runs some of the target's own layers.

What its cache holds of known tokens is what the target itself holds, never what the drafter made of
those tokens. Drafted tokens are written behind them, and forgotten when the round is over. So a
draft begins from the target's true context whatever was left out while drafting. The cache is the
target's own where the engine gives it (`Space.target_kv`), else a copy for the layers that may run,
made of the residuals that the target's layers read (taps). In the target's own, the keys and values
of drafts by whole first layers are those that the verification would write, and stay.
Letters: A anchors, B rows, D hidden width, L positions, M new nodes, N nodes, S sequence, T fed
tokens, V target vocabulary, W window, X any axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.masks import document_mask
from specctl.core.forward.sub_layers import NOTHING, SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import (
    ChainDraws,
    ChainRoot,
    Feed,
    LanguageModel,
    LmOut,
    Masks,
    WholeChain,
)
from specctl.core.tree import DraftTree
from specctl.drafters.states.tree_layout import Place, TreeLayout
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.chain import NextToken
from specctl.models.native.step import RESIDUAL

CHUNK = 512  # known tokens written at once


class KnownTokensState(StepState):
    """Known tokens in a cache of borrowed layers. `attention`: the layers that may ever run;
    `extra` positions are kept free behind the text and the nodes."""

    prefills_in_parts = True

    def __init__(
        self, lm: LanguageModel, attention: tuple[int, ...], space: Space, extra: int = 0
    ) -> None:
        self.lm, self.attention = lm, attention
        self.max_len = space.max_len + space.max_nodes + 3 + extra
        self.shares_kv = space.target_kv is not None
        self.kv = space.target_kv or self._new_kv(space, self.max_len)
        self.num_known = [0] * space.num_slots
        self._num_prefilled = [0] * space.num_slots

    def _new_kv(self, space: Space, max_len: int) -> SlotKV:
        return self.lm.borrowed_kv(self.attention, space.num_slots, max_len)

    def prefill(
        self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int, last: int
    ) -> None:
        self._write_text(slot, taps, first, last)
        self._num_prefilled[slot] = last

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        first, self._num_prefilled[slot] = self._num_prefilled[slot], 0
        last = self.num_known[slot] = len(tokens) - 1
        self._write_text(slot, {tap: value[first:] for tap, value in taps.items()}, first, last)

    def _write_text(self, slot: int, taps: Mapping[int, Tensor], first: int, last: int) -> None:
        """Known tokens first .. last - 1 of a row, whose taps these are."""
        slot_1 = torch.full((1,), slot, device=self.lm.device)
        for at in range(first, last, CHUNK):
            until = min(at + CHUNK, last)
            part = {tap: value[None, at - first : until - first] for tap, value in taps.items()}
            self._write((slot,), slot_1, slot_1 * 0 + at, [at], part, until - at)

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        """The root and the accepted tokens have been read by the target."""
        view = outcome.view
        counts = [len(new) for new in outcome.emitted]
        starts = [self.num_known[slot] for slot in view.slots]
        W = max(1, *counts)
        taps = {tap: value[:, :W] for tap, value in outcome.taps.items()}
        self._write(view.slots, view.slot_B, view.kept_len_B, starts, taps, W)
        for slot, count in zip(view.slots, counts, strict=True):
            self.num_known[slot] += count

    def _write(
        self,
        slots: tuple[int, ...],
        slot_B: Tensor,
        start_B: Tensor,
        starts: Sequence[int],
        taps: Mapping[int, Tensor],
        W: int,
    ) -> None:
        """W known tokens of each row."""
        same = starts[0] if min(starts) == max(starts) else None
        self.kv.begin(slots, slot_B, start_B, W, max(starts) + W, same)
        if self.shares_kv:  # the target has written them
            return
        position_BW = self.within(start_B[:, None] + torch.arange(W, device=slot_B.device))
        state = {layer: taps[layer].to(self.lm.dtype) for layer in self.attention}
        self.lm.write_kv(state, position_BW, self.kv)

    def within(self, position_X: Tensor) -> Tensor:
        """Positions of the context; those of padding may lie beyond it."""
        last = self.lm.spec.max_positions - 1
        return position_X if self.kv.max_len <= last else position_X.clamp(max=last)


class BorrowedState(KnownTokensState):
    """Drafts tree by tree with some of the borrowed layers. `exit_layer`: every node runs exactly
    the layers below it (0: others), of which the residuals are kept for the verification."""

    def __init__(
        self,
        lm: LanguageModel,
        attention: tuple[int, ...],
        space: Space,
        extra: int = 0,
        exit_layer: int = 0,
    ) -> None:
        super().__init__(lm, attention, space, extra)
        self.exit_layer = exit_layer if self.shares_kv else 0
        self._growth: TreeLayout | None = None
        self._ready_BMD = torch.empty(0)
        self._exits: list[Tensor] = []
        self._next_token: NextToken | None = None
        self.least: float | None = None  # `unverified` of the options that have it
        self._said: list[Tensor] = []

    def observe(self, outcome: Outcome) -> None:
        self._growth, self._exits = None, []
        super().observe(outcome)

    # -- what a family decides --------------------------------------------------------------------

    @abstractmethod
    def parts_of(self, slot: int, first: int) -> SubLayers:
        """What runs for a row, at nodes of which `first` (the root counted) came before."""

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        """[B, M, V]: logits behind nodes. The cache is aimed at them; `rows` are the rows of the
        round that are fed."""
        last = self.lm.spec.num_layers
        taps = (self.exit_layer, last) if self.exit_layer else (last,)
        out = self.runner.run(replace(feed, taps=taps), self.kv)
        if self.exit_layer:
            self._left(out.taps[self.exit_layer])
        assert out.logits_BTV is not None
        self._ready_BMD = out.taps[last]
        return out.logits_BTV

    def _left(self, residual_BMD: Tensor) -> None:
        """New nodes have left the lower layers."""
        if self.exit_layer:
            self._exits.append(residual_BMD)

    def exit_states(self) -> ExitStates | None:
        if not self._exits:
            return None
        return ExitStates(self.exit_layer, torch.cat(self._exits, dim=1))

    @property
    def runner(self) -> LanguageModel:
        """What reads nodes; known tokens are the target's own matter."""
        return self.lm

    # -- a round ----------------------------------------------------------------------------------

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        kept = [self.num_known[slot] for slot in view.slots]
        self._exits = []
        self._growth = TreeLayout(view, self.kv, kept, view.kept_len_B)
        root_B1, self._said = view.root_B[:, None], []
        return self._heard(self._nodes(root_B1, torch.full_like(root_B1, -1)))[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        return self._heard(self._nodes(token_BM, parent_BM + 1))

    def _heard(self, logits_BMV: Tensor) -> Tensor:
        if self.least is not None:
            self._said.append(logits_BMV.float().softmax(-1))
        return logits_BMV

    def unverified(self, tree: DraftTree) -> Tensor | None:
        """Of a chain the tokens in front of the first that is not probable enough."""
        if self.least is None or not tree.is_chain:
            return None
        p_BNV = torch.cat(self._said, dim=1)[:, : tree.num_nodes]
        p_BN = p_BNV.gather(2, tree.token_BN[:, :, None])[:, :, 0]
        return ((p_BN >= self.least) & tree.valid_BN).long().cumprod(1).bool()

    @torch.no_grad()
    def whole_chain(
        self, view: RoundView, length: int, draws: ChainDraws | None = None
    ) -> WholeChain | None:
        parts = self._chain_parts(view.slots, length)
        if parts is None:
            return None
        kept = [self.num_known[slot] for slot in view.slots]
        growth = TreeLayout(view, self.kv, kept, view.kept_len_B)
        if (longest := growth.longest + length) > self.kv.max_len:
            self.kv.reserve(longest + 64)
        place = growth.place(torch.full_like(view.root_B[:, None], -1))
        root = ChainRoot(
            view.root_B[:, None],
            self.within(place.position_BM),
            (0,) * len(view.slots),
            self.lm.spec.vocab_size,
            None,
            self.lm.spec.max_positions - 1,
            parts,
            residuals=self.exit_layer > 0,
            draws=draws,
        )
        found = self.runner.whole_chain(root, length, self.kv)
        if found is not None:
            growth.drafted(length)
            self._growth = growth
            self._exits = [] if found.residual_BND is None else [found.residual_BND]
        return found

    def _chain_parts(self, slots: tuple[int, ...], length: int) -> tuple[SubLayers, ...] | None:
        """What reads a chain, token by token; None where that differs from row to row, or is not
        all that reads it."""
        own = type(self)
        is_all = own.read is BorrowedState.read and own._nodes is BorrowedState._nodes
        if not is_all or self.lm.device.type != "cpu" or self.least is not None:
            return None
        parts = [{self.parts_of(slot, first) for slot in slots} for first in range(length)]
        return tuple(one for (one,) in parts) if all(len(each) == 1 for each in parts) else None

    @property
    def growth(self) -> TreeLayout:
        assert self._growth is not None, "root() begins a round"
        return self._growth

    def _nodes(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """[B, M, V]: logits behind nodes, of which the root is the first."""
        growth, first = self.growth, self.growth.num_nodes
        place = growth.place(parent_BM)
        groups: dict[SubLayers, list[int]] = {}
        for row, slot in enumerate(growth.view.slots):
            groups.setdefault(self.parts_of(slot, first), []).append(row)
        if len(groups) == 1 and place.is_next:
            (parts,) = groups
            if (logits_BMV := self._read_next(token_BM, place, parts)) is not None:
                return logits_BMV
        masks = growth.masks(place, self.lm.windows)
        feed = Feed(token_BM, self.within(place.position_BM), masks)
        if len(groups) == 1:
            (parts,) = groups
            return self.read(replace(feed, parts=parts), range(len(token_BM)))
        return self._by_group(feed, groups, first, place.span)

    def _read_next(self, token_B1: Tensor, place: Place, parts: SubLayers) -> Tensor | None:
        """[B, 1, V]: the logits behind the next token of a chain, by the short call for that."""
        slots, runner = self.growth.view.slots, self.runner
        if type(self).read is not BorrowedState.read or not isinstance(runner, FastLlama):
            return None
        held, is_root = self._next_token, self.growth.num_nodes == 1
        if held is not None and is_root and not held.is_current(slots):
            held = None
        if held is None or not held.is_of(self.kv):
            held = runner.next_token(slots, self.kv)
        self._next_token = held
        if held is None:
            return None
        position_B1 = self.within(place.position_BM)
        out = held.read(token_B1, position_B1, self.kv, parts, residual=self.exit_layer > 0)
        if self.exit_layer:
            self._left(out.taps[RESIDUAL])
        assert out.logits_BTV is not None
        self._ready_BMD = out.taps[self.lm.spec.num_layers]
        return out.logits_BTV

    def _by_group(
        self, feed: Feed, groups: Mapping[SubLayers, list[int]], first: int, span: int
    ) -> Tensor:
        """Rows that run other layers are fed apart."""
        view, start_B = self.growth.view, self.growth.kept_B + first
        found: list[Tensor] = []
        ready: list[Tensor] = []
        for parts, rows in groups.items():
            slots = tuple(view.slots[row] for row in rows)
            masks = Masks(
                feed.masks.full[rows], {w: mask[rows] for w, mask in feed.masks.windows.items()}
            )
            some = Feed(feed.ids_BT[rows], feed.position_BT[rows], masks, parts=parts)
            self.kv.begin(slots, view.slot_B[rows], start_B[rows], feed.ids_BT.shape[1], span)
            found.append(self.read(some, rows))
            ready.append(self._ready_BMD)
        order = [row for rows in groups.values() for row in rows]
        back = torch.tensor(order, device=start_B.device).argsort()
        self._ready_BMD = torch.cat(ready)[back]
        return torch.cat(found)[back]

    def hidden(self) -> Tensor:
        return self._ready_BMD[:, -1]


class FixedState(BorrowedState):
    """The same layers for every row at every depth."""

    def __init__(
        self, lm: LanguageModel, parts: SubLayers, space: Space, least: float | None = None
    ) -> None:
        count = len(parts.attention)
        lower = parts == SubLayers.span(0, count)
        super().__init__(lm, parts.attention, space, exit_layer=count if lower else 0)
        self.parts, self.least = parts, least

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self.parts


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of training behind anchors of a text, group by group [B, M]: where they stand, what they
    see, and the target's cache with the text, aimed at them."""

    position_BM: Tensor
    masks: Masks
    kv: SlotKV


def groups_behind(
    lm: LanguageModel,
    layers: Sequence[int],
    batch: TrainBatch,
    anchor_BA: Tensor,
    size: int,
    *,
    replaces_anchor: bool,
) -> Groups:
    """`size` rows behind each anchor. Each sees what `layers` of the target cache of the text up to
    the anchor and its own group up to itself; with `replaces_anchor` the first row stands where the
    anchor does, which is not seen."""
    (B, S), M, device = batch.ids_BS.shape, anchor_BA.shape[1] * size, anchor_BA.device
    slots, slot_B = tuple(range(B)), torch.arange(B, device=device)
    kv = lm.borrowed_kv(tuple(layers), B, S + M)
    kv.begin(slots, slot_B, slot_B * 0, S, S, 0)
    if all(layer in batch.taps for layer in layers):
        states = {layer: batch.taps[layer].to(lm.dtype) for layer in layers}
        lm.write_kv(states, batch.position_BS, kv)
    else:  # the residuals are not kept: the text is read once more
        with torch.no_grad():
            text = lm.document_masks(batch.document_BS)
            lm.run(Feed(batch.ids_BS, batch.position_BS, text, logits=False), kv)
    at_BM = anchor_BA.repeat_interleave(size, dim=1)
    ahead_M, group_M = torch.arange(M, device=device) % size, torch.arange(M, device=device) // size
    position_BM = batch.position_BS.gather(1, at_BM) + ahead_M + (not replaces_anchor)
    to_BMS = at_BM[:, :, None].expand(-1, -1, S)
    text_BMS = document_mask(batch.document_BS)[:, 0].gather(1, to_BMS)
    if replaces_anchor:
        text_BMS = text_BMS & (torch.arange(S, device=device) < at_BM[:, :, None])
    own_MM = (group_M[:, None] == group_M) & (ahead_M[:, None] >= ahead_M)
    mask_BML = torch.cat([text_BMS, own_MM.expand(B, M, M)], dim=2)
    key_BL = torch.cat([batch.position_BS, position_BM], dim=1)
    far_BML = position_BM[:, :, None] - key_BL[:, None]
    windows = {w: (mask_BML & (far_BML < w))[:, None] for w in lm.windows}
    kv.begin(slots, slot_B, torch.full_like(slot_B, S), M, S + M, S)
    position_BM = position_BM.clamp(max=lm.spec.max_positions - 1)
    return Groups(position_BM, Masks(mask_BML[:, None], windows), kv)


@torch.no_grad()
def shadow_logits(
    lm: LanguageModel,
    kv: SlotKV,
    slots: tuple[int, ...],
    ids_BW: Tensor,
    first: int,
    num_known: int,
    parts: SubLayers,
) -> Tensor:
    """[B, W, V]: what `parts` say behind the known tokens at positions first .. first + W - 1, each
    as the first token of a draft: it sees the target's own keys of all tokens before it, and its
    own. Nothing of what is known is written over: the tokens stand behind `num_known` rows."""
    W, device = ids_BW.shape[1], ids_BW.device
    slot_B = torch.tensor(slots, device=device)
    kv.begin(slots, slot_B, slot_B * 0 + num_known, W, num_known + W, num_known)
    position_W = first + torch.arange(W, device=device)
    at_L = torch.arange(num_known + W, device=device)
    own_WL = at_L == (num_known + torch.arange(W, device=device))[:, None]
    mask_WL = own_WL | ((at_L < position_W[:, None]) & (at_L < num_known))
    windows = {w: own_WL | (mask_WL & (position_W[:, None] - at_L < w)) for w in lm.windows}
    shape = (len(slots), 1, W, num_known + W)
    masks = Masks(mask_WL.expand(shape), {w: mask.expand(shape) for w, mask in windows.items()})
    position_BW = position_W.clamp(max=lm.spec.max_positions - 1).expand_as(ids_BW)
    out = lm.run(Feed(ids_BW, position_BW, masks, parts=parts), kv)
    assert out.logits_BTV is not None
    return out.logits_BTV


@torch.no_grad()
def said_by(lm: LanguageModel, state_BTD: Tensor) -> LmOut:
    """What the LM head makes of residuals, and the normed states it reads (the last tap)."""
    none_BT = torch.zeros(state_BTD.shape[:2], dtype=torch.long, device=state_BTD.device)
    all_BT1 = torch.ones((*state_BTD.shape[:2], 1), dtype=torch.bool, device=none_BT.device)
    mask = all_BT1[:, None].expand(-1, -1, -1, state_BTD.shape[1])
    masks = Masks(mask, dict.fromkeys(lm.windows, mask))
    last = (lm.spec.num_layers,)
    return lm.run(Feed(none_BT, none_BT, masks, last, parts=NOTHING, residual_BTD=state_BTD), None)


def read_out(lm: LanguageModel, state_BTD: Tensor) -> Tensor:
    """[B, T, V]: what the final norm and the LM head make of residuals."""
    out = said_by(lm, state_BTD)
    assert out.logits_BTV is not None
    return out.logits_BTV
