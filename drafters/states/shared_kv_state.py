"""SharedKvState: the memory of a drafter that reads the target's own keys and values, and writes
none.

Every node of a round looks at the known tokens alone, from the position of the root, so what is
looked at is read once a round, from the target's own cache where the engine gives it. A node is
the token and the state that its parent fed back: any tree may grow, and nothing has to be repaired
after it.
Letters: B rows, D hidden width, E head width, H query heads, I input width, J key/value heads, L
positions, M new nodes, N nodes, O output width, T fed tokens, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.drafters.nets.blocks import attend
from specctl.drafters.nets.query_layers import Look, QueryNet
from specctl.drafters.nets.routed import ServedHead, read_head
from specctl.drafters.states.borrowed_state import KnownTokensState
from specctl.drafters.states.head_state import LastState


class KvReader(Protocol):
    """What the state needs of its drafter. `reads`: the target's layer, and `reach` the newest
    known tokens (None: all), that each of its layers looks at."""

    spec: ModelSpec
    reads: tuple[int, ...]
    reach: tuple[int | None, ...]

    @property
    def net(self) -> QueryNet: ...

    @property
    def lm(self) -> LanguageModel: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, ids_X: Tensor) -> Tensor: ...

    def ropes(self, position_BT: Tensor) -> list[Tensor]: ...

    def served_head(self) -> ServedHead: ...

    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Sight:
    """What one layer looks at in a round: keys and values, which of them each row sees (None: all),
    and the rows that see any (None: all do)."""

    key_BJLE: Tensor
    value_BJLE: Tensor
    mask_B11L: Tensor | None
    sees_B11: Tensor | None

    def __call__(self, query_BHTE: Tensor) -> Tensor:
        out_BTI = attend(query_BHTE, self.key_BJLE, self.value_BJLE, self.mask_B11L)
        return out_BTI if self.sees_B11 is None else torch.where(self.sees_B11, out_BTI, 0.0)


class SharedKvState(KnownTokensState):
    """Memory of one engine: the target's last state of each row and, while a round grows, the
    states that its nodes fed back."""

    def __init__(self, drafter: KvReader, space: Space) -> None:
        super().__init__(drafter.lm, tuple(sorted({*drafter.reads})), space)
        self.drafter, self.net = drafter, drafter.net
        like: Any = next(self.net.parameters())
        last = drafter.spec.num_layers
        self._last = LastState(last, space.num_slots, drafter.spec.hidden_size, like)
        self._version, self._head = drafter.version(), drafter.served_head()
        self._states: list[Tensor] = []
        self._sights: list[Look] = []
        self._ropes: list[Tensor] = []
        self._ready_BMO = torch.empty(0)

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self.drafter.version():
            self._version, self._head = self.drafter.version(), self.drafter.served_head()
        super().start(slot, tokens, taps)
        self._last.start(slot, tokens, taps)

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        self._states, self._sights = [], []
        super().observe(outcome)
        self._last.observe(outcome)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        self._states = []
        self._look_around(view)
        state_B1D = self._last.at(view)[:, None]
        return self._nodes(view.root_B[:, None], state_B1D)[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._states, "root() begins a round"
        every_BND, at_BM1 = torch.cat(self._states, dim=1), (parent_BM + 1)[:, :, None]
        return self._nodes(token_BM, every_BND.gather(1, at_BM1.expand(-1, -1, every_BND.shape[2])))

    def _look_around(self, view: RoundView) -> None:
        """Take up what the round's nodes look at, and how their queries are rotated."""
        kept, kept_B, drafter = (
            [self.num_known[s] for s in view.slots],
            view.kept_len_B,
            self.drafter,
        )
        span = max(1, *kept)
        self.kv.begin(view.slots, view.slot_B, kept_B, 0, span)
        pairs = {layer: self.lm.read_kv(layer, self.kv) for layer in self.attention}
        at_L = torch.arange(span, device=kept_B.device)
        known_BL = at_L < kept_B[:, None].clamp(min=1)
        sees_B11 = None if min(kept) else (kept_B > 0)[:, None, None]
        self._sights = []
        for layer, reach in zip(drafter.reads, drafter.reach, strict=True):
            mask = None if min(kept) == span else known_BL
            if reach is not None and span > reach:
                mask = known_BL & (at_L >= kept_B[:, None] - reach)
            key, value = (part.to(drafter.dtype) for part in pairs[layer])
            mask_B11L = None if mask is None else mask[:, None, None]
            self._sights.append(Sight(key, value, mask_B11L, sees_B11))
        self._ropes = drafter.ropes(self.within(kept_B[:, None]))

    def _nodes(self, token_BM: Tensor, state_BMD: Tensor) -> Tensor:
        """[B, M, K]: logits behind nodes, of which the root is the first."""
        x_BMO = self.net.mix(self.drafter.embed(token_BM), state_BMD)
        self._ready_BMO = self.net.looked(x_BMO, self._ropes, self._sights)
        self._states.append(self.net.fed_back(self._ready_BMO))
        return read_head(self._ready_BMO, self._head)

    def hidden(self) -> Tensor:
        return self._ready_BMO[:, -1]
