"""Blocks of a GGUF file in float32, by the library `gguf`: bit for bit what ggml reads.
Letters: B bytes of a row, I input width, R rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specctl.core.messages import installed
from specctl.core.storage.gguf_header import GgufTensor


def library() -> Any:
    """The part of the `gguf` package that widens blocks, or an error that says how it is
    installed."""
    return installed.library("gguf.quants", "a GGUF file as target", "gguf")


def numbers(tensor: GgufTensor, first: int, last: int) -> np.ndarray:
    """Rows `first` to `last` of a tensor as float32 [R, I]; a vector is one row."""
    return widened(stored_rows(tensor, first, last), tensor.kind.name)


def stored_rows(tensor: GgufTensor, first: int, last: int) -> np.ndarray:
    """The same rows as the file has them, uint8 [R, B]. ValueError where it has fewer."""
    rows = [1, *tensor.shape][-2] if len(tensor.shape) < 3 else math.prod(tensor.shape[:-1])
    assert 0 <= first <= last <= rows, (first, last, tensor)
    return np.fromfile(
        tensor.path,
        dtype=np.uint8,
        count=(last - first) * tensor.row_bytes,
        offset=tensor.offset + first * tensor.row_bytes,
    ).reshape(last - first, tensor.row_bytes)


def widened(raw_RB: np.ndarray, kind: str) -> np.ndarray:
    """Rows of bytes of that type as float32."""
    if kind == "F32":
        return raw_RB.view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return raw_RB.view("<f2").astype(np.float32)
    gguf = library()
    found: np.ndarray = gguf.dequantize(raw_RB, gguf.GGMLQuantizationType[kind])
    return found
