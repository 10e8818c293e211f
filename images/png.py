"""Grey pictures as PNG files, and many pictures as one sheet. No library of images is needed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specctl.core.storage.files import write_bytes
from specctl.images.digits import Pixels

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GAP, GREY = 2, 96  # pixels between pictures of a sheet, and how bright they are


def png_bytes(pixels: Pixels) -> bytes:
    """A PNG of 8 bits grey, of pixels uint8 [height, width]."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = np.pad(pixels, ((0, 0), (1, 0)))  # each line begins with its filter, none
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
    return SIGNATURE + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def sheet(pictures: Sequence[Pixels], columns: int, zoom: int = 1) -> Pixels:
    """Pictures of one size in rows of `columns`, each pixel `zoom` pixels wide and high."""
    height, width = (zoom * n + GAP for n in pictures[0].shape)
    rows = -(-len(pictures) // columns)
    made = np.full((rows * height + GAP, min(columns, len(pictures)) * width + GAP), GREY, np.uint8)
    for index, picture in enumerate(pictures):
        y, x = (index // columns) * height + GAP, (index % columns) * width + GAP
        large = picture.repeat(zoom, 0).repeat(zoom, 1)
        made[y : y + large.shape[0], x : x + large.shape[1]] = large
    return made


def write_png(path: Path, pixels: Pixels) -> None:
    """Write the picture, whole or not at all."""
    write_bytes(path, png_bytes(pixels))
