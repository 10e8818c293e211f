"""PromptImages: what the images of a prompt put in the place of its placeholder tokens.

A prompt with images is token ids as ever. At the placeholders stand rows that a vision tower and
a projector have made, once, and the target reads these rows in front of its first layer instead of
the embedding of an id. Where positions have several axes (M-RoPE: time, height, width; Qwen2-VL,
arXiv 2409.12191, section 2.1), those of the prompt are given, too; text advances all axes alike, so
that behind the prompt one number, `offset`, is all that is left of them.
Letters: B rows, D hidden width, L positions, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image at positions first .. end - 1. `digest` covers all that the model is given of it:
    two images of the same size have the same token ids, and only this tells them apart."""

    first: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, in order. `row_LD`: what stands at the positions of the spans,
    one behind another; `position_3T`: the axes of every position of the prompt, None where they are
    all its index. Behind the prompt a token stands `offset` beyond its index, in every axis.
    `deeper`: rows as those of `row_LD`, added behind layers 0, 1, ... (DeepStack, arXiv
    2406.04334)."""

    spans: tuple[ImageSpan, ...]
    row_LD: Tensor
    position_3T: Tensor | None = None
    offset: int = 0
    deeper: tuple[Tensor, ...] = ()

    def put(self, embedded_TD: Tensor, first: int) -> None:
        """Write the rows into the embeddings of positions `first` and behind, in place."""
        self._put(self.row_LD, embedded_TD, first)

    def put_deeper(self, layer: int, added_TD: Tensor, first: int) -> None:
        """Write what is added behind that layer, in the same way."""
        self._put(self.deeper[layer], added_TD, first)

    def _put(self, row_LD: Tensor, out_TD: Tensor, first: int) -> None:
        end, at = first + len(out_TD), 0
        for span in self.spans:
            low, high = max(span.first, first), min(span.end, end)
            if low < high:
                rows_LD = row_LD[at + low - span.first : at + high - span.first]
                out_TD[low - first : high - first] = rows_LD.to(out_TD)
            at += span.end - span.first

    def positions(self, first: int, count: int) -> Tensor | None:
        """[3, count]: axes of the positions from `first` on, also behind the prompt."""
        if self.position_3T is None:
            return None
        within_3T = self.position_3T[:, first : first + count]
        start = first + within_3T.shape[1] + self.offset
        rest = torch.arange(start, start + count - within_3T.shape[1], device=within_3T.device)
        return torch.cat([within_3T, rest.expand(3, -1)], dim=1)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of a text that is learned, where it is kept: a path or a data URI, the sha256 of its
    bytes, and the positions first .. end - 1 of its text that stand for it."""

    source: str
    sha256: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TextImages:
    """The images of the text at positions start .. end - 1 of a row of a batch."""

    row: int
    start: int
    end: int
    images: tuple[StoredImage, ...]


def common_images(mine: PromptImages | None, other: PromptImages | None, most: int) -> int:
    """How many of the first `most` positions of two prompts hold the same images, or none."""
    ours, theirs = _spans(mine), _spans(other)
    for at in range(max(len(ours), len(theirs))):
        both = [spans[at] for spans in (ours, theirs) if at < len(spans)]
        if len(both) < 2 or both[0] != both[1]:
            return min(most, *(span.first for span in both))
    return most


def offsets(images: Sequence[PromptImages | None], device: torch.device) -> Tensor | None:
    """[B, 1]: how far behind their index the tokens of each row stand; None where none do."""
    found = [0 if each is None else each.offset for each in images]
    return torch.tensor(found, device=device)[:, None] if any(found) else None


def _spans(images: PromptImages | None) -> tuple[ImageSpan, ...]:
    return () if images is None else images.spans
