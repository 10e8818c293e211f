"""Quantised checkpoints: whether they load here, and how many bytes are resident then.

transformers widens a checkpoint to sixteen bits where it has no kernel for its format (MXFP4
without Triton, FP8 on a CPU or an A100), so the size of the files says little. transformers itself
says before a weight is read what it would do, or what it misses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import AutoHfQuantizer

from specctl.core.errors import IncompatibleError

WIDE = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # numbers that are loaded in the requested dtype
STORED = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # others take one byte
BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitsandbytes": 4.5}  # of a weight
OLDEST_FP8 = ("a100", "a100-40gb", "a10", "rtx3090")  # GPUs without products of eight bits


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Of a safetensors header."""

    shape: tuple[int, ...]
    dtype: str

    def bytes(self, itemsize: int) -> int:
        """Once it is loaded in a dtype of that many bytes, left as it is if it is no plain
        number."""
        size = itemsize if self.dtype in WIDE else STORED.get(self.dtype, 1)
        return math.prod(self.shape) * size


def quantisation(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a transformers configuration, None if it is not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def stored_tensors(files: Iterable[Path]) -> list[StoredTensor]:
    """Every tensor of these files, from the headers alone."""
    return list(stored_by_name(files).values())


def stored_by_name(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The same by name."""
    from safetensors import safe_open

    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = StoredTensor(tuple(part.get_shape()), str(part.get_dtype()))
    return found


def resident_bytes(
    config: Any, files: Iterable[Path], parameters: int, itemsize: int, device: torch.device,
    where: str,
) -> int:  # fmt: skip
    """Bytes of a quantised checkpoint once it is loaded: `parameters` whole numbers where
    transformers widens it, else what is stored. IncompatibleError if it does not load here."""
    if is_widened(config, device, where):
        return parameters * itemsize
    return sum(tensor.bytes(itemsize) for tensor in stored_tensors(files))


def is_widened(config: Any, device: torch.device, where: str) -> bool:
    """Whether transformers would load it as a model of sixteen bits."""
    given = copy.deepcopy(config.quantization_config)
    method = (quantisation(config) or {}).get("quant_method")
    try:
        quantizer = AutoHfQuantizer.from_config(given, pre_quantized=True)
        place = None if device.type == "cpu" else {"": device}
        quantizer.validate_environment(device_map=place, dtype=torch.bfloat16)
    except Exception as error:  # each method's own: a missing library, a missing GPU, a bad field
        raise IncompatibleError(
            f"the checkpoint is quantised ({method}), and what reads it is not here",
            found=str(error).split("\n")[0][:200],
            expected="the libraries of that format, on a device that they support",
            do="install what is named, or take the checkpoint in bfloat16",
            where=where,
        ) from error
    if method == "compressed-tensors" and not getattr(quantizer, "use_fp8_kernel", False):
        return True  # its library unpacks every matrix for good in the first forward
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def check_places(config: Any, places: Mapping[str, Any], where: str) -> None:
    """Refuse a device map that the library of a quantised checkpoint does not follow."""
    given = copy.deepcopy(config.quantization_config)
    try:
        quantizer = AutoHfQuantizer.from_config(given, pre_quantized=True)
        quantizer.validate_environment(device_map=dict(places), dtype=torch.bfloat16)
    except Exception as error:  # each method's own
        method = (quantisation(config) or {}).get("quant_method")
        raise IncompatibleError(
            f"a checkpoint quantised by {method} cannot be spread like that",
            found=" ".join(str(error).split())[:200],
            expected="places that its library computes at",
            do="--set target.device_map=balanced (GPUs alone), or take the checkpoint in bfloat16",
            where=where,
        ) from error


def layer_share(config: Any, gpu: str | None, itemsize: int) -> float:
    """Of the bytes that layers take unquantised, the share that they take quantised on a GPU of
    that kind with its kernels installed (None: on a CPU, where little is). Reckoned from the
    bits of a weight."""
    about = quantisation(config)
    if about is None or gpu is None:
        return 1.0
    method = str(about.get("quant_method"))
    if method == "fp8" and gpu in OLDEST_FP8:
        return 1.0
    bits = BITS.get(method)
    if method in ("awq", "gptq"):
        bits = int(about.get("bits", 4)) + 20 / max(1, int(about.get("group_size", 128)))
    if method == "bitsandbytes" and about.get("load_in_8bit"):
        bits = 8.0
    return 1.0 if bits is None else bits / 8 / itemsize
