"""Images of training data as a target sees them: read, expanded among the tokens, and where they
stand in a text that is learned.

An image is named by the sha256 of its bytes. What its target's processor puts in the place of its
placeholder is known before the target writes an answer, so that an image that is missing or cannot
be read stops a run then, by its record; the vision tower reads it when the target reads its text.
Letters: B rows, S sequence.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import FileError, IncompatibleError
from specctl.core.forward.prompt_images import PromptImages, StoredImage
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.image_files import DATA, decoded, file_bytes, of_data_uri
from specctl.runtime.target.text.image_prompts import vision_of
from specctl.train.data.images.known_images import KnownImages
from specctl.train.data.records.chat import Encoded
from specctl.train.data.records.record_images import NOWHERE, count_parts, spelled_out
from specctl.train.data.records.records import Sample

MOST_KEPT = 1 << 29  # bytes of what the tower made of images that are kept for their next reading
MOST_SEEN = 16  # images of a record


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image of a prompt: where it is kept, the sha256 of its bytes, and the ids that stand for
    it in a prompt of its target."""

    source: str
    sha256: str
    ids: tuple[int, ...]


def bytes_of(source: str) -> bytes:
    """The bytes of a path or a data URI; FileError as `file_bytes`."""
    if source.startswith("data:"):
        return _uri_bytes(source)
    return file_bytes(source)


def _uri_bytes(source: str) -> bytes:
    found = DATA.match(source)
    if found is not None:
        try:
            return base64.b64decode(source[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            pass
    of_data_uri(source, "images")  # says why it cannot be read
    raise AssertionError("a data URI without bytes is refused")


def image_digests(
    sources: Sequence[str], where: str, known: KnownImages | None = None
) -> tuple[str, ...]:
    """sha256 of each image, of one that is `known` without a reading; FileError with the place of
    the record where one is missing."""
    if len(sources) > MOST_SEEN:
        raise FileError(
            "a record has too many images",
            where=where,
            found=str(len(sources)),
            expected=f"at most {MOST_SEEN}",
            do="leave some of them out",
        )
    if NOWHERE in sources:
        raise FileError(
            "a record has a place for an image, and no image",
            where=where,
            found='a part {"type": "image"} without a path or data',
            expected='"images": ["a.png"] beside the messages, or image_url parts',
            do="correct that record, or take it out of the data",
        )
    with at_record(where):
        if known is not None:
            return tuple(known.digest(source, bytes_of) for source in sources)
        return tuple(hashlib.sha256(bytes_of(source)).hexdigest() for source in sources)


@contextmanager
def at_record(where: str) -> Iterator[None]:
    """Errors of image files name the record that holds them."""
    try:
        yield
    except FileError as error:
        inside = "" if error.where in ("", "images") else f" ({error.where[:200]})"
        raise FileError(
            f"{error.what}{inside}",
            where=where,
            found=error.found,
            expected=error.expected,
            do="correct that record, or take it out of the data",
        ) from error


class ImageReader:
    """Reads the images of texts for a target; what its tower made of a text's images is kept for
    the next reading, up to `most` bytes. One writer: the thread that reads the target."""

    def __init__(self, target: Target, most: int = MOST_KEPT) -> None:
        self.vision, self.most = vision_of(target), most
        self._pieces: dict[tuple[int, ...], tuple[int, ...]] = {}  # the same ids once
        self._seen: OrderedDict[tuple[StoredImage, ...], PromptImages] = OrderedDict()
        self._bytes = 0

    def shown(
        self, sources: Sequence[str], digests: Sequence[str], where: str
    ) -> tuple[ShownImage, ...]:
        """The images of a record, each read once to know what stands for it. FileError with the
        place of the record for one that cannot be decoded."""
        found = list[ShownImage]()
        for source, digest in zip(sources, digests, strict=True):
            with at_record(where):
                image = self._image(source, digest)
                ids = self.vision.inputs([self.vision.place], [image]).tokens
            piece = self._pieces.setdefault(tuple(ids), tuple(ids))
            found.append(ShownImage(source, digest, piece))
        return tuple(found)

    def as_taken(self, sample: Sample, tokenizer: Any) -> Sample:
        """A record as that tokenizer writes it down: without a chat template as plain text."""
        if tokenizer.chat_template is not None:
            return sample
        said = tuple(spelled_out(message, self.vision.spelled) for message in sample.messages)
        return replace(sample, messages=said)

    def places(self, said: Sequence[Mapping[str, Any]], tokenizer: Any) -> int | None:
        """How many images stand in messages as they are written down; None where they are text."""
        return None if tokenizer.chat_template is None else count_parts(said)

    def expanded(
        self, ids: Sequence[int], images: Sequence[ShownImage], places: int | None = None
    ) -> list[int]:
        """A prompt that has a placeholder for each of the first `places` of these images (None: of
        as many as there are), with all that stands for each. ValueError where the chat template
        wrote others."""
        vision = self.vision
        found = sum(token == vision.place for token in ids)
        if found > len(images) or places not in (None, found):
            raise ValueError(miscounted(found, len(images) if places is None else places))
        if any(token in vision.unsaid and token != vision.place for token in ids):
            raise ValueError("the text spells a placeholder of what it does not hold")
        rest, whole = iter(images), list[int]()
        for token in ids:
            whole += next(rest).ids if token == vision.place else [token]
        return whole

    def seen(self, ids: Sequence[int], images: Sequence[StoredImage]) -> PromptImages:
        """What stands at the placeholders of a text, of which `ids` are the tokens: its images, by
        the tower. FileError where an image is another than it was."""
        key = tuple(images)
        found = self._seen.get(key)
        if found is not None:
            self._seen.move_to_end(key)
            return found
        tokens, after = list[int](), 0
        for image in images:
            tokens += [*ids[after : image.first], self.vision.place]
            after = image.end
        pictures = [self._image(image.source, image.sha256) for image in images]
        expanded, made = self.vision.see(tokens, pictures)
        assert len(expanded) == images[-1].end, "what stands for an image was known before"
        self._keep(key, made)
        return made

    def _image(self, source: str, digest: str) -> Any:
        data = bytes_of(source)
        if hashlib.sha256(data).hexdigest() != digest:
            raise FileError(
                "an image is another than when the data were prepared",
                where=source[:200],
                found="other bytes",
                expected=f"sha256 {digest[:12]}",
                do="put the image back, or choose another --out",
            )
        return decoded(data, "a data URI" if source.startswith("data:") else source)

    def _keep(self, key: tuple[StoredImage, ...], made: PromptImages) -> None:
        size = _bytes_of(made)
        if size > self.most:
            return
        self._seen[key] = made
        self._bytes += size
        while self._bytes > self.most:
            _, old = self._seen.popitem(last=False)
            self._bytes -= _bytes_of(old)


def _bytes_of(images: PromptImages) -> int:
    tensors = [images.row_LD, *images.deeper]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def miscounted(written: int, places: int) -> str:
    """Why a record is left out whose images the chat template loses or adds to."""
    return (
        f"the target's chat template writes {written} places for images, and the record has "
        f"{places}"
    )


def stored(ids: Sequence[int], images: Sequence[ShownImage]) -> tuple[StoredImage, ...]:
    """Where the images stand in the ids of a text, which may hold the first of them alone."""
    found, start, whole = list[StoredImage](), 0, [*ids]
    for image in images:
        piece = [*image.ids]
        first = next(
            (
                at
                for at in range(start, len(whole) - len(piece) + 1)
                if whole[at] == piece[0] and whole[at : at + len(piece)] == piece
            ),
            None,
        )
        if first is None:
            break
        start = first + len(piece)
        found.append(StoredImage(image.source, image.sha256, first, start))
    return tuple(found)


def image_sources(samples: Iterable[Sample]) -> dict[str, str]:
    """Where each image of samples is, by the sha256 of its bytes."""
    return {
        sha256: source
        for sample in samples
        for sha256, source in zip(sample.image_digests, sample.images, strict=True)
    }


def places_read(sample: Sample) -> int:
    """How many images stand before the last answer that is learned."""
    spoken = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    learned = [at for at in spoken if at not in sample.given]
    return count_parts(sample.messages[: learned[-1]]) if learned else 0


def with_images_expanded(
    encoded: Encoded, images: Sequence[ShownImage], reader: ImageReader
) -> Encoded:
    """The text with all that stands for its images, none of which is predicted."""
    mask, rest = list[bool](), iter(images)
    ids = reader.expanded(encoded.ids, images)
    for token, learned in zip(encoded.ids, encoded.mask, strict=True):
        is_place = token == reader.vision.place
        mask += [False] * len(next(rest).ids) if is_place else [learned]
    return Encoded(ids, mask)


def placeholders(batch: TrainBatch, unsaid: Sequence[int]) -> Tensor:
    """[B, S] bool: where an image stands, and no text."""
    inside_BS = torch.zeros_like(batch.ids_BS, dtype=torch.bool)
    for text in batch.images:
        for image in text.images:
            inside_BS[text.row, text.start + image.first : text.start + image.end] = True
    return inside_BS & torch.isin(batch.ids_BS, torch.tensor([*unsaid], device=inside_BS.device))


def check_vision(target: Target, where: str) -> None:
    """Refuse data with images for a target that reads none."""
    if target.vision is not None:
        return
    inside = target.inside_of
    found = "a language model" if inside is None else f"the text side of {inside}"
    raise IncompatibleError(
        f"the data hold images, and target {target.name} reads none",
        where=where,
        found=found,
        expected="a multimodal target with its vision, or data without images",
        do="--set data.images=drop learns the texts alone, as for a text-only draft model; or "
        + (
            "choose a target such as LLaVA or Qwen2-VL"
            if inside is None
            else "load it with its vision: specctl.load_target(NAME, images=True)"
        ),
    )


def no_images_here(what: str, do: str) -> IncompatibleError:
    """The error for what reads text alone, beside data with images."""
    return IncompatibleError(
        f"{what} does not go with images in the data",
        where="data.source",
        found="records with images",
        expected="text, or a run without it",
        do=do,
    )
