"""TreeLayout: where the nodes of one round stand in a drafter's own cache, and what they may see;
Place and Fed: what one call reads of them, and of the true rows in front.

Node i (in order of expansion) is written at kept + i, after the rows that are true for good; its
position is kept + depth - 1. A chain is recognised and needs no ancestor table, and with one common
length no mask either.
Letters: B rows, D hidden width, E head width, J key/value heads, L positions, M new nodes, N nodes,
P path, T fed tokens, W window, X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Masks
from specctl.core.tree import chain_parent
from specctl.drafters.attention.kept_rows import KeptRows


@dataclass(frozen=True, slots=True)
class Place:
    """One call's nodes: mask_B1ML (None = sees everything in the span) and position_BM."""

    mask: Tensor | None
    position_BM: Tensor
    span: int
    is_next: bool  # one node per row, child of the node before it


@dataclass(frozen=True, slots=True)
class Fed:
    """True rows fed at once, right-padded: tokens, the states beside them, their rotations, where
    the first of each row is written, and how many are real; `count_B`: where the host may not know
    that, which is being recorded; `shift_B`: how far positions are ahead of where rows lie;
    `has_axes`: some stand for an image, of which no single position gives the rotation."""

    ids_BT: Tensor
    state_BTD: Tensor
    rope_BT2E: Tensor
    start_B: Tensor
    counts: tuple[int, ...]
    count_B: Tensor | None = None
    shift_B: Tensor | None = None
    has_axes: bool = False

    @property
    def first_B(self) -> Tensor:
        """The position of the first in each row."""
        return self.start_B if self.shift_B is None else self.start_B + self.shift_B

    def newest(self, rows_BTX: Tensor) -> Tensor:
        """[B, 1, ...]: those of the last real row."""
        count_B = self.count_B
        if count_B is None:
            if min(self.counts) == self.ids_BT.shape[1]:
                return rows_BTX[:, -1:]
            count_B = torch.tensor(self.counts, device=rows_BTX.device)
        row_B = torch.arange(len(count_B), device=rows_BTX.device)
        return rows_BTX[row_B, count_B - 1][:, None]


class TreeLayout:
    """Bookkeeping of one round. One writer: the StepState that owns it."""

    def __init__(self, view: RoundView, kv: SlotKV, kept: Sequence[int], kept_B: Tensor) -> None:
        self.view, self.kv, self.kept_B = view, kv, kept_B
        self.longest = max(kept)
        self.uniform = self.longest if min(kept) == self.longest else None
        self.num_nodes = 0
        self.is_chain = True
        self._ancestor_BNN: Tensor | None = None
        self._depth_BN: Tensor | None = None

    def place(self, parent_BM: Tensor, is_nested: bool = False) -> Place:
        """Reserve M nodes and aim the cache at them. `is_nested`: parents may be among them."""
        M, start = parent_BM.shape[1], self.num_nodes
        self.num_nodes = start + M
        span = self.longest + self.num_nodes
        aim_cache(
            self.kv,
            self.view,
            self.kept_B + start if start else self.kept_B,
            M,
            span,
            None if self.uniform is None else self.uniform + start,
        )
        if self._is_next(parent_BM, start):
            position_B1 = self.kept_B[:, None] + start
            if self.uniform is not None:
                return Place(None, position_B1, span, is_next=True)
            at_L = torch.arange(span, device=parent_BM.device)
            mask = (at_L <= position_B1)[:, None, None]
            return Place(mask, position_B1, span, is_next=True)
        return self._branch(parent_BM, start, span, is_nested)

    def drafted(self, num_nodes: int) -> None:
        """So many nodes of a chain were written at once."""
        self.num_nodes = num_nodes

    def _is_next(self, parent_BM: Tensor, start: int) -> bool:
        """Whether the chain goes on, as far as it is known without reading from a GPU."""
        if not self.is_chain or self._ancestor_BNN is not None or parent_BM.shape[1] != 1:
            self.is_chain = self.is_chain and parent_BM.shape[1] == 1
            return False
        if start == 0 or parent_BM is chain_parent(start, len(parent_BM), parent_BM.device):
            return True
        self.is_chain = not parent_BM.is_cuda and bool((parent_BM == start - 1).all())
        return self.is_chain

    def _branch(self, parent_BM: Tensor, start: int, span: int, is_nested: bool) -> Place:
        B, M = parent_BM.shape
        device = parent_BM.device
        before_BNN, depth_BN = self._tables(B, start, device)
        from_BM = parent_BM + 1
        among_BMM = torch.eye(M, dtype=torch.bool, device=device).expand(B, M, M)
        if is_nested:
            is_inner_BM = from_BM > start
            link_BMM = torch.arange(start, start + M, device=device) == parent_BM[:, :, None]
            among_BMM = _closed(among_BMM | link_BMM)
            from_BM = from_BM.masked_fill(is_inner_BM, 0)
        own_BMN = before_BNN.gather(1, from_BM[:, :, None].expand(B, M, start))
        depth_BM = depth_BN.gather(1, from_BM) + 1
        if is_nested:  # the first of a run hangs on a node of before, and with it the whole run
            own_BMN = own_BMN & ~is_inner_BM[:, :, None]
            own_BMN = among_BMM.float() @ own_BMN.float() > 0
            outer_BM1 = (depth_BM - 1).masked_fill(is_inner_BM, 0)[:, :, None]
            depth_BM = among_BMM.sum(-1) + (among_BMM.float() @ outer_BM1.float())[:, :, 0].long()
        own_BMN = torch.cat([own_BMN, among_BMM], dim=2)
        self._ancestor_BNN = torch.cat([F.pad(before_BNN, (0, M)), own_BMN], dim=1)
        self._depth_BN = torch.cat([depth_BN, depth_BM], dim=1)
        at_L = torch.arange(span, device=device)
        mask_BML = (at_L < self.kept_B[:, None])[:, None].repeat(1, M, 1)
        if self.uniform is not None:
            mask_BML[:, :, self.uniform :] = own_BMN
        else:
            to_BN = self.kept_B[:, None] + at_L[: self.num_nodes]
            mask_BML.scatter_(2, to_BN[:, None].expand(B, M, self.num_nodes), own_BMN)
        position_BM = self.kept_B[:, None] + depth_BM - 1
        return Place(mask_BML[:, None], position_BM, span, is_next=False)

    def _tables(self, B: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ancestors [B, 1 + N, N] and depths [B, 1 + N] so far; entry 0 is the root."""
        if self._ancestor_BNN is not None and self._depth_BN is not None:
            return self._ancestor_BNN, self._depth_BN
        chain_NN = torch.ones(start + 1, start, dtype=torch.bool, device=device).tril(-1)
        depth_N = torch.arange(start + 1, device=device)
        return chain_NN.expand(B, -1, -1), depth_N.expand(B, -1)

    def sees(self, entry_BW: Tensor, span: int) -> Tensor:
        """[B, 1, W, L]: what cache entries may attend to, known tokens and nodes alike."""
        N, at_L = self.num_nodes, torch.arange(span, device=entry_BW.device)
        mask_BWL = at_L <= entry_BW[:, :, None]
        if N == 0:
            return mask_BWL[:, None]
        B, W = entry_BW.shape
        before_BNN, _ = self._tables(B, N, entry_BW.device)
        index_BW = (entry_BW - self.kept_B[:, None] + 1).clamp(0, N)
        own_BWN = before_BNN.gather(1, index_BW[:, :, None].expand(B, W, N))
        node_BL = at_L - self.kept_B[:, None]
        own_BWL = own_BWN.gather(2, node_BL.clamp(0, N - 1)[:, None].expand(B, W, span))
        own_BWL = own_BWL & (node_BL < N)[:, None]
        is_known_BW1 = (entry_BW < self.kept_B[:, None])[:, :, None]
        return torch.where(is_known_BW1, mask_BWL, (node_BL < 0)[:, None] | own_BWL)[:, None]

    def position(self, entry_BW: Tensor) -> Tensor:
        """[B, W]: positions of cache entries; a node's is given by its depth."""
        _, depth_BN = self._tables(len(entry_BW), self.num_nodes, entry_BW.device)
        index_BW = (entry_BW - self.kept_B[:, None] + 1).clamp(0, self.num_nodes)
        node_BW = self.kept_B[:, None] + depth_BN.gather(1, index_BW) - 1
        return torch.where(entry_BW < self.kept_B[:, None], entry_BW, node_BW)

    def masks(self, place: Place, windows: Iterable[int]) -> Masks:
        """What the nodes of `place` may attend to, all of it and within each window."""
        mask = place.mask
        if mask is None:
            shape = (len(self.kept_B), 1, 1, place.span)
            mask = torch.ones(shape, dtype=torch.bool, device=self.kept_B.device)
        return Masks(mask, {window: mask & self.near(place, window) for window in windows})

    def near(self, place: Place, window: int) -> Tensor:
        """[B, 1, M, L]: cache entries less than `window` positions behind each node of `place`."""
        at_L = torch.arange(place.span, device=self.kept_B.device)
        key_BL = at_L.expand(self.kept_B.shape[0], -1)
        if self._depth_BN is not None:
            index_BL = (key_BL - self.kept_B[:, None] + 1).clamp(0, self._depth_BN.shape[1] - 1)
            node_BL = self.kept_B[:, None] + self._depth_BN.gather(1, index_BL) - 1
            key_BL = torch.where(key_BL < self.kept_B[:, None], key_BL, node_BL)
        return (place.position_BM[:, :, None] - key_BL[:, None] < window)[:, None]

    def within(self, place: Place, kept: KeptRows) -> Place:
        """The same nodes behind a window, at their true positions; a window over everything hides
        nothing."""
        shift_B = kept.shift_B(self.view.slots, self.kept_B.device)
        position_BM = place.position_BM + shift_B[:, None]
        mask, size = place.mask, kept.window.size
        if place.span > size:
            near = self.near(place, size) | kept.is_sink(place.span, shift_B.device)
            mask = near if mask is None else mask & near
        return replace(place, mask=mask, position_BM=position_BM)


def _closed(link_BMM: Tensor) -> Tensor:
    """Who is reached over any number of links; every node has one to itself."""
    for _ in range(max(1, link_BMM.shape[1] - 1).bit_length()):
        link_BMM = link_BMM.float() @ link_BMM.float() > 0
    return link_BMM


def expansions(outcome: Outcome, num_expanded: int) -> Tensor:
    """[B, P - 1]: expansion index of the accepted nodes, -1 where there is none."""
    node_BP = outcome.path_BP[:, 1:] - 1
    index_BP = node_BP
    if outcome.tree.expanded_BN is not None:
        index_BP = outcome.tree.expanded_BN.gather(1, node_BP.clamp(min=0))
    return index_BP.masked_fill((node_BP < 0) | (index_BP >= num_expanded), -1)


def aim_cache(
    kv: SlotKV, view: RoundView, at_B: Tensor, num_fed: int, span: int, uniform: int | None
) -> None:
    """Aim `kv` at the coming forward, growing it when a policy expands more than was announced."""
    if span > kv.max_len:
        kv.reserve(span + 64)
    kv.begin(view.slots, view.slot_B, at_B, num_fed, span, uniform)
