"""Texts with images, as drafters learn from them."""

from __future__ import annotations

import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.forward.prompt_images import PromptImages, TextImages
from specctl.core.language_model import Feed
from specctl.runtime.target.target import Target
from specctl.train.features.image_feed import positions_of


@torch.no_grad()
def captured_text(
    target: Target, drafter: Drafter, tokens: list[int], images: PromptImages | None
) -> TrainBatch:
    """A text of one row with what the target makes of it, as `train.features.capture` reads it; a
    batch without images knows of none."""
    ids_1S, at_1S = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    feed = Feed(ids_1S, at_1S, target.lm.document_masks(ids_1S * 0), drafter.needs().taps, True)
    position_BS3, image_1S = None, torch.zeros_like(ids_1S, dtype=torch.bool)
    if images is not None:
        assert target.vision is not None
        feed = target.vision.feed(feed, [images], [0])
        position_BS3 = positions_of(at_1S, [(TextImages(0, 0, len(tokens), ()), images)])
        for span in images.spans:
            image_1S[0, span.first : span.end] = True
    out = target.lm.run(feed, None)
    assert out.logits_BTV is not None
    taps = {tap: state.clone() for tap, state in out.taps.items()}
    return TrainBatch(
        ids_1S, ~image_1S & (at_1S > 2), ids_1S * 0, at_1S, taps, out.logits_BTV.clone(),
        image_BS=None if images is None else image_1S, position_BS3=position_BS3,
    )  # fmt: skip
