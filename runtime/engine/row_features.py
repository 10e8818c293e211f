"""RowFeatures: the target's states at every token of a row that was fed, kept for training.

The forwards of a row compute them anyway, for its drafter: prompt positions when it joins (those of
a reused beginning come with it), then in each round the root and the accepted tokens that are
emitted. So they are always as many as the row's cache has positions, kept_len; the newest token is
not fed yet, and has none.
Letters: B rows, D hidden width, L positions, P path, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Outcome

DTYPE = torch.bfloat16


@dataclass(slots=True, eq=False)
class RowFeatures:
    """States of `layers` (hidden_states indices) at the first positions of `tokens`, the row's own
    list: prompt and what was emitted. In bfloat16 on the host. One writer: the engine, until the
    row has ended."""

    layers: tuple[int, ...]
    tokens: Sequence[int]
    prompt_len: int
    parts: list[Tensor] = field(default_factory=list)  # [layers, L, D], in their order

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def states(self) -> dict[int, Tensor]:
        """[L, D] of each layer."""
        if not self.parts:
            return {}
        return dict(zip(self.layers, torch.cat(self.parts, dim=1), strict=True))


def layers_kept(drafter: Drafter | None) -> tuple[int, ...]:
    """Layers whose states a drafter learns from, the last one for its teacher; none for one that
    has nothing to learn, or drafts without the target's states."""
    if drafter is None or drafter.module is None:
        return ()
    needs = drafter.needs()
    last = {drafter.spec.num_layers} if needs.teacher else set()
    return tuple(sorted({*needs.taps} | last)) if needs.taps else ()


def features_of(
    tokens: Sequence[int], prompt_len: int, taps: Mapping[int, Tensor], layers: tuple[int, ...]
) -> RowFeatures:
    """Those of a row that joins, with the taps [L, D] of what was read of it."""
    found = RowFeatures(layers, tokens, prompt_len)
    if taps:  # none of a prompt of one token
        found.parts.append(_on_host(taps, layers))
    return found


def add_features(features: Sequence[RowFeatures | None], outcome: Outcome) -> None:
    """What a round adds to each of its rows: the states at the root and at the accepted tokens,
    but for those behind a stop."""
    layers = next((each.layers for each in features if each is not None), None)
    if layers is None:
        return
    states_XBPD = _on_host(outcome.taps, layers)
    for b, each in enumerate(features):
        if each is not None:  # a copy: a view would hold what was rejected, and the other rows
            each.parts.append(states_XBPD[:, b, : len(outcome.emitted[b])].clone())


def _on_host(taps: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    """[layers, ...]: the taps of these layers."""
    return torch.stack([taps[layer].to(DTYPE) for layer in layers]).cpu()
