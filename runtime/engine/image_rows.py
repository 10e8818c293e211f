"""Rows whose prompts hold images: what they may be combined with, and what is never drawn in them.

The placeholder of an image stands for no text. A target may give it some probability all the same;
in a row with images it is banned, from what a draft head draws as from the text,
as by `suppress_tokens` of transformers' `generate`. A draft that was copied from the prompt may
hold one, and is accepted up to there.
"""

from __future__ import annotations

from dataclasses import replace

from specctl.core.errors import one_of_two
from specctl.core.forward.prompt_images import PromptImages
from specctl.runtime.engine.request import Request
from specctl.runtime.target.target import Target
from specctl.runtime.target.vision import no_vision


def with_images(target: Target, request: Request, images: PromptImages | None) -> Request:
    """The request with the images of its prompt."""
    if images is None:
        return request
    if target.vision is None:
        raise no_vision(target.name, target.inside_of)
    banned = tuple((token,) for token in target.vision.unsaid)
    words = (*request.sampling.bad_words, *banned)
    return replace(request, images=images, sampling=replace(request.sampling, bad_words=words))


def check_image_rows(target: Target, parallel: bool = False) -> None:
    """Refuse what would read an image's placeholders as text."""
    if target.mixture is not None:
        raise one_of_two(
            "a mixture of two models reads no images",
            f"images and {target.mixture}",
            "leave out --mix, or the images",
        )
    if parallel:
        raise one_of_two(
            "drafting beside the target reads no images",
            "images and serve.parallel",
            "leave out serve.parallel, or the images",
        )
