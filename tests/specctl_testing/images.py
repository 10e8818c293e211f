"""A recipe of pictures small enough to be trained in a test, and PNG files read by definition."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from specctl.images.grid_folder import build_net
from specctl.images.grid_net import GridNet
from specctl.images.grid_shape import GridShape
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


def small_net(kind: str, grid: int) -> GridNet:
    """A model with weights at random, in float64: what is equal is equal to the last digits."""
    torch.manual_seed(3)
    size = FIRST_CODE + CODES
    shape = GridShape(kind, grid, CODES, FIRST_CODE, size, 16, 4, 2, 24, 1e-5, 100.0)
    made = build_net(shape).double().eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.4 + (parameter.ndim == 1))
    return made


def small_pictures(path: Path, kind: str = "digits", **more: Any) -> Path:
    raw = yaml.safe_load((RECIPE.parent / f"tiny-{kind}.yaml").read_text())
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "head_dim": 8} if kind == "digits" else {}
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
