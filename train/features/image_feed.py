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
from specctl.train.data.shown_images import ImageReader

Seen = list[tuple[TextImages, PromptImages]]


def with_seen(reader: ImageReader, batch: TrainBatch, feed: Feed, dtype: torch.dtype) -> Feed:
    """The feed of a batch, with its images in the place of ids. `dtype`: of the language model."""
    vision = reader.vision
    seen: Seen = [
        (text, reader.seen(batch.ids_BS[text.row, text.start : text.end].tolist(), text.images))
        for text in batch.images
    ]
    residual_BSD = vision.embedding(batch.ids_BS).to(dtype)
    for text, images in seen:
        images.put(residual_BSD[text.row, text.start : text.end], 0)
    rope = None
    if any(images.position_3T is not None for _, images in seen):
        assert vision.axes is not None, "targets of this kind are refused without axes"
        rope = vision.axes.at(_positions(batch.position_BS, seen), dtype)
    depth = max((len(images.deeper) for _, images in seen), default=0)
    deeper = tuple(torch.zeros_like(residual_BSD) for _ in range(depth))
    for text, images in seen:
        for layer in range(len(images.deeper)):
            images.put_deeper(layer, deeper[layer][text.row, text.start : text.end], 0)
    return replace(feed, residual_BTD=residual_BSD, rope=rope, deeper=deeper)


def _positions(position_BS: Tensor, seen: Seen) -> Tensor:
    """[3, B, S]: the axes of every position; a text without images stands at its index in all."""
    position_3BS = position_BS.expand(3, *position_BS.shape).clone()
    for text, images in seen:
        found = images.positions(0, text.end - text.start)
        if found is not None:
            position_3BS[:, text.row, text.start : text.end] = found
    return position_3BS
