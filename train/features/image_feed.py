"""Packed rows with images, as a frozen target reads them while a drafter learns.

At the placeholders stand the rows that its vision made, in front of the first layer, as in prefill
(`Vision.feed`); here a row may hold several texts, each with images of its own.
Letters: B rows, D hidden width, S sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.forward.prompt_images import PromptImages, TextImages
from specctl.core.language_model import Feed
from specctl.train.data.images.shown_images import ImageReader

Seen = list[tuple[TextImages, PromptImages]]


def images_of(reader: ImageReader, batch: TrainBatch) -> Seen:
    """What the vision made of the images of each text."""
    return [
        (text, reader.seen(batch.ids_BS[text.row, text.start : text.end].tolist(), text.images))
        for text in batch.images
    ]


def with_seen(
    reader: ImageReader, batch: TrainBatch, seen: Seen, feed: Feed, dtype: torch.dtype
) -> Feed:
    """The feed of a batch, with its images in the place of ids. `dtype`: of the language model."""
    vision = reader.vision
    residual_BSD = vision.embedding(batch.ids_BS).to(dtype)
    for text, images in seen:
        images.put(residual_BSD[text.row, text.start : text.end], 0)
    rope = None
    if batch.position_BS3 is not None:
        assert vision.axes is not None, "targets of this kind are refused without axes"
        rope = vision.axes.at(batch.position_BS3.movedim(-1, 0), dtype)
    depth = max((len(images.deeper) for _, images in seen), default=0)
    deeper = tuple(torch.zeros_like(residual_BSD) for _ in range(depth))
    for text, images in seen:
        for layer in range(len(images.deeper)):
            images.put_deeper(layer, deeper[layer][text.row, text.start : text.end], 0)
    return replace(feed, residual_BTD=residual_BSD, rope=rope, deeper=deeper)


def positions_of(position_BS: Tensor, seen: Seen) -> Tensor | None:
    """[B, S, 3]: the axes of every position; a text without images stands at its index in all.
    None where all texts do."""
    if all(images.position_3T is None for _, images in seen):
        return None
    position_BS3 = position_BS[:, :, None].repeat(1, 1, 3)
    for text, images in seen:
        found = images.positions(0, text.end - text.start)
        if found is not None:
            position_BS3[text.row, text.start : text.end] = found.T
    return position_BS3
