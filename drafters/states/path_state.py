"""PathState: the memory of a drafter whose drafted tokens attend to their own path and to stores
that the known text has filled.

A drafter names its stores: what each known token leaves in each of them, once the target has read
it. The newest token, the root, is not known in this sense; it is the first node of a round. Nodes
write into store 0 only, behind the known rows; other stores are read as they stand. As every row of
a store depends on its own token and features alone, the rows of accepted tokens are written anew
from the target's features, and what was drafted is forgotten.
Letters: B rows, D hidden width, E head width, I input width, J key/value heads, K draft vocabulary,
L positions, M new nodes, N nodes, P path, W window, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.drafters.nets.routed import ServedHead, read_head, served_head
from specctl.drafters.states.tree_layout import Place, TreeLayout

REACH = 3  # newest tokens of a path that a drafter may look at


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes to be computed: the `REACH` newest tokens of each path (the node's own last; a shorter
    text repeats its first), where they stand, which rows of the stores are known, the features of
    the newest token that the target has read (zero: none), and the layout of the round."""

    path_BMP: Tensor
    place: Place
    known_mask: Tensor
    newest_BI: Tensor
    layout: TreeLayout


class Pathwise(Protocol):
    """What the state needs of its drafter."""

    options: Any

    @property
    def stores(self) -> tuple[KVShape, ...]: ...

    @property
    def num_features(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor: ...

    def stored(
        self, ids_BW: Tensor, features_BWI: Tensor, position_BW: Tensor
    ) -> list[tuple[Tensor, Tensor]]: ...

    def grown(self, nodes: Nodes, kv: SlotKV) -> Tensor: ...

    def head_weights(self) -> list[Tensor]: ...

    def version(self) -> int: ...


class PathState(StepState):
    """Memory of one engine; known rows of a slot = kept length."""

    def __init__(self, drafter: Pathwise, space: Space) -> None:
        self.drafter, max_len = drafter, space.max_len + space.max_nodes + 3
        self.kv = SlotKV.of(drafter.stores, space.num_slots, max_len, drafter.dtype, space.device)
        self.num_rows = [0] * space.num_slots
        self._version, self._head = drafter.version(), self._pack_heads()
        self._growth: TreeLayout | None = None
        self._ready_BMD = torch.empty(0)
        self._paths: list[Tensor] = []
        width = drafter.num_features
        self.newest_ZI = torch.zeros(space.num_slots, width, dtype=drafter.dtype).to(space.device)

    def _pack_heads(self) -> ServedHead:
        return served_head(self.drafter.head_weights()[0], self.drafter.options)

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self.drafter.version():
            self._version, self._head = self.drafter.version(), self._pack_heads()
        count = self.num_rows[slot] = len(tokens) - 1
        for store in (*self.kv.key_ZJLE, *self.kv.value_ZJLE):
            store[slot, :, 0] = 0.0  # what a text of one token attends to
        self.newest_ZI[slot] = 0.0
        if count:
            slot_1 = torch.full((1,), slot, device=self.kv.key_ZJLE[0].device)
            ids_1W = torch.tensor([list(tokens[:-1])], device=slot_1.device)
            features = self.drafter.gathered(taps)[None]
            self.kv.begin((slot,), slot_1, slot_1 * 0, count, count, 0)
            self.learn(ids_1W, features, slot_1 * 0)
            self.newest_ZI[slot] = features[0, -1]

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        """The root and the accepted tokens have been read by the target."""
        view, self._growth = outcome.view, None
        rows = zip(view.tokens, view.slots, outcome.emitted, strict=True)
        read = [(text[self.num_rows[slot]], *new[:-1]) for text, slot, new in rows]
        W = max(map(len, read))
        ids = [[*row, *(0,) * (W - len(row))] for row in read]
        ids_BW = torch.tensor(ids, device=view.slot_B.device)
        span = max(self.num_rows[slot] for slot in view.slots) + W
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, W, span)
        features = self.drafter.gathered(outcome.taps)[:, :W]
        self.learn(ids_BW, features, view.kept_len_B)
        at_B = torch.tensor([len(row) - 1 for row in read], device=ids_BW.device)
        self.newest_ZI[view.slot_B] = features[torch.arange(len(read)), at_B]
        for slot, row in zip(view.slots, read, strict=True):
            self.num_rows[slot] += len(row)

    def learn(self, ids_BW: Tensor, features_BWI: Tensor, start_B: Tensor) -> None:
        at_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
        stores = self.drafter.stored(ids_BW, features_BWI, start_B[:, None] + at_W)
        for index, (key, value) in enumerate(stores):
            self.kv.update(index, key, value)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        kept = [self.num_rows[slot] for slot in view.slots]
        self._growth = TreeLayout(view, self.kv, kept, view.kept_len_B)
        before = [(*(text[:1] * REACH), *text)[-REACH:] for text in map(tuple, view.tokens)]
        self._paths = [torch.tensor(before, device=view.slot_B.device)[:, None]]
        return self._nodes(self._paths[0], torch.full_like(view.root_B[:, None], -1))[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        every_BNP, at_BM1 = torch.cat(self._paths, dim=1), (parent_BM + 1)[:, :, None]
        before_BMP = every_BNP.gather(1, at_BM1.expand(-1, -1, REACH))
        self._paths.append(torch.cat([before_BMP[:, :, 1:], token_BM[:, :, None]], dim=2))
        return self._nodes(self._paths[-1], parent_BM + 1)

    def _nodes(self, path_BMP: Tensor, parent_BM: Tensor) -> Tensor:
        """[B, M, K]: logits after nodes, of which the root is the first."""
        assert self._growth is not None, "root() begins a round"
        place = self._growth.place(parent_BM)
        at_L = torch.arange(place.span, device=path_BMP.device)
        known_BL = at_L < self._growth.kept_B[:, None].clamp(min=1)
        known_mask = known_BL[:, None, None].expand(-1, -1, path_BMP.shape[1], -1)
        newest_BI = self.newest_ZI[self._growth.view.slot_B]
        self._ready_BMD = self.grown(Nodes(path_BMP, place, known_mask, newest_BI, self._growth))
        return read_head(self._ready_BMD, self._head)

    def grown(self, nodes: Nodes) -> Tensor:
        """[B, M, D]: what the LM head reads behind nodes, for which the stores are aimed."""
        return self.drafter.grown(nodes, self.kv)

    def hidden(self) -> Tensor:
        return self._ready_BMD[:, -1]
