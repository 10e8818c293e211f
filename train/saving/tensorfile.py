"""A safetensors file as a stream of bytes (https://huggingface.co/docs/safetensors).

8 bytes of header length, a JSON header, raw tensors. Writing it here streams tensor after tensor,
hashed as it goes, so that a save needs no second copy of the state in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import Tensor

from specctl.core.storage.files import write_bytes

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def tensor_chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file; widest dtypes first, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]
) -> str:
    """Write a safetensors file; returns its sha256."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    body = save(whole, metadata=dict(notes))
    write_bytes(path, body)
    return hashlib.sha256(body).hexdigest()
