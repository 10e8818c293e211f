"""RowAxes: the rows of an engine whose prompts hold images with positions of several axes.

What lies behind the images of a prompt stands `offset` from its index in all axes, so that there a
rotation is that of one position, and whatever reads positions goes on as for text. Only rows at the
images themselves, and in front of them, are turned by each axis apart.
Letters: B rows, E head width, L positions, M new nodes, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.forward.prompt_images import PromptImages
from specctl.drafters.nets.axes import by_axes
from specctl.drafters.states.tree_layout import Place


class RowAxes:
    """`axis`: that of every frequency. One writer: the state that holds it."""

    def __init__(self, axis: tuple[int, ...], device: torch.device) -> None:
        self.axis, self.device = axis, device
        self.most_ahead = 0  # how far beyond its index a token stands
        self._images: dict[int, tuple[PromptImages, int]] = {}  # by slot, and where text goes on

    def see(self, slot: int, images: PromptImages | None) -> None:
        """Another prompt is in that slot."""
        self._images.pop(slot, None)
        if images is None or images.position_3T is None:
            return
        ahead_3T = images.position_3T.cpu() - torch.arange(images.position_3T.shape[1])
        others = (ahead_3T != images.offset).any(0).nonzero()
        first_text = int(others[-1]) + 1 if len(others) else 0
        self.most_ahead = max(self.most_ahead, images.offset, int(ahead_3T.max()))
        bare = replace(images, row_LD=torch.empty(0), deeper=())
        self._images[slot] = bare, first_text

    def has_any(self, slots: Sequence[int]) -> bool:
        """Whether any of these rows has such images."""
        return any(slot in self._images for slot in slots)

    def offset_B(self, slots: Sequence[int]) -> Tensor | None:
        """[B]: how far from its index text behind the images stands; None: nowhere else."""
        if not self.has_any(slots):
            return None
        found = [self._images[slot][0].offset if slot in self._images else 0 for slot in slots]
        return torch.tensor(found, device=self.device)

    def moved(self, place: Place, slots: Sequence[int]) -> Place:
        """Drafted nodes, behind all images, with their positions."""
        offset_B = self.offset_B(slots)
        if offset_B is None:
            return place
        return replace(place, position_BM=place.position_BM + offset_B[:, None])

    def rope(
        self, rope_L2E: Tensor, slots: Sequence[int], firsts: Sequence[int], count: int
    ) -> Tensor | None:
        """[B, count, 2, E]: the rotations of `count` positions from `firsts` on, of those of all
        positions; None where `offset_B` says them."""
        pairs = [*zip(slots, firsts, strict=True)]
        if all(first >= self._images[slot][1] for slot, first in pairs if slot in self._images):
            return None
        rows = list[Tensor]()
        for slot, first in pairs:
            position_3T = None
            if slot in self._images:
                position_3T = self._images[slot][0].positions(first, count)
            if position_3T is None:
                position_3T = torch.arange(first, first + count).expand(3, -1)
            rows.append(position_3T.to(self.device))
        return by_axes(rope_L2E[torch.stack(rows, dim=1)], self.axis)
