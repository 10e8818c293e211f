"""The system calls of a checkpoint in one class, and a safetensors writer that hashes as it goes.

The format is that of https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON
header, raw tensors. Writing it here streams tensor after tensor, so that a save needs no second
copy of the state in memory, and every call that can fail is one that a test can make fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Disk:
    """What a save asks of the operating system."""

    def free(self, folder: Path) -> int:
        """Bytes that an ordinary user may still write."""
        return shutil.disk_usage(folder).free

    def mkdir(self, folder: Path) -> None:
        folder.mkdir()

    def open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def replace(self, source: Path, to: Path) -> None:
        os.replace(source, to)

    def symlink(self, to: str, path: Path) -> None:
        os.symlink(to, path)

    def fsync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def write_file(disk: Disk, path: Path, chunks: Iterator[memoryview]) -> FileEntry:
    """Write, fsync and hash a new file."""
    digest, total = hashlib.sha256(), 0
    descriptor = disk.open(path)
    try:
        for chunk in chunks:
            digest.update(chunk)
            total += len(chunk)
            while len(chunk):
                chunk = chunk[disk.write(descriptor, chunk) :]
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(total, digest.hexdigest())


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


def file_entry(path: Path) -> FileEntry:
    """Size and hash of a file as it lies on the disk."""
    digest, total = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            total += len(chunk)
    return FileEntry(total, digest.hexdigest())
