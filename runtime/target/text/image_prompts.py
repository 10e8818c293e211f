"""Prompts with images: where these stand, as tokens. `<image>` in a text says where; images that no
mark stands for come in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.core.forward.prompt_images import PromptImages
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_tokens import chat_tokens
from specctl.runtime.target.vision import CheckLength, Vision, any_length, no_vision

MARK = "<image>"
IMAGE = {"type": "image"}  # a part of a message, as chat templates know it
Turn = Mapping[str, Any]


def vision_of(target: Target) -> Vision:
    """What reads images for it; IncompatibleError where nothing does."""
    if target.vision is None:
        raise no_vision(target.name, target.inside_of)
    return target.vision


def placed(text: str, count: int) -> list[dict[str, Any]]:
    """The parts of a message of that text and so many images."""
    pieces = text.split(MARK) if count else [text]
    if len(pieces) == 1:
        return [*([dict(IMAGE)] * count), {"type": "text", "text": text}]
    parts = list[dict[str, Any]]()
    for at, piece in enumerate(pieces):
        parts += [dict(IMAGE)] if at else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def text_tokens(
    target: Target, text: str, images: Sequence[Any], check: CheckLength = any_length
) -> tuple[list[int], PromptImages | None]:
    """A text that is continued as it is, with images (PIL, RGB)."""
    if not images:
        return target.encode(text), None
    vision = vision_of(target)
    text = text if MARK in text else MARK * len(images) + text
    return vision.see(target.encode(text.replace(MARK, vision.spelled)), images, check)


def turn_tokens(
    target: Target,
    turns: Sequence[Turn],
    images: Sequence[Any],
    text: str | None = None,
    tools: Sequence[Turn] = (),
    variables: Mapping[str, Any] | None = None,
    check: CheckLength = any_length,
) -> tuple[list[int], PromptImages | None]:
    """A conversation in the target's chat template, whose parts {"type": "image"} stand for the
    images in order. A mark that a message spells is read as text. `check`: of `Vision.see`."""
    tokens = chat_tokens(target, turns, text, tools, variables)
    return vision_of(target).see(tokens, images, check) if images else (tokens, None)
