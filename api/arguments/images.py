"""What an `images` argument stands for: files, bytes or images of PIL, of one prompt or of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from specctl.api.arguments.prompts import EncodedPrompt, Prompt, messages_of, several
from specctl.core.errors import SpecctlError, one_of_two
from specctl.runtime.engine.request import check_length
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.image_files import read_image
from specctl.runtime.target.text.image_prompts import MARK, placed, text_tokens, turn_tokens
from specctl.runtime.target.text.prompt_limits import check_room

ImageLike = Any  # str, Path, bytes, or an image of PIL
MOST_IMAGES = 64  # of one prompt


def encode_with_images(
    target: Target,
    prompts: Prompt | Iterable[Prompt],
    images: Sequence[ImageLike] | Sequence[Sequence[ImageLike]],
    chat: bool | None = None,
) -> list[EncodedPrompt]:
    """Every prompt with its images, encoded. Images of a single prompt may be given as they are;
    of several, in a list for each (an empty one: no images)."""
    found = several(prompts)
    each = _by_prompt(images, len(found))
    is_chat = target.is_chat if chat is None else chat
    pairs = zip(found, each, strict=True)
    return [_encoded(target, prompt, list(own), is_chat) for prompt, own in pairs]


def _by_prompt(images: Sequence[Any], count: int) -> list[Sequence[Any]]:
    is_one = not isinstance(images, (list, tuple))
    given = [images] if is_one else list(images)
    if all(isinstance(one, (list, tuple)) for one in given) and len(given) == count:
        return given
    if count == 1 and not any(isinstance(one, (list, tuple)) for one in given):
        return [given]
    raise SpecctlError(
        "images and prompts do not belong together",
        where="images",
        found=f"{len(given)} images or lists of images for {count} prompts",
        expected="a list of images for each prompt",
        do='specctl.generate(target, ["One.", "Two."], images=[["1.png"], ["2.png"]])',
    )


def _encoded(target: Target, prompt: Any, given: list[Any], chat: bool) -> EncodedPrompt:
    if len(given) > MOST_IMAGES:
        raise SpecctlError(
            "a prompt has too many images",
            where="images",
            found=f"{len(given):,}",
            expected=f"at most {MOST_IMAGES}",
            do="leave some out",
        )
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and messages_of(prompt)):
        raise one_of_two(
            "images stand in texts and in conversations",
            "images and a prompt of token ids",
            "give the text",
        )
    images = [read_image(one) for one in given]
    check = partial(check_length, context=target.spec.max_positions)
    if isinstance(prompt, str):
        check_room(target, prompt.strip())
        if not chat:
            ids, seen = text_tokens(target, prompt, images, check)
            return EncodedPrompt(tuple(ids), prompt, images=seen)
        turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        turns = messages_of(prompt)
    text = str(turns[-1].get("content") or "")
    ids, seen = turn_tokens(target, _with_places(turns, len(images)), images, check=check)
    return EncodedPrompt(tuple(ids), text, is_chat=True, images=seen)


def _with_places(turns: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The turns with a part for each image: where a text says so, else in front of the last."""
    if not count:
        return turns
    says = [MARK in str(turn.get("content") or "") for turn in turns]
    if not any(says):
        says[-1] = True
    return [
        {**turn, "content": placed(str(turn.get("content") or ""), count)} if is_place else turn
        for turn, is_place in zip(turns, says, strict=True)
    ]
