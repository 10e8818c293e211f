"""Images in a request: fields, and how they are read. Data URIs alone: nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from specctl.core.errors import FileError
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.image_files import MOST_BYTES, MOST_PIXELS, of_data_uri
from specctl.runtime.target.text.image_prompts import vision_of
from specctl.server.errors import ApiError, api_error
from specctl.server.requests.fields import Strict, Unused

MOST_IMAGES = 16  # of one request
MOST_PIXELS_IN_ALL = 4 * MOST_PIXELS  # of one request: 192 MiB in RGB
MOST_CHARS = 4 * MOST_BYTES // 3 + 64
MEDIA_TYPES = Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
Data = Annotated[str, Field(min_length=1, max_length=MOST_CHARS)]


class ImageUrl(Strict):
    """An address that holds the image itself: data:image/png;base64,..."""

    url: Data
    detail: Unused = None


class ImagePart(Strict):
    """An image in a user's turn."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def text(self) -> str:
        """Nothing of an image is said in words."""
        return ""


class ImageSource(Strict):
    """An image as Anthropic's API has it: its bytes, never an address."""

    type: Literal["base64"]
    media_type: MEDIA_TYPES
    data: Data


class ImageBlock(Strict):
    """An image in a user's turn of Anthropic's API."""

    type: Literal["image"]
    source: ImageSource
    cache_control: Unused = None

    def as_part(self) -> dict[str, Any]:
        """The part of a chat request that says the same."""
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


def read_images(target: Target, messages: Iterable[Any]) -> list[Any]:
    """The images of a conversation in order (PIL, RGB). ApiError and SpecctlError for a target that
    reads none, for more than are read, and for what is none."""
    vision_of(target)
    found = list(_parts(messages))
    if len(found) > MOST_IMAGES:
        message = f"messages: at most {MOST_IMAGES} images are read per request"
        raise ApiError(400, message, param="messages", code="invalid_value")
    images, left = list[Any](), MOST_PIXELS_IN_ALL
    for where, part in found:
        try:
            images.append(of_data_uri(part.image_url.url, where, min(left, MOST_PIXELS)))
        except FileError as error:  # of several images, the field says which
            refused = api_error(error)
            message = f"{where}: {refused.detail}"
            raise ApiError(400, message, param=where, code="invalid_value") from error
        left -= images[-1].width * images[-1].height
    return images


def _parts(messages: Iterable[Any]) -> Iterator[tuple[str, ImagePart]]:
    for at, message in enumerate(messages):
        content = message.content if isinstance(message.content, list) else ()
        for place, part in enumerate(content):
            if isinstance(part, ImagePart):
                yield f"messages[{at}].content[{place}].image_url.url", part
