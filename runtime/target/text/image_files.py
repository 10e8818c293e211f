"""Images from files, bytes and data URIs, bounded before they are decoded.

What an image decodes to is said in its first bytes: its size is compared with a limit before a
pixel is made, so that a file of some kilobytes cannot fill the memory. Nothing is fetched: an
address on the network is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, IncompatibleError, SpecctlError
from specctl.core.messages.installed import library
from specctl.core.storage.bounded_read import open_regular

MOST_BYTES = 32 << 20  # of one image, as it is stored
MOST_PIXELS = 1 << 24  # of one image, decoded: 48 MiB in RGB
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
DATA = re.compile(r"data:image/(?:png|jpe?g|webp|gif|bmp);base64,", re.IGNORECASE)


def read_image(source: Any) -> Any:
    """A PIL image in RGB, turned as its camera says, of a path, bytes or a PIL image. Raises
    FileError for what is no image or too large."""
    if hasattr(source, "convert") and hasattr(source, "size"):
        return _upright(source, "an image of PIL", MOST_PIXELS)
    if isinstance(source, (str, Path)):
        return decoded(file_bytes(source), str(Path(source)))
    if isinstance(source, (bytes, bytearray)):
        return decoded(bytes(source), "images")
    raise SpecctlError(
        "this is no image",
        where="images",
        found=type(source).__name__,
        expected="a path, the bytes of a file, or an image of PIL",
        do='specctl.generate(target, "What is this?", images=["picture.png"])',
    )


def file_bytes(source: str | Path) -> bytes:
    """The bytes of an image's file; FileError where there is none, for one of more than MOST_BYTES,
    for a device or a pipe, and for an address."""
    path = Path(source)
    if re.match(r"[a-z]+://", str(source)):
        raise FileError(
            "an image is not fetched from the network",
            found=str(source)[:80],
            expected="a file on this machine",
            do="download it, and name the file",
        )
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise _too_large(f"{os.fstat(file.fileno()).st_size:,} bytes", str(path))
            return file.read(MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise FileError(
            "an image cannot be read",
            where=str(path)[:200],
            found=str(getattr(error, "strerror", None) or error)[:200],
            expected="a file with an image",
            do="name a file that is there",
        ) from error


def of_data_uri(uri: str, where: str, most_pixels: int = MOST_PIXELS) -> Any:
    """The image in a data URI; FileError for any other address, which is not fetched, and for one
    of more pixels than are left."""
    found = DATA.match(uri)
    if found is None:
        raise FileError(
            "an image must come in the request itself",
            where=where,
            found=f"an address that begins with {uri[:24]!r}",
            expected="data:image/png;base64,... (or jpeg, webp, gif, bmp); nothing is fetched",
            do="send the bytes of the image in a data URI",
        )
    try:
        data = base64.b64decode(uri[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        is_wrapped = any(char.isspace() for char in uri[found.end() :])
        raise FileError(
            "an image is not valid base64",
            where=where,
            found="line breaks or blanks in it" if is_wrapped else str(error)[:80],
            expected="its bytes in base64, on one line",
            do="leave out line breaks (base64 -w 0)" if is_wrapped else "encode its bytes anew",
        ) from error
    return decoded(data, where, most_pixels)


def decoded(data: bytes, where: str, most_pixels: int = MOST_PIXELS) -> Any:
    """The image that these bytes hold."""
    pillow = library("PIL.Image", "reading images", "images", kind=IncompatibleError)
    if len(data) > MOST_BYTES:
        raise _too_large(f"{len(data):,} bytes", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own limit on pixels is wider than ours
            with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                return _upright(image, where, most_pixels)
    except SpecctlError:
        raise
    except Exception as error:  # decoders raise many kinds for damaged files
        if isinstance(error, pillow.DecompressionBombError):
            raise _too_large(str(error)[:60], where) from error
        raise _damaged(error, where) from error


def _upright(image: Any, where: str, most_pixels: int) -> Any:
    """An image of PIL in RGB, of 8 bits a channel, turned as its camera says."""
    turned = library("PIL.ImageOps", "reading images", "images", kind=IncompatibleError)
    width, height = image.size
    if width < 1 or height < 1 or width * height > most_pixels:
        raise _too_large(f"{width:,} x {height:,} pixels", where, most_pixels)
    is_wide = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
    if image.mode in ("I", "F") and not is_wide:
        raise FileError(
            "an image has numbers of no known range",
            where=where,
            found=f"mode {image.mode} of PIL",
            expected="8 bits a channel, or 16 bits of grey",
            do='scale its numbers to 0 .. 255 and convert it to "RGB"',
        )
    try:
        image = turned.exif_transpose(image)
        if is_wide:  # PIL itself cuts them at 255: nearly all is white
            image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return image.convert("RGB")
    except Exception as error:  # decoders raise many kinds for damaged files
        raise _damaged(error, where) from error


def _damaged(error: Exception, where: str) -> FileError:
    found = f"{type(error).__name__}: {error}".replace("\n", " ")[:120]
    if " object at 0x" in found:  # an address in this process is nobody's business
        found = "bytes that are no image of a known format"
    return FileError(
        "an image cannot be decoded",
        where=where,
        found=found,
        expected=", ".join(FORMATS),
        do="save it as PNG",
    )


def _too_large(found: str, where: str, most_pixels: int = MOST_PIXELS) -> FileError:
    left = " left of those of all images" if most_pixels < MOST_PIXELS else ""
    return FileError(
        "an image is too large",
        where=where,
        found=found,
        expected=f"at most {MOST_BYTES >> 20} MiB and {most_pixels:,} pixels{left}",
        do="scale it down",
    )
