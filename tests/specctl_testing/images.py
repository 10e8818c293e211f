"""A recipe of pictures small enough to be trained in a test, and PNG files read by definition."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from specctl.train.pretrain.pictures import FIRST_CODE

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-digits.yaml"
GRID, CODES = 4, 8
LENGTH = GRID**2 + 2


def read_png(data: bytes) -> np.ndarray:
    """The pixels of a grey PNG without filters, read by its definition."""
    parts, at = {}, 8
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            name + body
        )
        parts[name], at = body, at + 12 + size
    width, height, *kind = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert kind == [8, 0, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def small_pictures(path: Path, **more: Any) -> Path:
    raw = yaml.safe_load(RECIPE.read_text())
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 32}
    raw["model"] |= {**sizes, "vocab_size": FIRST_CODE + CODES}
    raw["images"] |= {"pictures": 160, "heldout": 20, "grid": GRID, "codes": CODES}
    rows, steps = 16 * LENGTH, 20
    raw["train"] |= {
        "seq_len": LENGTH, "decay_seq_len": LENGTH, "micro_batch": 16, "total_tokens": steps * rows,
        "decay_tokens": 5 * rows, "warmup_tokens": 2 * rows, **more,
    }  # fmt: skip
    raw["report"] |= {"log_tokens": rows, "eval_every_tokens": steps * rows, "eval_tokens": 360}
    path.write_text(yaml.safe_dump(raw))
    return path
